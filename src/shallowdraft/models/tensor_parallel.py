"""A decoder split over the processes of a torchrun (tensor parallelism): for targets that one GPU cannot hold.

Each process has a share of the heads, the key/value heads, the FFN's neurons and the vocabulary, and runs the usual
code on it; the processes' contributions to the residual stream are summed. docs/decisions/007 says why this is not
DTensor.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shallowdraft import distributed
from shallowdraft.errors import OptionError
from shallowdraft.models import fused
from shallowdraft.models.decoder import Block, Decoder
from shallowdraft.models.projection import Projection
from shallowdraft.shapes.shape import ModelShape

if TYPE_CHECKING:
    from shallowdraft.kernels.gpu import Weight


@dataclass(frozen=True)
class Split:
    """The share of a decoder that this process has; by default all of it."""

    rank: int = 0
    ranks: int = 1

    def part(self, shape: ModelShape) -> ModelShape:
        """Return the shape of this process's share; every process has the whole embedding and norms."""
        sizes = {name: getattr(shape, name) // self.ranks for name in ("heads", "kv_heads", "ffn")}
        return replace(shape, **sizes)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this process's share of the parameter `name`."""
        module, kind = name.split(".")[-2:]
        if self.ranks == 1:
            return tensor
        if module in ("qkv", "up"):
            return tensor.chunk(self.ranks)[self.rank]
        if module in ("out", "down"):
            if kind == "weight":
                return tensor.chunk(self.ranks, 1)[self.rank]
            return torch.zeros_like(tensor) if self.rank else tensor  # the sum over processes has the bias once
        if module == "head":
            rows = -(-len(tensor) // self.ranks)
            own = tensor[self.rank * rows : (self.rank + 1) * rows]
            return F.pad(own, (0, 0, 0, rows - len(own)))
        return tensor


def require_splittable(shape: ModelShape, dtype: Any) -> None:
    """Raise unless a model of this shape and dtype can be split over the processes that were launched."""
    ranks = distributed.launched()
    if ranks < 2:
        raise OptionError("tensor parallel needs processes; start it as torchrun --nproc-per-node N -m shallowdraft …")
    if shape.encoder:
        raise OptionError("an encoder–decoder cannot be split over processes; load it on one device")
    if dtype == "int8":
        raise OptionError("int8 weights cannot be split over processes; use float32, bfloat16 or float16")
    for name, count in (("heads", shape.heads), ("key/value heads", shape.kv_heads), ("FFN neurons", shape.ffn)):
        if count % ranks:
            raise OptionError(f"{count} {name} cannot be split over {ranks} processes; take a number that divides them")


class SummedProjection(Projection):
    """A projection of a share of the inputs, whose outputs are summed over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        return summed(super().forward(x))


class GatheredProjection(Projection):
    """A projection to a share of the outputs, which are gathered from all processes."""

    def __init__(self, outputs: int, inputs: int, ranks: int) -> None:
        super().__init__(-(-outputs // ranks), inputs, bias=False)
        self._whole, self._ranks = outputs, ranks

    def forward(self, x: Tensor) -> Tensor:
        own = super().forward(x)
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(parts, own)
        return torch.cat(parts, -1)[..., : self._whole]


def summed(own: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    dist.all_reduce(own)
    return own


class SplitDecoder(Decoder):
    """One process's share of a decoder; hidden states and logits are whole and the same in every process."""

    def __init__(self, shape: ModelShape, split: Split) -> None:
        super().__init__(split.part(shape))
        own, self.shape = self.local_shape, shape
        for block in cast("list[Block]", self.blocks):
            block.out = SummedProjection(own.d_model, own.heads * own.head_dim, bias=own.out_bias)
            block.down = SummedProjection(own.d_model, own.ffn, bias=own.ffn_bias)
            block.up.gated = False  # only the C kernel of whole layers reads gates beside values
        self.head = GatheredProjection(shape.vocab, shape.embed_dim, split.ranks)

    def tie(self) -> None:
        """Keep the head's weight separate: a share of it is not the whole embedding."""

    def broadcast(self, *values: Tensor | None) -> None:
        for value in values:
            if value is not None:
                dist.broadcast(value, 0)

    def broadcast_s(self, seconds: float) -> float:
        first = torch.tensor(seconds, device=self.device)
        self.broadcast(first)
        return first.item()

    def dense_state(self) -> dict[str, Tensor]:
        raise OptionError("a model that is split over processes cannot be saved; load it on one device for that")

    def _set_kernels(self) -> None:
        if self.device.type == "cuda":
            self.fused = fused.fuse(
                self.local_shape, self.blocks, self.norm, self.head, self.dtype, self.skips, SplitLayers
            )


class SplitLayers(fused.FusedLayers):
    """A share of the fused layers, with sums over the processes between the kernels."""

    def _added(self, x: Tensor, inner: Tensor, weight: "Weight") -> Tensor:
        return x + summed(self._product(inner, weight))

    def largest(self, x: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        norm, head = self._final
        best, token = head(norm(x))[..., :vocab].max(-1)
        return best, token
