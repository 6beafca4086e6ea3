"""Expected iterations of every output at every lookahead, from the acceptance of each token. No torch here.

While draft tokens are accepted, the draft's context is the target's own output. So one number per token is enough: the
probability that the draft token in its place is accepted. Under greedy decoding it is 0 or 1, under sampling it is
min(1, q(x) / p(x)).

Shapes: N outputs, T tokens of the longest output without its first, which the prefill yields, D lookaheads, K the
largest lookahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class IterationCounts:
    """Numbers of iterations of every output at every size of a proposal, in expectation over random choices."""

    sizes: tuple[int, ...]
    """Lookaheads, or the numbers of nodes of trees."""
    emitted: Floats
    """[N] Tokens that the iterations of an output yield."""
    iterations: Floats
    """[N, D] Iterations."""
    keeping: Floats
    """[N, D, K] Iterations that keep at least 1, 2, … K draft tokens."""
    proposing: Floats
    """[N, D, K] Iterations that propose at least 1, 2, … K draft tokens."""

    def at(self, size: int) -> Floats:
        """Return the iterations [N] at one size."""
        return self.iterations[:, self.sizes.index(size)]

    def silent_at(self, size: int) -> Floats:
        """Return the iterations [N] at one size that propose nothing."""
        return self.at(size) - self.proposing[:, self.sizes.index(size), 0]

    def tar(self, rows: NDArray[np.int64] | slice = slice(None)) -> Floats:
        """Return tokens per iteration [..., D] of some outputs together, which are rows [..., outputs].

        It is a ratio of sums, never a mean of ratios, so that long outputs count for more.
        """
        emitted, iterations = self.emitted[rows].sum(-1), self.iterations[rows].sum(-2)  # [...], [..., D]
        return np.asarray(emitted[..., None] / np.where(iterations > 0, iterations, 1.0)).clip(min=1.0)

    def acceptance_by_position(self, size: int) -> Floats:
        """Return, for k = 1 … size, the share [size] of iterations proposing k tokens or more that keep at least k."""
        column = self.sizes.index(size)
        keeping, proposing = (counts[:, column, :size].sum(0) for counts in (self.keeping, self.proposing))
        return np.asarray(keeping / np.where(proposing > 0, proposing, 1.0))


def count_iterations(
    acceptance: Sequence[Sequence[float] | Floats], lookaheads: Sequence[int], room: Sequence[int]
) -> IterationCounts:
    """Return the expected iterations at all lookaheads, by a dynamic programme over the tokens of each output.

    `acceptance` has the acceptance probabilities of each output, `room` the number of its tokens after which the
    draft's context is full. An iteration whose proposal does not fit drafts nothing and yields one token.
    """
    lengths, depths = np.array([len(row) for row in acceptance]), np.array(lookaheads)  # [N], [D]
    longest, deepest = int(lengths.max(initial=0)), int(depths.max())  # T, K
    chance = np.zeros((len(acceptance), longest))  # [N, T], shorter outputs padded with 0
    for row, values in enumerate(acceptance):
        chance[row, : len(values)] = values
    # mass[n, d, k]: the probability that an iteration is under way which has kept k draft tokens, the next one being
    # `token`. starts[n, d]: the probability that an iteration starts at `token`. Every token comes from exactly one
    # iteration, so at the top of the loop mass.sum(-1) + starts is 1.
    mass = np.zeros((len(acceptance), len(depths), deepest + 1))  # [N, D, K + 1]
    iterations, drafting = np.zeros(mass.shape[:2]), np.zeros(mass.shape[:2])  # [N, D]
    keeping = np.zeros((*mass.shape[:2], deepest))  # [N, D, K]
    may_draft = depths[:, None] > np.arange(deepest + 1)  # [D, K + 1]: after k kept tokens there is another one
    starts = np.ones(mass.shape[:2])  # [N, D]
    for token in range(longest):
        inside = (token < lengths)[:, None]  # [N, 1]: beyond an output's end nothing is counted
        drafts = token + depths <= np.array(room)[:, None]  # [N, D]: a proposal from here on fits into the context
        iterations += np.where(inside, starts, 0.0)
        drafting += np.where(inside & drafts, starts, 0.0)
        mass[..., 0] += np.where(drafts, starts, 0.0)
        kept = np.where(may_draft, mass, 0.0) * chance[:, token, None, None]  # [N, D, K + 1]
        # What is not kept ends: `token` is then the target's own, and the next iteration starts behind it.
        starts = mass.sum(-1) - kept.sum(-1) + np.where(drafts, 0.0, starts)
        mass = np.zeros_like(mass)
        mass[..., 1:] = kept[..., :-1]  # kept[..., K] is 0, as no lookahead is above K
        keeping += np.where(inside[..., None], mass[..., 1:], 0.0)
    proposing = drafting[..., None] * may_draft[:, :deepest]  # [N, D, K]
    return IterationCounts(tuple(lookaheads), lengths.astype(float), iterations, keeping, proposing)


def kept_by_iteration(matches: Sequence[bool], lookahead: int, room: int) -> list[int]:
    """Return the number of draft tokens that each greedy iteration keeps.

    `matches` says of each token whether the draft proposes it; `room` is as for `count_iterations`.
    """
    kept, token = [], 0
    while token < len(matches):
        allowed = lookahead if token + lookahead <= room else 0
        run = 0
        while run < allowed and token + run < len(matches) and matches[token + run]:
            run += 1
        kept.append(run)
        token += run + 1  # behind the kept ones the target's own token
    return kept


def iteration_starts(kept_at: Sequence[int]) -> list[int]:
    """Return the positions at which greedy iterations start.

    `kept_at` has the number of draft tokens that an iteration keeps if it starts at each position.
    """
    starts, position = [], 0
    while position < len(kept_at):
        starts.append(position)
        position += kept_at[position] + 1
    return starts


def kept_at_starts(kept_at: Sequence[int]) -> list[int]:
    """Return the number of draft tokens that each greedy iteration keeps; `kept_at` is as for `iteration_starts`."""
    return [kept_at[start] for start in iteration_starts(kept_at)]
