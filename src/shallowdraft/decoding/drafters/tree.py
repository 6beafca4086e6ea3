"""A draft model that proposes a tree of tokens.

Shapes: B rows, T nodes of a level, N nodes with node 0, V the target's vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.drafters.model import ModelDrafter, require_fitting_draft
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.sampling import draw, in_vocabulary, probabilities, without
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.errors import OptionError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree
from shallowdraft.runs.sampling import Sampling


class TreeDrafter(ModelDrafter):
    """A draft model that decodes a tree level by level: greedily the likeliest tokens of each node, else drawn ones.

    Children of a node are drawn without replacement, unless they are to be `independent`.
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
        largest, q_levels = [], []
        for level in tree.tree.levels[:-1]:
            # Of a level only the nodes up to the last one with children are read; the others are leaves.
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
                p = probabilities(logits, self.sampling)
                proposed.append(draw_children(p, children, uniforms, independent=self._independent))
                q_levels.append(torch.nn.functional.pad(p, (0, 0, 0, len(level) - bearing)))
        q = None
        if q_levels:  # [B, N, V]; zero at nodes without children
            q = torch.nn.functional.pad(torch.cat(q_levels, 1), (0, 0, 0, len(tree.tree.levels[-1])))
        return Proposal(torch.cat(proposed, 1), q, torch.cat(largest, 1), tree, self._independent)


def likeliest_children(logits: Tensor, children: Sequence[Sequence[int]]) -> Tensor:
    """Return the likeliest tokens of nodes with logits [B, T, V], one for each child, in node order."""
    ranked = logits.topk(max(map(len, children)), -1).indices
    return torch.cat([ranked[:, place, : len(nodes)] for place, nodes in enumerate(children)], 1)


def draw_children(p: Tensor, children: Sequence[Sequence[int]], uniforms: Tensor, *, independent: bool) -> Tensor:
    """Draw tokens of nodes with distributions [B, T, V], one for each child, in node order.

    Siblings are drawn without replacement, unless they are `independent`.
    """
    drawn = []
    for place, nodes in enumerate(children):
        remaining = p[:, place]
        for child in nodes:
            drawn.append(draw(remaining, uniforms[:, child - 1])[:, None])
            remaining = remaining if independent else without(remaining, drawn[-1])
    return torch.cat(drawn, 1)


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter whose children are drawn without replacement."""
    return create_branching(target, settings, independent=False)


def create_branching(target: Model, settings: Settings, *, independent: bool) -> TreeDrafter:
    """Create a drafter for a tree of the draft model's tokens."""
    draft = settings.draft
    if draft is None:
        raise OptionError("a tree is proposed by a draft model; give one as draft")
    require_fitting_draft(target, draft)
    tree = settings.shape_of_tree(min(target.shape.vocab, draft.shape.vocab))
    return TreeDrafter(draft.decoder, tree, settings.sampling, target.shape.vocab, independent=independent)
