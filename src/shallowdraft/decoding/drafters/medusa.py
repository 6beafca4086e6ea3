"""Medusa heads on the target, which propose a tree of tokens.

Shapes: B rows, C width of the target's hidden states, V vocabulary.
"""

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter, NoDrafter
from shallowdraft.decoding.drafters.tree import draw_children, likeliest_children
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.sampling import probabilities
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.errors import OptionError
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree
from shallowdraft.runs.sampling import Sampling


class MedusaDrafter(NoDrafter):
    """Heads that guess several tokens ahead from the target's hidden state at the last accepted token.

    Every node at a depth has the same guesses, because a head does not know which tokens precede
    its own.
    """

    def __init__(self, target: Decoder, heads: Heads, tree: Tree, sampling: Sampling) -> None:
        self.lookahead, self.nodes = tree.depth, len(tree.parents)
        self._target, self._heads, self._sampling = target, heads, sampling
        self._tree = tree.on(target.device)
        self._hidden: Tensor | None = None  # [B, C], always at the same address, which CUDA graphs rely on

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self._hidden = hidden.clone() if self._hidden is None else self._hidden.copy_(hidden)

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        assert self._hidden is not None
        self._hidden.copy_(hidden)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        assert self._hidden is not None
        tree = self._tree
        logits = self._target.head(self._heads(self._hidden)[:, : self.lookahead])  # [B, lookahead, V]
        p = None if self._sampling.greedy else probabilities(logits, self._sampling)
        proposed = []
        for depth, level in enumerate(tree.tree.levels[:-1]):
            children = [tree.tree.children[node] for node in level]
            guesses = (logits if p is None else p)[:, depth : depth + 1].expand(-1, len(level), -1)
            proposed.append(
                likeliest_children(guesses, children)
                if p is None
                else draw_children(guesses, children, uniforms, independent=False)
            )
        q = None if p is None else p[:, tree.depths.clamp(max=self.lookahead - 1)]
        return Proposal(torch.cat(proposed, 1), q, logits.amax(-1), tree)


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter for the heads that the settings name."""
    if settings.heads is None:
        raise OptionError("the medusa drafter needs heads on the target; give those that sd.load_heads returns")
    tree, count = settings.shape_of_tree(target.shape.vocab), settings.heads.shape.count
    if tree.depth > count:
        raise OptionError(f"a tree of depth {tree.depth} needs {tree.depth} heads; there are {count}")
    return MedusaDrafter(target.decoder, settings.heads, tree, settings.sampling)
