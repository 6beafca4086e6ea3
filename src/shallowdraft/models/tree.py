"""Token trees: several continuations of a text in one pass, in which a token attends only to the path that leads to it.

Node 0 is the text's last token. Every other node has an earlier node as its parent, and nodes are ordered by depth. In
the KV cache node n is n slots behind node 0; its position is node 0's plus its depth, so that nodes of one depth share
a position. Shapes: B batch rows, T nodes of a pass, N nodes of the tree with node 0, D its depth, K the most children
of a node.
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

MOST_RANKS = 8  # ranks of draft tokens for a position that are counted separately


@dataclass(frozen=True)
class Tree:
    """The shape of a token tree."""

    parents: tuple[int, ...]
    """Parents of nodes 1, 2, …"""

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MOST_NODES:
            raise OptionError(f"a tree of {len(self.parents)} nodes; it must have 1 to {MOST_NODES}")
        for node, parent in enumerate(self.parents, 1):
            if not 0 <= parent < node:
                raise OptionError(f"node {node} of a tree must have an earlier node as its parent, not {parent}")
        if any(len(before) > len(after) for before, after in pairwise(self.paths)):
            raise OptionError("the nodes of a tree must be ordered by depth")

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Paths from node 0 to every node, itself included, without node 0."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents, 1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in order of rank."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents, 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def levels(self) -> list[range]:
        """Nodes of depth 0, 1, …"""
        depths = [*map(len, self.paths)]
        starts = [*(depths.index(depth) for depth in range(self.depth + 1)), len(depths)]
        return [range(*pair) for pair in pairwise(starts)]

    def accepted_depth(self, ranks: Sequence[int]) -> int:
        """Return how many of a text's next tokens are accepted if they have these ranks (from 0) among the drafts."""
        node = 0
        for depth, rank in enumerate(ranks):
            if rank >= len(self.children[node]):
                return depth
            node = self.children[node][rank]
        return len(ranks)

    def on(self, device: torch.device) -> "PlacedTree":
        """Return the tree with the tables that passes and verification read, in that device's memory."""
        seen = [sum(1 << node for node in (0, *path)) for path in self.paths]
        most = max(map(len, self.children))
        tables = (
            [*map(len, self.paths)],
            [bits - (1 << 64) if bits >> 63 else bits for bits in seen],  # node 63's bit is the sign of an int64
            [0, *self.parents],
            [[*path, *range(len(path) + 1, self.depth + 1)] for path in self.paths],
            [[*nodes, *[0] * (most - len(nodes))] for nodes in self.children],
        )
        return PlacedTree(self, *(torch.tensor(table, device=device) for table in tables))


@dataclass(frozen=True)
class PlacedTree:
    """A tree with its tables in a device's memory."""

    tree: Tree
    depths: Tensor
    """[N] depth of every node."""
    seen: Tensor
    """[N] bit j: whether the node attends to node j, which is itself or on its path."""
    parents: Tensor
    """[N] parent of every node; node 0 is its own."""
    paths: Tensor
    """[N, D] path to every node, itself included; beyond it entry j is j + 1, which `KVCache.keep` leaves in place."""
    children: Tensor
    """[N, K] children of every node, padded with 0."""

    def part(self, base: Tensor, first: int, last: int) -> "TreePass":
        """Return a pass over nodes first to last - 1, with node 0 of each row at position base [B]."""
        nodes = torch.arange(first, last, device=base.device)
        return TreePass(base, nodes, self.seen[first:last], self.depths)


@dataclass(frozen=True)
class TreePass:
    """The nodes of one pass over a tree."""

    base: Tensor
    """[B] slot and position of node 0."""
    nodes: Tensor
    """[T] numbers of the nodes."""
    seen: Tensor
    """[T] bit j: whether the node attends to node j."""
    depths: Tensor
    """[N] depth of every node of the tree."""

    @property
    def positions(self) -> Tensor:
        """Positions of the nodes, [B, T]."""
        return self.base[:, None] + self.depths[self.nodes]

    @property
    def slots(self) -> Tensor:
        """Slots of the nodes in the KV cache, [B, T]."""
        return self.base[:, None] + self.nodes

    def masked(self, span: int, window: int | None) -> Tensor:
        """Return [B, T, span]: which slots each node must not attend to.

        Slots before node 0's hold the text, which all nodes see; those of the tree are seen along a node's path.
        """
        offset, node = self._tree_slots(span)
        on_path = (self.seen[:, None] >> node) & 1
        masked = (offset >= 0) & ((on_path == 0) | (offset >= len(self.depths)))
        if window is not None:
            masked |= self.slot_positions(span) <= self.positions[..., None] - window
        return masked

    def slot_positions(self, span: int) -> Tensor:
        """Return the positions of the tokens in the first `span` slots, [B, 1, span]."""
        offset, node = self._tree_slots(span)
        return self.base[:, None, None] + torch.where(offset >= 0, self.depths[node], offset)

    def _tree_slots(self, span: int) -> tuple[Tensor, Tensor]:
        """Return each slot's offset from node 0's and the nearest node of that number, [B, 1, span] each."""
        offset = torch.arange(span, device=self.base.device) - self.base[:, None, None]
        return offset, offset.clamp(0, len(self.depths) - 1)


def best_tree(chances: Sequence[Sequence[float]], nodes: int) -> Tree:
    """Return the tree of `nodes` nodes with the largest expected number of accepted tokens.

    chances[n][k], falling in k, is the probability that a child of rank k at depth n + 1 is the text's next token, if
    its parent is on the text, whatever the path. A node then adds the product of the chances along its path, which is
    never more than its parent adds: so the nodes with the largest products form a tree.
    """
    # A heap of (minus the product, ranks along the path): it gives the largest product first.
    candidates: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    chosen: list[tuple[int, ...]] = []
    while candidates and len(chosen) <= nodes:
        gain, path = heapq.heappop(candidates)
        chosen.append(path)
        if len(path) < len(chances):
            for rank, chance in enumerate(chances[len(path)]):
                heapq.heappush(candidates, (gain * chance, (*path, rank)))
    chosen.sort(key=lambda path: (len(path), path))
    numbers = {path: number for number, path in enumerate(chosen)}
    return Tree(tuple(numbers[path[:-1]] for path in chosen[1:]))


def chances(ranks: Tensor) -> list[list[float]]:
    """Return, by depth and rank, the share of texts whose token at that depth has that rank.

    `ranks` [..., D] are the ranks of a text's next D tokens among the draft tokens for each depth. A text counts at a
    depth if all its tokens before have a rank below MOST_RANKS.
    """
    shares = []
    reached = torch.ones_like(ranks[..., 0], dtype=torch.bool)
    for at_depth in ranks.unbind(-1):
        counted = at_depth[reached]
        shares.append([float((counted == rank).sum()) / max(1, len(counted)) for rank in range(MOST_RANKS)])
        reached = reached & (at_depth < MOST_RANKS)
    return shares


def chains(count: int, length: int) -> Tree:
    """Return a tree of `count` separate continuations of `length` tokens: chain c has nodes 1 + c, 1 + count + c, …"""
    return Tree((0,) * count + tuple(range(1, 1 + count * (length - 1))))
