"""A draft model that proposes a tree of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.sampling import draw, in_vocabulary, probabilities, without
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.tree import Tree
from shallowdraft.runs.sampling import Sampling


class TreeDrafter(ModelDrafter):
    """A smaller model that decodes a tree ahead, level by level: the likeliest tokens, or draws.

    No child is drawn twice, unless they are to be independent.
    """

    def __init__(
        self, decoder: Decoder, tree: Tree, sampling: Sampling, target_vocab: int, *, independent: bool = False
    ) -> None:
        super().__init__(decoder, tree.depth, sampling, target_vocab)
        self.nodes, self._independent = len(tree.parents), independent
        self._tree = tree.on(decoder.device)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        assert self.cache is not None
        tree, base = self._tree, state.length - 1
        tokens, positions = self._unread(state, missed)
        hidden = self.decoder(tokens, positions, self.cache, state.span)[:, -1:]
        proposed: list[Tensor] = []
        largest, laws = [], []
        for level in tree.tree.levels[:-1]:
            bearing = max(node for node in level if tree.tree.children[node]) + 1 - level.start
            if level.start:
                part = tree.part(base, level.start, level.start + bearing)
                tokens = proposed[-1][:, :bearing].contiguous()
                hidden = self.decoder(tokens, part.positions, self.cache, state.span, part)
            logits = in_vocabulary(self.decoder.head(hidden), self._vocab)
            largest.append(logits.amax(-1))
            children = [tree.tree.children[node] for node in level[:bearing]]
            if self.sampling.greedy:
                proposed.append(likeliest_children(logits, children))
            else:
                law = probabilities(logits, self.sampling)
                proposed.append(draw_children(law, children, uniforms, again=self._independent))
                laws.append(torch.nn.functional.pad(law, (0, 0, 0, len(level) - bearing)))
        q = None
        if laws:
            q = torch.nn.functional.pad(torch.cat(laws, 1), (0, 0, 0, len(tree.tree.levels[-1])))
        return Proposal(torch.cat(proposed, 1), q, torch.cat(largest, 1), tree, self._independent)


def likeliest_children(logits: Tensor, children: Sequence[Sequence[int]]) -> Tensor:
    """For nodes with logits [B, T, V] as many of the likeliest tokens as each has children, in their order."""
    ranked = logits.topk(max(map(len, children)), -1).indices
    return torch.cat([ranked[:, at, : len(nodes)] for at, nodes in enumerate(children)], 1)


def draw_children(laws: Tensor, children: Sequence[Sequence[int]], uniforms: Tensor, *, again: bool) -> Tensor:
    """For nodes with laws [B, T, V] as many draws as each has children; whether one may come again."""
    found = []
    for at, nodes in enumerate(children):
        left = laws[:, at]
        for child in nodes:
            found.append(draw(left, uniforms[:, child - 1])[:, None])
            left = left if again else without(left, found[-1])
    return torch.cat(found, 1)
