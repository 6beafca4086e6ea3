"""Linear layers: plain in training and on a GPU, with the weight packed for decoding on a CPU.

With few rows a product is bound by reading its weight, and a CPU reads fastest front to back. `pack` therefore stores a
weight as panels of outputs for our own kernel (kernels/cpu.c), or, without a C compiler and in bf16, in oneDNN's
layout; docs/decisions/001-packed-weights.md has the measurements. Packing only permutes: `dense_weight` undoes it.

A weight may also be rounded to 8-bit integers with a scale for each output: in panels on a CPU, in its usual order on a
GPU. Shapes: N outputs, K inputs.
"""

import ctypes
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.kernels import cpu
from shallowdraft.shapes.shape import ModelShape

MIN_ROWS = 4  # oneDNN's kernels for one to three rows read memory more slowly than the one for four

LARGEST_INT8 = 127  # -128 is not used, so that scales are symmetric

Packing = Literal["none", "onednn", "panels", "int8"]
"""[N, K] as in training; oneDNN's layout; panels for our kernel; 8-bit integers (panels on a CPU, [N, K] on a GPU)."""


class Projection(nn.Module):
    """y = x Wᵀ + b. In a `gated` weight the first half of the outputs gates the second."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool, gated: bool = False) -> None:
        super().__init__()
        self.outputs, self.inputs, self.gated = outputs, inputs, gated
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.scale: nn.Parameter | None = None
        self.packing: Packing = "none"
        self._dtype = self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.packing in _OURS and x.is_cuda:  # many rows: the Triton kernels take few
            return F.linear(x, self.dense_weight(), self.bias)
        if self.packing in _OURS:
            return self._in_panels(x)
        return F.linear(x, self.weight, self.bias) if self.packing == "none" else self._in_onednn(x)

    def pack(self, packing: Packing) -> None:
        """Repack the weight for decoding; it cannot be trained afterwards."""
        weight = self.weight.detach()
        if packing == "int8" and weight.is_cuda:
            self._dtype = weight.dtype
            rounded, scale = round_to_int8(weight.float())
            self.weight, self.scale = _frozen(rounded), _frozen(scale.squeeze(1))
        elif packing in _OURS:
            assert weight.dtype == torch.float32
            assert weight.device.type == "cpu"
            if packing == "int8":
                weight, scale = round_to_int8(weight)
                self.scale = _frozen(_to_panels(scale, self.gated))
            self.bias = None if self.bias is None else _frozen(_to_panels(self.bias.detach()[:, None], self.gated))
            self.weight = _frozen(_to_panels(weight, self.gated))
            self._product = cpu.PackedWeight(*self.pointers(), self.outputs, self.inputs)
        elif packing == "onednn":
            self.weight = _frozen(torch.ops.mkldnn._reorder_linear_weight(weight))
        self.packing = packing

    def dense_weight(self) -> Tensor:
        """Return the weight [N, K] in its usual order; an 8-bit one as its integers times their scales."""
        if self.scale is not None and self.weight.is_cuda:
            return (self.weight * self.scale[:, None]).to(self._dtype)
        if self.packing in _OURS:
            weight = _from_panels(self.weight, self.outputs, self.gated)
            return weight if self.scale is None else weight * _from_panels(self.scale, self.outputs, self.gated)
        return self.weight.to_dense() if self.packing == "onednn" else self.weight

    def dense_bias(self) -> Tensor | None:
        """Return the bias [N] in its usual order."""
        if self.bias is None or self.packing not in _OURS or self.bias.is_cuda:
            return self.bias
        return _from_panels(self.bias, self.outputs, self.gated).squeeze(1)

    def product(self) -> cpu.PackedWeight:
        """Return the packed weight in the form that the C kernel reads."""
        return self._product

    def pointers(self) -> tuple[int | None, ...]:
        """Return the addresses of weight, scales and bias."""
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


_OURS = ("panels", "int8")  # packings that our own kernels read


def best_packing(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Packing:
    """Return the packing that decodes fastest on this device."""
    if device.type != "cpu":
        return "none"
    if dtype == torch.float32 and shape.head_dim % cpu.lanes() == 0 and cpu.library() is not None:
        return "panels"
    if not torch.backends.mkldnn.is_available():
        return "none"
    bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "onednn" if dtype == torch.float32 or bf16 else "none"


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a float32 weight [N, K] to 8-bit integers, and return them with the scale [N, 1] of each row.

    Saved checkpoints and packed weights are rounded by this one function. Of integers times scales it finds the same
    integers again, because the largest of a row is 127 or -127: an 8-bit checkpoint may be read as float32 and packed.
    A row of zeros gets a scale from the smallest normal float, so that nothing is divided by 0.
    """
    scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / LARGEST_INT8
    return (weight / scale).round().to(torch.int8), scale


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _to_panels(weight: Tensor, gated: bool) -> Tensor:
    """Lay out a weight [N, K] as panels [panels, K, 2 * lanes], the last one filled up with zeros.

    A panel holds 2 * lanes consecutive outputs, or, of a gated weight, lanes gates and the lanes values that they gate.
    """
    if gated:
        gate, value = weight.chunk(2)
        pairs = torch.stack((_in_blocks(gate, cpu.lanes()), _in_blocks(value, cpu.lanes())), 1)
        return pairs.flatten(1, 2).transpose(1, 2).contiguous()
    return _in_blocks(weight, 2 * cpu.lanes()).transpose(1, 2).contiguous()


def _from_panels(panels: Tensor, outputs: int, gated: bool) -> Tensor:
    """Return the weight [N, K] of these panels."""
    rows: Tensor = panels.transpose(1, 2)
    if gated:
        halves: Tensor = rows.reshape(len(rows), 2, cpu.lanes(), -1).transpose(0, 1).flatten(1, 2)
        return halves[:, : outputs // 2].reshape(outputs, -1)
    return rows.flatten(0, 1)[:outputs].contiguous()


def _in_blocks(weight: Tensor, rows: int) -> Tensor:
    """Split a weight [N, K] into [blocks, rows, K], the last block filled up with zeros."""
    return F.pad(weight, (0, 0, 0, -len(weight) % rows)).view(-1, rows, weight.shape[1])
