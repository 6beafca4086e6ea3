"""Replay of Medusa heads: one teacher-forced pass of the target gives the rank of every token in each head's logits."""

from collections.abc import Sequence

import torch

from shallowdraft.decoding.options import Settings
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.replaying.teacher_forcing import hidden_states, require_finite
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace


def replay_medusa(target: Model, heads: Heads, name: str, trace: Trace, nodes: Sequence[int]) -> CountedReplay:
    """Replay the tree that heads propose at each number of nodes, in one pass of the target over every output."""
    trace.require_greedy()
    ranks = [_head_ranks(target, heads, output) for output in trace.outputs]  # by output, position and head
    candidates, kept = {}, {}
    for count in nodes:
        tree = Settings(drafter="medusa", heads=heads, nodes=count).shape_of_tree(target.shape.vocab)
        candidates[count] = Candidate(name, tree.depth, "medusa", tree.parents, heads.digest)
        # Heads beyond the tree's depth propose nothing.
        kept[count] = [[tree.accepted_depth(by_head[: tree.depth]) for by_head in of_output] for of_output in ranks]
    return CountedReplay(name, trace, candidates, kept)


@torch.inference_mode()
def _head_ranks(target: Model, heads: Heads, output: Output) -> list[list[int]]:
    """Return, for each position behind the first token, the ranks of the tokens there in the logits of each head.

    An iteration has not read its last token yet: it knows the hidden state that predicted that token. From this state
    head h predicts the token h behind it.
    """
    # [T, C], without the state that predicts the last token: nothing follows that.
    hidden = torch.cat([chunk for chunk, _ in hidden_states(target.decoder, output, first=0)])[:-1]
    text = torch.tensor(output.output, device=hidden.device)
    by_head = []
    for ahead, of_head in enumerate(heads(hidden).unbind(1), 1):
        logits = target.decoder.head(of_head)  # [T, V]
        require_finite(logits.amax(-1), f"target {target.name} or its heads")
        tokens = text[ahead:].unsqueeze(1)  # [T - ahead + 1, 1]
        logits = logits[: len(tokens)]
        by_head.append((logits > logits.gather(1, tokens)).sum(1).tolist())
    return [[ranks[position] for ranks in by_head if position < len(ranks)] for position in range(len(hidden))]
