"""Trees of tokens: several continuations of a text in one pass, each of which sees only what leads to it.

Node 0 is the text's last token; every other node hangs on an earlier one, and no node is less deep than the one before
it. In a cache node n lies n slots behind node 0; its position is node 0's plus its depth. Shapes: B rows, T nodes of a
pass, N nodes of the tree, D its depth, K the most children of a node.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from shallowdraft.errors import OptionError
from shallowdraft.limits import MOST_NODES

MOST_RANKS = 8  # guesses for one place that are told apart


@dataclass(frozen=True)
class Tree:
    """Who hangs on whom."""

    parents: tuple[int, ...]
    """Of nodes 1, 2, …"""

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MOST_NODES:
            raise OptionError(f"a tree of {len(self.parents)} nodes; it must have 1 to {MOST_NODES}")
        for node, parent in enumerate(self.parents, 1):
            if not 0 <= parent < node:
                raise OptionError(f"node {node} of a tree must hang on an earlier one, not on {parent}")
        if any(len(before) > len(after) for before, after in pairwise(self.paths)):
            raise OptionError("a node of a tree must not be less deep than the one before it")

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """From node 0, which is not named, to each node."""
        found: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents, 1):
            found.append((*found[parent], node))
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each node."""
        nodes = range(1, len(self.parents) + 1)
        return tuple(tuple(node for node in nodes if self.parents[node - 1] == one) for one in range(len(nodes) + 1))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def levels(self) -> list[range]:
        """The nodes of depth 0, 1, …"""
        depths = [*map(len, self.paths)]
        starts = [*(depths.index(depth) for depth in range(self.depth + 1)), len(depths)]
        return [range(*pair) for pair in pairwise(starts)]

    def followed(self, ranks: Sequence[int]) -> int:
        """How deep it goes along with a text whose tokens have these ranks, from 0, among the guesses at each depth."""
        node = 0
        for depth, rank in enumerate(ranks):
            if rank >= len(self.children[node]):
                return depth
            node = self.children[node][rank]
        return len(ranks)

    def on(self, device: torch.device) -> "PlacedTree":
        """With what passes and verification need, in that device's memory."""
        seen = [sum(1 << node for node in (0, *path)) for path in self.paths]
        most = max(map(len, self.children))
        tables = (
            [*map(len, self.paths)],
            [bits - (1 << 64) if bits >> 63 else bits for bits in seen],
            [0, *self.parents],
            [[*path, *range(len(path) + 1, self.depth + 1)] for path in self.paths],
            [[*nodes, *[0] * (most - len(nodes))] for nodes in self.children],
        )
        return PlacedTree(self, *(torch.tensor(table, device=device) for table in tables))


@dataclass(frozen=True)
class PlacedTree:
    """A tree on a device."""

    tree: Tree
    depths: Tensor
    """[N] of every node, 0 first."""
    seen: Tensor
    """[N] bit j of a node: whether node j is itself or leads to it."""
    parents: Tensor
    """[N], node 0's is itself."""
    paths: Tensor
    """[N, D] the nodes that lead to each, itself included; behind them those that stand where they are."""
    children: Tensor
    """[N, K] of each node, then 0."""

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
        behind, node = self._behind(span)
        led = (self.seen[:, None] >> node) & 1
        hidden = (behind >= 0) & ((led == 0) | (behind >= len(self.depths)))
        if window is not None:
            hidden |= self.slot_positions(span) <= self.positions[..., None] - window
        return hidden

    def slot_positions(self, span: int) -> Tensor:
        """[B, 1, span]: the positions of what lies in the slots."""
        behind, node = self._behind(span)
        return self.base[:, None, None] + torch.where(behind >= 0, self.depths[node], behind)

    def _behind(self, span: int) -> tuple[Tensor, Tensor]:
        """How many slots each lies behind node 0's, and the node that is there, [B, 1, span]."""
        behind = torch.arange(span, device=self.base.device) - self.base[:, None, None]
        return behind, behind.clamp(0, len(self.depths) - 1)


def best_tree(chances: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of so many nodes that is accepted furthest, if at depth n + 1 the child of rank k goes on with the text
    with probability chances[n][k], falling in k, whatever led there.

    What a node adds is the product along its path, never more than its parent adds: the largest products are a tree.
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    chosen: list[tuple[int, ...]] = []  # the ranks along the path
    while waiting and len(chosen) <= nodes:
        gain, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < len(chances):
            for rank, chance in enumerate(chances[len(path)]):
                heapq.heappush(waiting, (gain * chance, (*path, rank)))
    chosen.sort(key=lambda path: (len(path), path))
    numbers = {path: number for number, path in enumerate(chosen)}
    return Tree(tuple(numbers[path[:-1]] for path in chosen[1:]))


def chances(ranks: Tensor) -> list[list[float]]:
    """Ranks [..., D] of the right token among the guesses for D places -> by place and rank, how often that guess is
    right where those before were among the first too.
    """
    found = []
    reached = torch.ones_like(ranks[..., 0], dtype=torch.bool)
    for place in ranks.unbind(-1):
        here = place[reached]
        found.append([float((here == rank).sum()) / max(1, len(here)) for rank in range(MOST_RANKS)])
        reached = reached & (place < MOST_RANKS)
    return found


def chains(count: int, length: int) -> Tree:
    """So many continuations that share nothing: node 1 + j * count + c has depth j + 1 in chain c."""
    return Tree((0,) * count + tuple(range(1, 1 + count * (length - 1))))
