"""Replay of Medusa heads: one teacher-forced pass of the target gives the rank of every token among their choices."""

from collections.abc import Sequence

import torch

from shallowdraft.decoding.options import Settings
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model
from shallowdraft.replaying.result import Counted
from shallowdraft.replaying.teacher_forcing import hidden_states, require_finite
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace


def replay_medusa(target: Model, heads: Heads, name: str, trace: Trace, nodes: Sequence[int]) -> Counted:
    """The trees that heads propose, by how many nodes they have: one pass of the target over every output."""
    trace.require_greedy()
    ranks = [_guessed(target, heads, output) for output in trace.outputs]
    trees = {n: Settings(drafter="medusa", heads=heads, nodes=n).shape_of_tree(target.shape.vocab) for n in nodes}
    candidates = {n: Candidate(name, tree.depth, "medusa", tree.parents, heads.digest) for n, tree in trees.items()}
    kept = {n: [[tree.accepted_depth(row[: tree.depth]) for row in one] for one in ranks] for n, tree in trees.items()}
    return Counted(name, trace, candidates, kept)


@torch.inference_mode()
def _guessed(target: Model, heads: Heads, output: Output) -> list[list[int]]:
    """Of every place behind the first token: the ranks of what follows there among the guesses of each head, from the
    hidden state that is known, the one before the token before.
    """
    hidden = torch.cat([chunk for chunk, _ in hidden_states(target.decoder, output, first=0)])[:-1]
    text = torch.tensor(output.output, device=hidden.device)
    found = []
    for ahead, guesses in enumerate(heads(hidden).unbind(1), 1):
        logits = target.decoder.head(guesses)  # [T, V]
        require_finite(logits.amax(-1), f"target {target.name} or its heads")
        wanted = text[ahead:].unsqueeze(1)
        found.append((logits[: len(wanted)] > logits[: len(wanted)].gather(1, wanted)).sum(1).tolist())
    return [[of_head[at] for of_head in found if at < len(of_head)] for at in range(len(hidden))]
