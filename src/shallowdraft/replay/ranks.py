"""Replay for token trees: from where the target's tokens stand among a draft's choices, what any tree would keep.

While a path of the tree is accepted the draft's context is the target's own text, so one teacher-forced pass gives the
rank of every token, and with it, exactly, each greedy iteration of every tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree, best_tree, chances
from shallowdraft.replay.traces import Output, Trace, predictions

DEEPEST = 12  # that a tree is chosen for


@dataclass(frozen=True)
class Ranks:
    """Of a draft on a trace."""

    draft: str
    ranks: list[list[int]] = field(repr=False)
    """For each output, of every token behind the first: how many tokens the draft finds likelier there."""
    room: list[int] = field(repr=False)
    """For each output: tokens after which the draft's context is full."""

    def tree(self, nodes: int) -> Tree:
        """The one of so many nodes that keeps most, by how often each rank was right at each depth."""
        windows = [row[at : at + DEEPEST] for row in self.ranks for at in range(len(row) - DEEPEST + 1)]
        if not windows:
            raise OptionError(f"the trace has no output of more than {DEEPEST} tokens; record longer ones")
        return best_tree(chances(torch.tensor(windows)), nodes)

    def iterations(self, tree: Tree) -> list[list[int]]:
        """For each output, the draft tokens that each iteration keeps."""
        return [_kept(tree, row, room) for row, room in zip(self.ranks, self.room, strict=True)]

    def tar(self, tree: Tree) -> float:
        kept = self.iterations(tree)
        return sum(map(len, self.ranks)) / max(1, sum(map(len, kept)))


def _kept(tree: Tree, ranks: Sequence[int], room: int) -> list[int]:
    found, at = [], 0
    while at < len(ranks):
        found.append(tree.followed(ranks[at : at + tree.depth]) if at + tree.depth <= room else 0)
        at += found[-1] + 1
    return found


def replay_ranks(draft: Model, trace: Trace) -> Ranks:
    """One pass over every output."""
    if not trace.sampling.greedy:
        raise OptionError("the trace was sampled; a tree is chosen by a greedy one (record without --temperature)")
    trace.require_vocabulary(draft)
    vocab = min(trace.vocabulary["size"], draft.shape.vocab)
    found = []
    for output in trace.outputs:
        ranks = torch.cat([torch.zeros(0, dtype=torch.int64), *_ranks(draft, output, vocab)]).tolist()
        found.append([*ranks, *[vocab] * (len(output.output) - 1 - len(ranks))])  # beyond the draft's context
    room = [draft.shape.context - len(output.prompt) - 1 for output in trace.outputs]
    return Ranks(draft.name, found, room)


def _ranks(draft: Model, output: Output, vocab: int) -> Iterator[Tensor]:
    for logits, tokens in predictions(draft.decoder, output, first=1):
        logits = logits[:, :vocab]
        chosen = logits.gather(1, tokens.clamp(max=vocab - 1)[:, None])
        yield torch.where(tokens < vocab, (logits > chosen).sum(1), vocab).cpu()
