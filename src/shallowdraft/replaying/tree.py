"""Replay of drafts that propose a tree: the tree that keeps most of a trace, and the tokens that any tree would keep.

While a path of the tree is accepted, the draft's context is the target's own output. So one teacher-forced pass gives
the rank of every token in the draft's logits, and the ranks give every greedy iteration of every tree, exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree, best_tree, chances
from shallowdraft.replaying.iterations import kept_at_starts
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace

DEEPEST = 12  # levels of a chosen tree at most


@dataclass(frozen=True)
class TokenRanks:
    """Ranks of a trace's tokens in a draft's logits."""

    draft: str
    ranks: list[list[int]] = field(repr=False)
    """The number of tokens that the draft finds likelier, by output and token behind the first."""
    room: list[int] = field(repr=False)
    """The number of tokens behind the first after which the draft's context is full, by output."""

    def tree(self, nodes: int) -> Tree:
        """Return the tree of this many nodes that keeps most, by how often each rank was right at each depth."""
        windows = []
        for row in self.ranks:
            windows += [row[start : start + DEEPEST] for start in range(len(row) - DEEPEST + 1)]
        if not windows:
            raise OptionError(f"the trace has no output of more than {DEEPEST} tokens; record longer ones")
        return best_tree(chances(torch.tensor(windows)), nodes)

    def kept(self, tree: Tree) -> list[list[int]]:
        """Return the draft tokens that an iteration keeps if it starts at a position, by output and position."""
        kept = []
        for row, room in zip(self.ranks, self.room, strict=True):
            windows = [row[start : start + tree.depth] for start in range(len(row))]
            fits = [start + tree.depth <= room for start in range(len(row))]
            pairs = zip(windows, fits, strict=True)
            kept.append([tree.accepted_depth(window) if has_room else 0 for window, has_room in pairs])
        return kept

    def proposed(self, tree: Tree) -> list[list[int]]:
        """Return the depth that an iteration proposes if it starts at a position, by output and position."""
        return [
            [tree.depth if start + tree.depth <= room else 0 for start in range(len(row))]
            for row, room in zip(self.ranks, self.room, strict=True)
        ]

    def kept_by_iteration(self, tree: Tree) -> list[list[int]]:
        """Return the number of draft tokens that each iteration keeps, by output."""
        return [kept_at_starts(kept_at) for kept_at in self.kept(tree)]

    def tar(self, tree: Tree) -> float:
        """Return tokens per iteration over all outputs."""
        kept = self.kept_by_iteration(tree)
        return sum(map(len, self.ranks)) / max(1, sum(map(len, kept)))


def replay_tree(draft: Model, trace: Trace, nodes: Sequence[int], *, fits: bool = False) -> CountedReplay:
    """Replay, for each number of nodes, the tree that keeps most; `fits` is as for `replay_model`."""
    ranks = replay_ranks(draft, trace, fits=fits)
    trees = {count: ranks.tree(count) for count in nodes}
    candidates = {count: Candidate.with_draft(draft, tree.depth, "tree", tree.parents) for count, tree in trees.items()}
    kept = {count: ranks.kept(tree) for count, tree in trees.items()}
    proposed = {count: ranks.proposed(tree) for count, tree in trees.items()}
    return CountedReplay(draft.name, trace, candidates, kept, proposed, draft.shape.context)


def replay_ranks(draft: Model, trace: Trace, *, fits: bool = False) -> TokenRanks:
    """Return the rank of every token, from one pass over every output; `fits` is as for `replay_model`."""
    trace.require_greedy()
    if not fits:
        require_vocabulary(trace, draft)
    vocab = min(trace.vocabulary["size"], draft.shape.vocab)
    ranks = []
    for output in trace.outputs:
        in_context = torch.cat([torch.zeros(0, dtype=torch.int64), *_ranks(draft, output, vocab)]).tolist()
        beyond_context = len(output.output) - 1 - len(in_context)
        ranks.append([*in_context, *[vocab] * beyond_context])  # the worst rank, which no tree has
    room = [draft.shape.context - len(output.prompt) - 1 for output in trace.outputs]
    return TokenRanks(draft.name, ranks, room)


def _ranks(draft: Model, output: Output, vocab: int) -> Iterator[Tensor]:
    """Yield the rank [T] of each token behind the first, in chunks."""
    for logits, tokens in predictions(draft, output, first=1):
        logits = logits[:, :vocab]
        own = logits.gather(1, tokens.clamp(max=vocab - 1)[:, None])  # [T, 1]: logits of the output's own tokens
        yield torch.where(tokens < vocab, (logits > own).sum(1), vocab).cpu()
