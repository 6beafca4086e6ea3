"""A decoder's layers as Triton kernels, five each; what they compute is `Decoder.layers`, their reference."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.models.cache import KVCache
from shallowdraft.shapes import ModelShape

MAX_ROWS = 128  # tokens of a pass, over all texts; far above, a product is no longer bound by reading its weight
MAX_QUERIES = 64  # of a text, that share a key/value head
FEW_ROWS = 16  # above, cuBLAS is faster than our products

log = logging.getLogger(__name__)


def why_not(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps a decoder from running on these kernels; None if nothing does."""
    if device.type != "cuda" or dtype == torch.float32:
        return "are for 16-bit weights on a GPU"
    if shape.layer_norm or shape.post_norm or not shape.gated or shape.activation != "silu":
        return "are for pre-norm models with RMSNorm and SwiGLU"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "need triton, which is not installed"
    return None


def of_blocks(
    shape: ModelShape, blocks: nn.ModuleList, dtype: torch.dtype, device: torch.device
) -> "FusedLayers | None":
    """The layers on these kernels; None, said once, where they cannot be."""
    if reason := why_not(shape, dtype, device):
        log.warning("%s runs on PyTorch's own operations, several times slower: our kernels %s", shape, reason)
        return None
    return FusedLayers(shape, blocks)


class FusedLayers:
    """The blocks of a decoder; the decoder must outlive it."""

    def __init__(self, shape: ModelShape, blocks: nn.ModuleList, tilings: Any = None) -> None:
        from shallowdraft.kernels import gpu

        self._gpu = gpu
        self._blocks: list[Any] = list(blocks)
        self.tiling = tilings or gpu.tiling
        self._eps = shape.norm_eps
        self._shared = shape.heads // shape.kv_heads
        self._heads = [
            gpu.Heads(shape.heads, shape.kv_heads, shape.head_dim, window, shape.norm_eps) for window in shape.windows()
        ]
        self._counters: dict[int, Tensor] = {}

    def takes(self, texts: int, tokens: int) -> bool:
        """Whether a pass over so many tokens of each text is for these kernels."""
        return texts * tokens <= MAX_ROWS and tokens * self._shared <= MAX_QUERIES

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Embedded tokens [B, T, C] at positions [B, T] -> the residual stream [B, T, C] before the final norm."""
        gpu, size = self._gpu, x.shape
        pdl = gpu.starts_early(x.device)
        x, positions = x.reshape(-1, size[-1]), positions.contiguous()
        for block, heads, (keys, values) in zip(self._blocks, self._heads, cache.layers, strict=True):
            gains = None if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight)
            qkv = self._product(x, block.qkv, norm=block.attn_norm, pdl=pdl)
            mixed = gpu.attend(
                qkv,
                positions,
                keys,
                values,
                cache.rope,
                heads,
                gains=gains,
                counters=self._free_counters(x.device, len(positions) * heads.groups),
                splits=gpu.splits(len(positions), heads.groups, cache.slots),
                pdl=pdl,
            )
            x = self._product(mixed, block.out, residual=x, pdl=pdl)
            inner = self._product(x, block.up, norm=block.ffn_norm, gated=True, pdl=pdl)
            x = self._product(inner, block.down, residual=x, pdl=pdl)
        return x.view(size)

    def largest(self, x: Tensor, norm: Any, head: Any, vocab: int) -> tuple[Tensor, Tensor]:
        """Residual stream [B, T, C] -> the largest of the first `vocab` logits and its token, [B, T] each."""
        gpu, size = self._gpu, x.shape[:-1]
        x = x.reshape(-1, x.shape[-1])
        tiling = self.tiling(head.weight.shape[0], x.shape[1], len(x), False)
        pdl = gpu.starts_early(x.device)
        gain, scales = norm.weight, head.scale
        best, token = gpu.largest(x, head.weight, tiling, vocab, scales=scales, gain=gain, eps=self._eps, pdl=pdl)
        return best.view(size), token.view(size)

    def _product(
        self,
        x: Tensor,
        of: Any,
        *,
        norm: Any = None,
        residual: Tensor | None = None,
        gated: bool = False,
        pdl: bool,
    ) -> Tensor:
        if len(x) > FEW_ROWS and of.scale is None:
            y: Tensor = of(x if norm is None else norm(x))
            if gated:
                gate, up = y.chunk(2, -1)
                y = F.silu(gate) * up
            return y if residual is None else residual + y
        tiling = self.tiling(of.weight.shape[0], x.shape[1], len(x), gated)
        gain = None if norm is None else norm.weight
        return self._gpu.product(
            x,
            of.weight,
            tiling,
            scales=of.scale,
            gain=gain,
            eps=self._eps,
            bias=of.bias,
            residual=residual,
            gated=gated,
            pdl=pdl,
        )

    def _free_counters(self, device: torch.device, count: int) -> Tensor:
        """Zeros that attention leaves as zeros; never replaced, because captured iterations know them by address."""
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._counters[count]
