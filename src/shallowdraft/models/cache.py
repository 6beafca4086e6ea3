"""A static KV cache. Rollback is by position: slots beyond a row's length are overwritten later, never cleared.

Shapes: L layers, B batch rows, H key/value heads, S slots, T tokens of a pass, D head width, R tokens of an encoder's
input.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.shape import ModelShape


class KVCache:
    """Keys and values of every layer and row, [L, 2, B, H, S, D], and rotary tables for S positions."""

    def __init__(self, shape: ModelShape, rows: int, slots: int, *, device: torch.device, dtype: torch.dtype) -> None:
        per_token = shape.kv_bytes_per_token(dtype_name(dtype))
        require_memory(rows * slots * per_token, device, f"a cache of {rows} x {slots} tokens")
        size = (shape.layers, 2, rows, shape.kv_heads, slots, shape.head_dim)
        self.slots = slots
        self.rope = rope_tables(shape.rope, shape.head_dim, slots, device, dtype) if shape.rope else None
        self._hold(_zeros(size, device, dtype))

    def _hold(self, kv: Tensor) -> None:
        self.kv = kv
        self.layers = [(layer[0], layer[1]) for layer in kv]
        rows, heads = kv.shape[2:4]
        self._heads = torch.arange(rows * heads, device=kv.device).view(rows, heads, 1) * self.slots

    @classmethod
    def of(cls, parts: Sequence[tuple["KVCache", int]], lengths: Sequence[int], slots: int) -> "KVCache":
        """Build a cache with `slots` slots from single rows of others, `lengths` slots of each.

        The rotary tables are the first one's, which must reach that far.
        """
        first = parts[0][0]
        assert first.rope is None or len(first.rope[0]) >= slots
        layers, two, _, heads, _, width = first.kv.shape
        batch = copy.copy(first)
        batch.slots = slots
        batch._hold(_zeros((layers, two, len(parts), heads, slots, width), first.kv.device, first.kv.dtype))
        for row, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            batch.put(row, part, length)
        return batch

    def put(self, row: int, part: tuple["KVCache", int], length: int) -> None:
        """Copy the first `length` slots of a row of another cache into a row of this one."""
        other, other_row = part
        self.kv[:, :, row, :, :length] = other.kv[:, :, other_row, :, :length]

    def addresses(self, positions: Tensor) -> Tensor:
        """Return the indices [B * H * T] of slots `positions` [B, T] in a layer's keys or values [B * H * S, D]."""
        return (self._heads + positions[:, None]).flatten()

    def write(self, layer: int, addresses: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values [B, T, H, D] of a pass."""
        for slots, new in zip(self.layers[layer], (keys, values), strict=True):
            width = slots.shape[-1]
            slots.view(-1, width).index_copy_(0, addresses, new.transpose(1, 2).reshape(-1, width))

    def keep(self, base: Tensor, nodes: Tensor) -> None:
        """Move the accepted nodes [B, T] of a token tree to the slots behind its node 0, which is in slot base [B]."""
        source = (base[:, None] + nodes)[:, None, :, None]
        target = (base[:, None] + torch.arange(1, nodes.shape[1] + 1, device=base.device))[:, None, :, None]
        size = (*self.kv.shape[:4], nodes.shape[1], self.kv.shape[5])
        # gather copies before scatter_ writes, so a node's slot may be another one's target
        self.kv.scatter_(4, target.expand(size), self.kv.gather(4, source.expand(size)))

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Return the first `span` slots of a layer: keys and values [B, H, span, D]."""
        keys, values = self.layers[layer]
        return keys[:, :, :span], values[:, :, :span]


@dataclass
class EncoderInput:
    """Texts that an encoder reads."""

    tokens: Tensor  # [B, R], padded beyond `length`
    length: Tensor  # [B]


class CrossCache(KVCache):
    """A KV cache of an encoder–decoder: also the encoder's keys and values, and a bias for each distance of tokens."""

    def __init__(
        self, shape: ModelShape, rows: int, slots: int, biases: Tensor, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, rows, slots, device=device, dtype=dtype)
        self.biases = biases  # [H, S], by head and distance
        self.source: tuple[Tensor, Tensor] | None = None

    def write_source(self, kv: Tensor, mask: Tensor) -> None:
        """Store the encoder's keys and values [L, 2, B, H, R, D] and the mask of its input [B, 1, 1, R].

        If the sizes are those of the last input this happens in place: CUDA graphs hold the addresses.
        """
        if self.source is None or self.source[0].shape != kv.shape:
            self.source = kv, mask
        else:
            self.source[0].copy_(kv)
            self.source[1].copy_(mask)


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros, not empty memory: a masked slot still takes part in a product, and 0 * NaN is NaN.

    On a CPU numpy allocates them, because the system hands it zero pages on first use: unused slots cost nothing.
    """
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


def rope_tables(
    rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [positions, D]: a rotated head is x * cos + roll(x, D / 2) * sin."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position that each pair of a head's numbers is rotated by, [D / 2]."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # Llama 3: long wavelengths are stretched by `factor`, short ones are kept, medium ones are interpolated.
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = ((rope.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
