"""A decoder's layers as Triton kernels, five each; what they compute is `Decoder.layers`, their reference.

Where rows are many, reading the weights is no longer all: there cuBLAS multiplies, and attention alone is ours.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shallowdraft.models.cache import KVCache
from shallowdraft.models.projection import Projection
from shallowdraft.shapes import ModelShape

if TYPE_CHECKING:
    from shallowdraft.kernels.gpu import AttentionShape, InputNorm, Weight

MAX_ROWS = 32  # tokens of a pass, over all texts, up to which our products are faster than cuBLAS
MAX_ROUNDED_ROWS = 128  # with weights in 8 bits, which cuBLAS does not take
MAX_QUERIES = 64  # of a text, that share a key/value head

log = logging.getLogger(__name__)


def why_not(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps a decoder from running on these kernels; None if nothing does."""
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
    """The layers on these kernels; None, said once, where they cannot be."""
    if reason := why_not(shape, dtype, head.weight.device):
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
        self._rounded = head.scale is not None
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

    def takes(self, texts: int, tokens: int) -> bool:
        """Whether a pass over so many tokens of each text is for these kernels."""
        return tokens * self._shared <= MAX_QUERIES and (not self._rounded or texts * tokens <= MAX_ROUNDED_ROWS)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Tokens [B, T] -> their rows [B, T, C] of an embedding; one that it lacks has the last."""
        return self._gpu.embed(tokens, table, pdl=self._chip.early)

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Embedded tokens [B, T, C] at positions [B, T] -> the residual stream [B, T, C] before the final norm."""
        size = x.shape
        x, positions = x.reshape(-1, size[-1]), positions.contiguous()
        for index, layer in enumerate(self._layers):
            if 2 * index not in self._skips:
                x = self._attended(x, positions, layer, cache, cache.layers[index])
            if 2 * index + 1 not in self._skips:
                x = self._fed(x, layer)
        return x.view(size)

    def _attended(
        self, x: Tensor, positions: Tensor, layer: "_Layer", cache: KVCache, slots: tuple[Tensor, Tensor]
    ) -> Tensor:
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

    def _fed(self, x: Tensor, layer: "_Layer") -> Tensor:
        block = layer.block
        if self._many(x):
            fed: Tensor = block.feed(block.ffn_norm(x))
            return x + fed
        inner = self._product(x, layer.up, norm=layer.ffn_norm, activation=self._activation)
        return self._added(x, inner, layer.down)

    def _added(self, x: Tensor, inner: Tensor, weight: "Weight") -> Tensor:
        """A product onto the residual stream."""
        return self._product(inner, weight, residual=x)

    def largest(self, x: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """Residual stream [B, T, C] -> the largest of the first `vocab` logits and its token, [B, T] each."""
        size = x.shape[:-1]
        x = x.reshape(-1, x.shape[-1]).contiguous()  # every second row is a view too
        if self._many(x):
            norm, head = self._final
            best, token = head(norm(x))[:, :vocab].max(-1)
        else:
            tiling = self._tiling(self._chip, self._head.matrix.shape[0], x.shape[1], len(x), False)
            best, token = self._gpu.largest(x, self._head, tiling, vocab, norm=self._norm, pdl=self._chip.early)
        return best.view(size), token.view(size)

    def _many(self, x: Tensor) -> bool:
        """Whether rows x are so many that PyTorch's products are faster than ours."""
        return len(x) > MAX_ROWS and not self._rounded

    def _product(
        self,
        x: Tensor,
        weight: "Weight",
        *,
        norm: "InputNorm | None" = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        outputs, inputs = weight.matrix.shape
        tiling = self._tiling(self._chip, outputs, inputs, len(x), activation == self._gpu.GATED)
        return self._gpu.product(
            x, weight, tiling, norm=norm, activation=activation, residual=residual, pdl=self._chip.early
        )

    def _free_counters(self, device: torch.device, count: int) -> Tensor:
        """Zeros that attention leaves as zeros; never replaced, because captured iterations know them by address."""
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._counters[count]


@dataclass(frozen=True)
class _Layer:
    """A block as the kernels take it."""

    block: Any
    heads: "AttentionShape"
    gains: tuple[Tensor, Tensor] | None
    attn_norm: "InputNorm"
    ffn_norm: "InputNorm"
    qkv: "Weight"
    out: "Weight"
    up: "Weight"
    down: "Weight"


def _weight(of: Projection, norm: Any = None) -> "Weight":
    """With what a LayerNorm before it does to each output."""
    from shallowdraft.kernels import gpu

    if not isinstance(norm, nn.LayerNorm):
        return gpu.Weight(of.weight, of.scale, of.bias)
    dense = of.dense_weight().float()
    added = dense @ norm.bias.float()
    bias = added if of.bias is None else added + of.bias.float()
    return gpu.Weight(of.weight, of.scale, bias, dense @ norm.weight.float())
