"""A decoder's layers as one call into the C kernel; what it computes is `Decoder.layers`, its reference."""

import ctypes

import torch
from torch import Tensor, nn

from shallowdraft.kernels import cpu
from shallowdraft.models.cache import KVCache
from shallowdraft.shapes import ModelShape


class NativeLayers:
    """The packed blocks of a decoder, by address; the decoder must outlive it."""

    def __init__(self, shape: ModelShape, blocks: nn.ModuleList, norm: nn.Module | None) -> None:
        self._layers = (cpu.Layer * shape.layers)(*map(_layer, blocks, shape.windows()))
        self._model = cpu.Model(
            shape.layers,
            shape.d_model,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.ffn,
            shape.gated,
            cpu.ACTIVATIONS[shape.activation],
            shape.post_norm,
            shape.norm_eps,
            self._layers,
            _norm(norm),
        )
        heads = 2 * shape.heads + 2 * shape.kv_heads
        self._floats_per_row = shape.d_model + heads * shape.head_dim + shape.ffn

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Embedded tokens [B, T, C] at positions [B, T] -> hidden states [B, T, C]; x is overwritten."""
        library = cpu.library()
        assert library is not None
        rows, tokens, _ = x.shape
        x, positions = x.contiguous(), positions.contiguous()
        threads = torch.get_num_threads()
        room = rows * tokens * self._floats_per_row + threads * cpu.QUERIES * (cache.slots + cpu.LANES)
        scratch = x.new_empty(room)
        cos, sin = (None, None) if cache.rope is None else (table.data_ptr() for table in cache.rope)
        library.forward(
            ctypes.byref(self._model),
            x.data_ptr(),
            positions.data_ptr(),
            rows,
            tokens,
            cache.kv.data_ptr(),
            cache.slots,
            cos,
            sin,
            scratch.data_ptr(),
            threads,
        )
        return x


def _layer(block: nn.Module, window: int | None) -> cpu.Layer:
    norms = (_norm(getattr(block, name)) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm"))
    products = (getattr(block, name).product() for name in ("qkv", "out", "up", "down"))
    return cpu.Layer(*norms, *products, window or 0)


def _norm(norm: nn.Module | None) -> cpu.Norm:
    if norm is None:
        return cpu.Norm(None, None)
    bias = getattr(norm, "bias", None)
    weight = norm.get_parameter("weight")
    return cpu.Norm(weight.data_ptr(), None if bias is None else bias.data_ptr())
