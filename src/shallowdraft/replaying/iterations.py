"""From the acceptance of each token to what every lookahead gives. No torch here.

While a draft is accepted its context is the target's own text. So one number a token says everything: the probability
that the draft's proposal in its place is accepted, 0 or 1 under greedy decoding, min(1, q(x) / p(x)) under sampling.

Shapes: N sequences, T tokens of the longest (the one that prefill yields is not among them), D lookaheads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """What speculation does with each sequence at each size of a proposal, on average over its random choices."""

    sizes: tuple[int, ...]
    """Lookaheads, or how many nodes a tree has."""
    emitted: Floats
    """[N] tokens that iterations yield."""
    iterations: Floats
    """[N, D] expected."""
    reached: Floats
    """[N, D, largest lookahead] expected iterations that keep at least 1, 2, … draft tokens."""
    tried: Floats
    """[N, D, largest lookahead] expected iterations that propose at least 1, 2, … draft tokens."""

    def at(self, size: int) -> Floats:
        """Iterations [N] at one size."""
        return self.iterations[:, self.sizes.index(size)]

    def silent_at(self, size: int) -> Floats:
        """Iterations [N] at one size that propose nothing."""
        return self.at(size) - self.tried[:, self.sizes.index(size), 0]

    def tar(self, rows: NDArray[np.int64] | slice = slice(None)) -> Floats:
        """Tokens an iteration [..., D] of sequences together: a quotient of sums, never a mean of quotients."""
        emitted, iterations = self.emitted[rows].sum(-1), self.iterations[rows].sum(-2)
        return np.asarray(emitted[..., None] / np.where(iterations > 0, iterations, 1.0)).clip(min=1.0)

    def acceptance_by_position(self, size: int) -> Floats:
        """Share of the iterations that propose at least 1, 2, … draft tokens, of those that keep as many."""
        kept, tried = (of[:, self.sizes.index(size), :size].sum(0) for of in (self.reached, self.tried))
        return np.asarray(kept / np.where(tried > 0, tried, 1.0))


def walk(accepted: Sequence[Sequence[float] | Floats], lookaheads: Sequence[int], room: Sequence[int]) -> Walk:
    """Follow the law of the engine's iterations through sequences of acceptance probabilities, all lookaheads at once.

    `room`: tokens after which the draft's context is full; an iteration whose proposal would pass it drafts nothing.
    """
    counts, depths = np.array([len(row) for row in accepted]), np.array(lookaheads)
    longest, deepest = int(counts.max(initial=0)), int(depths.max())
    chance = np.zeros((len(accepted), longest))
    for row, values in enumerate(accepted):
        chance[row, : len(values)] = values
    # mass[n, d, k]: the probability of being in an iteration that has kept k draft tokens so far
    mass = np.zeros((len(accepted), len(depths), deepest + 1))
    iterations, drafting = np.zeros(mass.shape[:2]), np.zeros(mass.shape[:2])
    reached = np.zeros((*mass.shape[:2], deepest))
    may_draft = depths[:, None] > np.arange(deepest + 1)  # [D, k]: another draft token may follow
    starts = np.ones(mass.shape[:2])
    for token in range(longest):
        inside = (token < counts)[:, None]
        drafts = token + depths <= np.array(room)[:, None]
        iterations += np.where(inside, starts, 0.0)
        drafting += np.where(inside & drafts, starts, 0.0)
        mass[..., 0] += np.where(drafts, starts, 0.0)
        kept = np.where(may_draft, mass, 0.0) * chance[:, token, None, None]
        starts = mass.sum(-1) - kept.sum(-1) + np.where(drafts, 0.0, starts)
        mass = np.zeros_like(mass)
        mass[..., 1:] = kept[..., :-1]
        reached += np.where(inside[..., None], mass[..., 1:], 0.0)
    tried = drafting[..., None] * may_draft[:, :deepest]
    return Walk(tuple(lookaheads), counts.astype(float), iterations, reached, tried)


def iterations_of(matched: Sequence[bool], lookahead: int, room: int) -> list[int]:
    """Draft tokens that each greedy iteration keeps."""
    kept, token = [], 0
    while token < len(matched):
        allowed = lookahead if token + lookahead <= room else 0
        run = 0
        while run < allowed and token + run < len(matched) and matched[token + run]:
            run += 1
        kept.append(run)
        token += run + 1
    return kept


def places(kept: Sequence[int]) -> list[int]:
    """Where greedy iterations begin, if one that begins at each place keeps so many draft tokens."""
    found, at = [], 0
    while at < len(kept):
        found.append(at)
        at += kept[at] + 1
    return found


def steps(kept: Sequence[int]) -> list[int]:
    """Draft tokens that each greedy iteration keeps, likewise."""
    return [kept[at] for at in places(kept)]
