"""Replay of drafts that propose a tree: the tree that keeps most of a trace, and what any tree would keep.

While a path of the tree is accepted, the draft's context is the target's own text. So one teacher-forced pass gives the
rank of every token among the draft's choices, and with it each greedy iteration of every tree, exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree, best_tree, chances
from shallowdraft.replaying.iterations import steps
from shallowdraft.replaying.result import Counted
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace

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

    def kept(self, tree: Tree) -> list[list[int]]:
        """For each output, the draft tokens that an iteration keeps which begins at each place."""
        depth = tree.depth
        return [
            [tree.accepted_depth(row[at : at + depth]) if at + depth <= room else 0 for at in range(len(row))]
            for row, room in zip(self.ranks, self.room, strict=True)
        ]

    def offered(self, tree: Tree) -> list[list[int]]:
        """For each output, how deep an iteration proposes that begins at each place."""
        return [
            [tree.depth if at + tree.depth <= room else 0 for at in range(len(row))]
            for row, room in zip(self.ranks, self.room, strict=True)
        ]

    def iterations(self, tree: Tree) -> list[list[int]]:
        """For each output, the draft tokens that each iteration keeps."""
        return [steps(row) for row in self.kept(tree)]

    def tar(self, tree: Tree) -> float:
        kept = self.iterations(tree)
        return sum(map(len, self.ranks)) / max(1, sum(map(len, kept)))


def replay_trees(draft: Model, trace: Trace, nodes: Sequence[int], *, fits: bool = False) -> Counted:
    """The best tree of each number of nodes; `fits` as for `replay`."""
    ranks = replay_ranks(draft, trace, fits=fits)
    trees = {count: ranks.tree(count) for count in nodes}
    candidates = {count: Candidate.with_draft(draft, tree.depth, "tree", tree.parents) for count, tree in trees.items()}
    kept = {count: ranks.kept(tree) for count, tree in trees.items()}
    offered = {count: ranks.offered(tree) for count, tree in trees.items()}
    return Counted(draft.name, trace, candidates, kept, offered, draft.shape.context)


def replay_ranks(draft: Model, trace: Trace, *, fits: bool = False) -> Ranks:
    """One pass over every output."""
    trace.require_greedy()
    if not fits:
        require_vocabulary(trace, draft)
    vocab = min(trace.vocabulary["size"], draft.shape.vocab)
    found = []
    for output in trace.outputs:
        ranks = torch.cat([torch.zeros(0, dtype=torch.int64), *_ranks(draft, output, vocab)]).tolist()
        found.append([*ranks, *[vocab] * (len(output.output) - 1 - len(ranks))])  # beyond the draft's context
    room = [draft.shape.context - len(output.prompt) - 1 for output in trace.outputs]
    return Ranks(draft.name, found, room)


def _ranks(draft: Model, output: Output, vocab: int) -> Iterator[Tensor]:
    for logits, tokens in predictions(draft, output, first=1):
        logits = logits[:, :vocab]
        chosen = logits.gather(1, tokens.clamp(max=vocab - 1)[:, None])
        yield torch.where(tokens < vocab, (logits > chosen).sum(1), vocab).cpu()
