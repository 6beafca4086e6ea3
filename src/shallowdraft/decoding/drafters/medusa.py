"""Medusa heads on the target, which propose a tree of tokens."""

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import NoDrafter
from shallowdraft.decoding.drafters.tree import draw_children, likeliest_children
from shallowdraft.decoding.sampling import probabilities
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.models.tree import Tree
from shallowdraft.runs.sampling import Sampling


class MedusaDrafter(NoDrafter):
    """Medusa heads on the target: a tree of what each of them guesses, from the one hidden state that is known."""

    def __init__(self, target: Decoder, heads: Heads, tree: Tree, sampling: Sampling) -> None:
        self.lookahead, self.nodes = tree.depth, len(tree.parents)
        self._target, self._heads, self._sampling = target, heads, sampling
        self._tree = tree.on(target.device)
        self._hidden: Tensor | None = None

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self._hidden = hidden.clone() if self._hidden is None else self._hidden.copy_(hidden)

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        assert self._hidden is not None
        self._hidden.copy_(hidden)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        assert self._hidden is not None
        tree = self._tree
        logits = self._target.head(self._heads(self._hidden)[:, : self.lookahead])
        laws = None if self._sampling.greedy else probabilities(logits, self._sampling)
        proposed = []
        for depth, level in enumerate(tree.tree.levels[:-1]):
            children = [tree.tree.children[node] for node in level]
            here = (logits if laws is None else laws)[:, depth : depth + 1].expand(-1, len(level), -1)
            proposed.append(
                likeliest_children(here, children)
                if laws is None
                else draw_children(here, children, uniforms, again=False)
            )
        q = None if laws is None else laws[:, tree.depths.clamp(max=self.lookahead - 1)]
        return Proposal(torch.cat(proposed, 1), q, logits.amax(-1), tree)
