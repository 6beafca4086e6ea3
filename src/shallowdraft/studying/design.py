"""Shapes worth building: what a parent can be pruned to, what each would cost here, and what it would have to accept.

How much a target accepts of a draft that does not exist cannot be known; how much it must accept can. At every
lookahead the throughput to beat gives the TAR that is needed, and with it an acceptance rate; the lookahead that asks
least counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import floor, log

from shallowdraft import cost
from shallowdraft.cost import Iteration
from shallowdraft.errors import OptionError
from shallowdraft.profiling.latency_model import SHARES, LatencyLaw, buildable, layer_weights, narrowed
from shallowdraft.runs.profile import Profile
from shallowdraft.shapes.shape import ModelShape

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
FFN_SHARES = (0.5, 1.0, 2.0)  # of what the width suggests, as far as the parent has it
SAME = 1.1  # drafting that takes at most so much longer takes as long


@dataclass(frozen=True)
class Needed:
    """What a draft must bring for a wanted throughput, at the lookahead that asks least."""

    lookahead: int
    tar: float
    acceptance_rate: float
    """As if tokens were accepted independently; infinite where no draft can do it."""


@dataclass(frozen=True)
class Design:
    """A shape that a parent can be pruned to."""

    shape: ModelShape
    step_s: float
    break_even: Needed
    to_win: Needed
    """To be as fast as the best draft at hand."""
    latency_set: int
    """Shapes with the same number take about as long."""
    on_front: bool
    """No shape has more weights in its layers and is as fast."""


def enumerate_shapes(parent: ModelShape, max_parameters: int | None = None) -> list[ModelShape]:
    """Depths, widths and FFN sizes that the parent has room for, the parent itself among them."""
    depths = sorted({depth for depth in DEPTHS if depth <= parent.layers} | {parent.layers})
    shapes = [parent]
    shapes += [
        narrowed(parent, layers, share, max(8, round(share * ffn * parent.ffn / 8) * 8))
        for layers, share, ffn in product(depths, SHARES, FFN_SHARES)
    ]
    fitting = [shape for shape in buildable(parent, shapes) if shape.parameters <= (max_parameters or shape.parameters)]
    if not fitting:
        raise OptionError(f"no shape of the parent has {max_parameters:,} parameters or fewer; allow more")
    return fitting


def design(
    shapes: Sequence[ModelShape],
    law: LatencyLaw,
    profile: Profile,
    context: float,
    lookaheads: Iterable[int],
    best_tokens_per_s: float | None = None,
) -> list[Design]:
    """Every shape, fastest first; `best_tokens_per_s` is what there is to beat, by default plain decoding."""
    plain = 1 / profile.plain_s(context)
    known = [d for d in lookaheads if d <= max(profile.lookaheads())]
    base = {d: Iteration(0.0, profile.verification_s(d, context), profile.other_s(d, context)) for d in known}
    longest = max(known)

    def step_s(shape: ModelShape) -> float:
        return law.draft_s(shape, longest, context) / longest

    def needed(shape: ModelShape, goal: float) -> Needed:
        found = []
        for d, rest in base.items():
            whole = Iteration(law.draft_s(shape, d, context), rest.verify_s, rest.other_s)
            tar = cost.required_tar(goal, whole)
            found.append(Needed(d, tar, cost.independent_acceptance(tar, d)))
        return min(found, key=lambda one: (one.acceptance_rate, one.lookahead))

    ordered = sorted(shapes, key=lambda shape: (step_s(shape), -layer_weights(shape)))
    fastest, most = step_s(ordered[0]), 0
    designs = []
    for shape in ordered:
        designs.append(
            Design(
                shape,
                step_s(shape),
                needed(shape, plain),
                needed(shape, max(plain, best_tokens_per_s or 0.0)),
                floor(log(step_s(shape) / fastest) / log(SAME)),
                layer_weights(shape) > most,
            )
        )
        most = max(most, layer_weights(shape))
    return designs
