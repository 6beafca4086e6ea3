"""Replay for token trees: from where the target's tokens stand among a draft's choices, what any tree would keep.

While a path of the tree is accepted the draft's context is the target's own text, so one teacher-forced pass gives the
rank of every token, and with it, exactly, each greedy iteration of every tree. For heads one of the target gives the
ranks of what follows among all of their guesses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shallowdraft.decoding.generation import Settings
from shallowdraft.decoding.ways import Way
from shallowdraft.errors import OptionError
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree, best_tree, chances
from shallowdraft.replay.replays import Counted
from shallowdraft.replay.traces import Output, Trace, hidden_states, predictions, require_greedy, require_numbers
from shallowdraft.replay.walk import steps

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
    ways = {count: Way.with_draft(draft, tree.depth, "tree", tree) for count, tree in trees.items()}
    kept = {count: ranks.kept(tree) for count, tree in trees.items()}
    offered = {count: ranks.offered(tree) for count, tree in trees.items()}
    return Counted(draft.name, trace, ways, kept, offered, draft.shape.context)


def replay_ranks(draft: Model, trace: Trace, *, fits: bool = False) -> Ranks:
    """One pass over every output."""
    require_greedy(trace)
    if not fits:
        trace.require_vocabulary(draft)
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


def replay_heads(target: Model, heads: Heads, name: str, trace: Trace, nodes: Sequence[int]) -> Counted:
    """The trees that heads propose, by how many nodes they have: one pass of the target over every output."""
    require_greedy(trace)
    ranks = [_guessed(target, heads, output) for output in trace.outputs]
    trees = {n: Settings(drafter="medusa", heads=heads, nodes=n).shape_of_tree(target.shape.vocab) for n in nodes}
    ways = {n: Way(name, tree.depth, "medusa", tree.parents, heads.digest) for n, tree in trees.items()}
    kept = {n: [[tree.accepted_depth(row[: tree.depth]) for row in one] for one in ranks] for n, tree in trees.items()}
    return Counted(name, trace, ways, kept)


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
        require_numbers(logits.amax(-1), f"target {target.name} or its heads")
        wanted = text[ahead:].unsqueeze(1)
        found.append((logits[: len(wanted)] > logits[: len(wanted)].gather(1, wanted)).sum(1).tolist())
    return [[of_head[at] for of_head in found if at < len(of_head)] for at in range(len(hidden))]
