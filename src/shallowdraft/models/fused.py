"""A decoder's layers as Triton kernels, five per layer; `Decoder.layers` is their reference.

A pass over many rows is not bound by reading the weights: there cuBLAS multiplies, and only attention is ours.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shallowdraft.models.cache import KVCache
from shallowdraft.models.projection import Projection
from shallowdraft.shapes.shape import ModelShape

if TYPE_CHECKING:
    from shallowdraft.kernels.gpu import AttentionShape, InputNorm, Weight

MAX_ROWS = 32  # tokens of a pass, over all texts, up to which our products are faster than cuBLAS
MAX_INT8_ROWS = 128  # the same for 8-bit weights, which cuBLAS cannot read
MAX_QUERIES = 64  # queries of a text, over tokens and heads, that share a key/value head

log = logging.getLogger(__name__)


def unsupported_reason(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a decoder cannot run on these kernels, as the predicate of "our kernels …"; None if it can."""
    if device.type != "cuda" or dtype == torch.float32:
        return "are for 16-bit weights on a GPU"
    if shape.encoder:
        return "are for decoder-only models"
    if shape.post_norm or not shape.final_norm or shape.embed_dim != shape.d_model:
        return "are for pre-norm models"
    if shape.gated != (shape.activation == "silu") or (shape.gated and shape.layer_norm):
        return "are for SwiGLU after RMSNorm, and for FFNs without a gate"
    return None


def fuse(
    shape: ModelShape,
    blocks: nn.ModuleList,
    norm: nn.Module | None,
    head: Projection,
    dtype: torch.dtype,
    skips: Collection[int] = (),
    kind: "type[FusedLayers] | None" = None,
) -> "FusedLayers | None":
    """Return a decoder's layers on these kernels, or None with a warning if they do not support it."""
    if reason := unsupported_reason(shape, dtype, head.weight.device):
        log.warning("%s runs on PyTorch's own operations, several times slower: our kernels %s", shape, reason)
        return None
    return (kind or FusedLayers)(shape, blocks, norm, head, skips=skips)


class FusedLayers:
    """The blocks of a decoder, its final norm and its head."""

    def __init__(
        self,
        shape: ModelShape,
        blocks: nn.ModuleList,
        norm: Any,
        head: Projection,
        tilings: Any = None,
        skips: Collection[int] = (),
    ) -> None:
        from shallowdraft.kernels import gpu

        self._gpu, self._chip, self._tiling = gpu, gpu.chip(head.weight.device), tilings or gpu.tiling
        self._shared = shape.heads // shape.kv_heads
        self._activation = gpu.GATED if shape.gated else shape.activation
        self._int8 = head.scale is not None
        self._skips = skips
        self._layers = [
            _Layer(
                block,
                gpu.AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, window, shape.norm_eps),
                None if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight),
                gpu.InputNorm(block.attn_norm.weight, shape.norm_eps),
                gpu.InputNorm(block.ffn_norm.weight, shape.norm_eps),
                _weight(block.qkv, block.attn_norm),
                _weight(block.out),
                _weight(block.up, block.ffn_norm),
                _weight(block.down),
            )
            for block, window in zip(cast("list[Any]", blocks), shape.windows(), strict=True)
        ]
        self._norm, self._head = gpu.InputNorm(norm.weight, shape.norm_eps), _weight(head, norm)
        self._final: tuple[Any, Any] = norm, head
        self._counters: dict[int, Tensor] = {}

    def supports(self, texts: int, tokens: int) -> bool:
        """Return whether these kernels support a pass over `tokens` tokens of each text."""
        return tokens * self._shared <= MAX_QUERIES and (not self._int8 or texts * tokens <= MAX_INT8_ROWS)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return the rows [B, T, C] of an embedding table for tokens [B, T]; a token past its end has the last row."""
        return self._gpu.embed(tokens, table, pdl=self._chip.early)

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Run all layers on embedded tokens [B, T, C] at positions [B, T]; the final norm is left to `largest`."""
        size = x.shape
        x, positions = x.reshape(-1, size[-1]), positions.contiguous()
        for index, layer in enumerate(self._layers):
            if 2 * index not in self._skips:
                x = self._with_attention(x, positions, layer, cache, cache.layers[index])
            if 2 * index + 1 not in self._skips:
                x = self._with_ffn(x, layer)
        return x.view(size)

    def _with_attention(
        self, x: Tensor, positions: Tensor, layer: "_Layer", cache: KVCache, slots: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return x [B * T, C] with a layer's attention added; `slots` are the layer's keys and values in the cache."""
        block, many = layer.block, self._many(x)
        qkv = block.qkv(block.attn_norm(x)) if many else self._product(x, layer.qkv, norm=layer.attn_norm)
        mixed = self._gpu.attend(
            qkv,
            positions,
            *slots,
            cache.rope,
            layer.heads,
            gains=layer.gains,
            counters=self._free_counters(x.device, len(positions) * layer.heads.groups),
            splits=self._gpu.splits(self._chip, len(positions), layer.heads.groups, cache.slots),
            pdl=self._chip.early,
        )
        if many:
            out: Tensor = block.out(mixed)
            return x + out
        return self._added(x, mixed, layer.out)

    def _with_ffn(self, x: Tensor, layer: "_Layer") -> Tensor:
        """Return x [B * T, C] with a layer's FFN added."""
        block = layer.block
        if self._many(x):
            fed: Tensor = block.feed(block.ffn_norm(x))
            return x + fed
        inner = self._product(x, layer.up, norm=layer.ffn_norm, activation=self._activation)
        return self._added(x, inner, layer.down)

    def _added(self, x: Tensor, inner: Tensor, weight: "Weight") -> Tensor:
        """Return x plus the product of `inner` with a weight."""
        return self._product(inner, weight, residual=x)

    def largest(self, x: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """Return the largest of the first `vocab` logits and its token, [B, T] each, for x [B, T, C] without a norm."""
        size = x.shape[:-1]
        x = x.reshape(-1, x.shape[-1]).contiguous()  # x may hold every T-th row of another tensor
        if self._many(x):
            norm, head = self._final
            best, token = head(norm(x))[:, :vocab].max(-1)
        else:
            tiling = self._tiling(self._chip, self._head.matrix.shape[0], x.shape[1], len(x), False)
            best, token = self._gpu.largest(x, self._head, tiling, vocab, norm=self._norm, pdl=self._chip.early)
        return best.view(size), token.view(size)

    def _many(self, x: Tensor) -> bool:
        """Return whether PyTorch's products are faster than ours for the rows of x."""
        return len(x) > MAX_ROWS and not self._int8

    def _product(
        self,
        x: Tensor,
        weight: "Weight",
        *,
        norm: "InputNorm | None" = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [B * T, K] with a weight [N, K]; the norm before it, activation and residual are in the kernel."""
        outputs, inputs = weight.matrix.shape
        tiling = self._tiling(self._chip, outputs, inputs, len(x), activation == self._gpu.GATED)
        return self._gpu.product(
            x, weight, tiling, norm=norm, activation=activation, residual=residual, pdl=self._chip.early
        )

    def _free_counters(self, device: torch.device, count: int) -> Tensor:
        """Return counters that attention leaves at 0; they are never replaced, because CUDA graphs hold the address."""
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._counters[count]


@dataclass(frozen=True)
class _Layer:
    """A block in the form that the kernels read."""

    block: Any
    heads: "AttentionShape"
    gains: tuple[Tensor, Tensor] | None
    attn_norm: "InputNorm"
    ffn_norm: "InputNorm"
    qkv: "Weight"
    out: "Weight"
    up: "Weight"
    down: "Weight"


def _weight(projection: Projection, norm: Any = None) -> "Weight":
    """Return a weight for the kernels, with the effect of a LayerNorm before it on each output.

    W (gain (x - m) s + b) + bias = s (W gain x - m shift) + (W b + bias), with shift = W gain.
    """
    from shallowdraft.kernels import gpu

    if not isinstance(norm, nn.LayerNorm):
        return gpu.Weight(projection.weight, projection.scale, projection.bias)
    dense = projection.dense_weight().float()
    added = dense @ norm.bias.float()
    bias = added if projection.bias is None else added + projection.bias.float()
    return gpu.Weight(projection.weight, projection.scale, bias, dense @ norm.weight.float())
