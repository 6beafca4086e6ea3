"""Matrix products with a weight that stays: plain on a GPU and in training, packed for decoding on a CPU.

On a GPU a weight may be rounded to 8 bits, with a scale for each output; it stays in its order.

With few rows a product is bound by reading its weight, and a CPU reads fastest front to back. `pack` therefore stores a
weight as panels of outputs for our own kernel (kernels/cpu.c), or, without a C compiler and in bf16, in oneDNN's
layout; docs/decisions/001-packed-weights.md has the measurements. Packing only permutes: `dense_weight` undoes it.
"""

import ctypes
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.kernels import cpu
from shallowdraft.shapes import ModelShape

MIN_ROWS = 4  # oneDNN's kernels for one to three rows read memory more slowly than the one for four

LARGEST_BYTE = 127

Packing = Literal["none", "onednn", "panels", "bytes"]
"""As it is; oneDNN's layout; ours; ours with 8-bit weights and a scale for each output."""


class Projection(nn.Module):
    """y = x Wᵀ + b; `gated` marks a weight whose second half of outputs is gated by the first."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool, gated: bool = False) -> None:
        super().__init__()
        self.outputs, self.inputs, self.gated = outputs, inputs, gated
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.scale: nn.Parameter | None = None
        self.packing: Packing = "none"
        self._dtype = self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.packing in _OURS and x.is_cuda:  # many rows: few would go to the Triton kernels
            return F.linear(x, self.dense_weight(), self.bias)
        if self.packing in _OURS:
            return self._in_panels(x)
        return F.linear(x, self.weight, self.bias) if self.packing == "none" else self._in_onednn(x)

    def pack(self, packing: Packing) -> None:
        """Repack the weight for decoding; afterwards it cannot be trained."""
        weight = self.weight.detach()
        if packing == "bytes" and weight.is_cuda:
            self._dtype = weight.dtype
            rounded, scale = _rounded(weight.float())
            self.weight, self.scale = _frozen(rounded), _frozen(scale.squeeze(1))
        elif packing in _OURS:
            assert weight.dtype == torch.float32
            assert weight.device.type == "cpu"
            if packing == "bytes":
                weight, scale = _rounded(weight)
                self.scale = _frozen(_to_panels(scale, self.gated))
            self.bias = None if self.bias is None else _frozen(_to_panels(self.bias.detach()[:, None], self.gated))
            self.weight = _frozen(_to_panels(weight, self.gated))
            self._product = cpu.PackedWeight(*self.pointers(), self.outputs, self.inputs)
        elif packing == "onednn":
            self.weight = _frozen(torch.ops.mkldnn._reorder_linear_weight(weight))
        self.packing = packing

    def dense_weight(self) -> Tensor:
        """The weight [outputs, inputs] as it was before packing."""
        if self.scale is not None and self.weight.is_cuda:
            return (self.weight * self.scale[:, None]).to(self._dtype)
        if self.packing in _OURS:
            weight = _from_panels(self.weight, self.outputs, self.gated)
            return weight if self.scale is None else weight * _from_panels(self.scale, self.outputs, self.gated)
        return self.weight.to_dense() if self.packing == "onednn" else self.weight

    def dense_bias(self) -> Tensor | None:
        if self.bias is None or self.packing not in _OURS or self.bias.is_cuda:
            return self.bias
        return _from_panels(self.bias, self.outputs, self.gated).squeeze(1)

    def product(self) -> cpu.PackedWeight:
        """The packed weight as the C kernel takes it."""
        return self._product

    def pointers(self) -> tuple[int | None, ...]:
        return tuple(None if part is None else part.data_ptr() for part in (self.weight, self.scale, self.bias))

    def _in_panels(self, x: Tensor) -> Tensor:
        library = cpu.library()
        assert library is not None
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        rows, threads = x.numel() // self.inputs, torch.get_num_threads()
        library.product(ctypes.byref(self._product), x.data_ptr(), rows, y.data_ptr(), threads)
        return y

    def _in_onednn(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        padded = x if rows >= MIN_ROWS else F.pad(x.reshape(rows, -1), (0, 0, 0, MIN_ROWS - rows))
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(padded, self.weight, self.bias, "none", [], "")
        return product if rows >= MIN_ROWS else product[:rows].view(*x.shape[:-1], -1)


_OURS = ("panels", "bytes")


def best_packing(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Packing:
    """How weights of this kind are read fastest here."""
    if device.type != "cpu":
        return "none"
    if dtype == torch.float32 and shape.head_dim % cpu.lanes() == 0 and cpu.library() is not None:
        return "panels"
    if not torch.backends.mkldnn.is_available():
        return "none"
    bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "onednn" if dtype == torch.float32 or bf16 else "none"


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in 8 bits, and what each row [N, 1] is to be multiplied with."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / LARGEST_BYTE
    return (weight / scale).round().to(torch.int8), scale


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _to_panels(weight: Tensor, gated: bool) -> Tensor:
    """[N, K] -> [panels, K, 2 lanes], the last filled with zeros; gated: a panel has gates and the values they gate."""
    if gated:
        gate, value = weight.chunk(2)
        pairs = torch.stack((_in_blocks(gate, cpu.lanes()), _in_blocks(value, cpu.lanes())), 1)
        return pairs.flatten(1, 2).transpose(1, 2).contiguous()
    return _in_blocks(weight, 2 * cpu.lanes()).transpose(1, 2).contiguous()


def _from_panels(panels: Tensor, outputs: int, gated: bool) -> Tensor:
    rows: Tensor = panels.transpose(1, 2)
    if gated:
        halves: Tensor = rows.reshape(len(rows), 2, cpu.lanes(), -1).transpose(0, 1).flatten(1, 2)
        return halves[:, : outputs // 2].reshape(outputs, -1)
    return rows.flatten(0, 1)[:outputs].contiguous()


def _in_blocks(weight: Tensor, rows: int) -> Tensor:
    """[N, K] -> [blocks, rows, K], filled up with zeros."""
    return F.pad(weight, (0, 0, 0, -len(weight) % rows)).view(-1, rows, weight.shape[1])
