"""Trees of tokens: several continuations of a text in one pass, each of which sees only what leads to it.

Node 0 is the text's last token; every other node hangs on an earlier one. In a cache node n lies n slots behind node 0,
whatever its depth; its position is node 0's plus its depth. Shapes: B rows, T nodes of a pass, N nodes of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shallowdraft.errors import OptionError

MOST_NODES = 63  # beside node 0: which ones a node sees is a 64-bit number


@dataclass(frozen=True)
class Tree:
    """Who hangs on whom."""

    parents: tuple[int, ...]
    """Of nodes 1, 2, …"""

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MOST_NODES:
            raise OptionError(f"a tree of {len(self.parents)} nodes; it must have 1 to {MOST_NODES}")
        if wrong := [node for node, parent in enumerate(self.parents, 1) if not 0 <= parent < node]:
            raise OptionError(
                f"node {wrong[0]} of a tree must hang on an earlier one, not on {self.parents[wrong[0] - 1]}"
            )

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """From node 0, which is not named, to each node."""
        found: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents, 1):
            found.append((*found[parent], node))
        return tuple(found)

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    def on(self, device: torch.device) -> "PlacedTree":
        """With what passes need, in that device's memory."""
        seen = [sum(1 << node for node in (0, *path)) for path in self.paths]
        return PlacedTree(
            self,
            torch.tensor([*map(len, self.paths)], device=device),
            torch.tensor([bits - (1 << 64) if bits >> 63 else bits for bits in seen], device=device),
        )


@dataclass(frozen=True)
class PlacedTree:
    """A tree on a device."""

    tree: Tree
    depths: Tensor
    """[N] of every node, 0 first."""
    seen: Tensor
    """[N] bit j of a node: whether node j is itself or leads to it."""

    def part(self, base: Tensor, first: int, last: int) -> "TreePass":
        """A pass over nodes first to last - 1 of trees whose nodes 0 stand at positions base [B]."""
        nodes = torch.arange(first, last, device=base.device)
        return TreePass(base, nodes, self.seen[first:last], self.depths)


@dataclass(frozen=True)
class TreePass:
    """The nodes of one pass."""

    base: Tensor
    """[B] where node 0 stands."""
    nodes: Tensor
    """[T]"""
    seen: Tensor
    """[T]"""
    depths: Tensor
    """[N]"""

    @property
    def positions(self) -> Tensor:
        """[B, T]"""
        return self.base[:, None] + self.depths[self.nodes]

    @property
    def slots(self) -> Tensor:
        """[B, T] of the cache."""
        return self.base[:, None] + self.nodes

    def hidden(self, span: int, window: int | None) -> Tensor:
        """[B, T, span]: which slots each node must not look at."""
        behind = torch.arange(span, device=self.base.device) - self.base[:, None, None]  # of node 0, [B, 1, span]
        node = behind.clamp(0, len(self.depths) - 1)
        led = (self.seen[:, None] >> node) & 1
        hidden = (behind >= 0) & ((led == 0) | (behind >= len(self.depths)))
        if window is not None:
            where = self.base[:, None, None] + torch.where(behind >= 0, self.depths[node], behind)
            hidden |= where <= self.positions[..., None] - window
        return hidden


def chains(lengths: Sequence[int]) -> Tree:
    """Continuations that share nothing."""
    parents: list[int] = []
    for length in lengths:
        start = len(parents)
        parents += [0, *range(start + 1, start + length)]
    return Tree(tuple(parents))
