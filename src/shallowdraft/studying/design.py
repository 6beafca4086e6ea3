"""Shapes worth building: the children of a parent, how long each would draft, and the acceptance that each needs.

How much a target accepts of a draft that does not exist cannot be known; how much it must accept can. At every
lookahead the throughput to reach gives a TAR, and the TAR an acceptance rate; the lowest rate counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import floor, log

from shallowdraft import cost
from shallowdraft.cost import Iteration
from shallowdraft.errors import OptionError
from shallowdraft.profiling.latency_model import SHARES, LatencyModel, buildable, layer_weights, narrowed
from shallowdraft.runs.profile import Profile
from shallowdraft.shapes.shape import ModelShape

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
FFN_SHARES = (0.5, 1.0, 2.0)  # of the FFN size that the width suggests, as far as the parent has it
SAME_LATENCY = 1.1  # shapes whose steps differ by less than this factor take about as long


@dataclass(frozen=True)
class Requirement:
    """The acceptance that a draft needs for a throughput, at the lookahead where it needs least."""

    lookahead: int
    tar: float
    acceptance_rate: float
    """The rate if tokens are accepted independently; infinite where no draft can reach the throughput."""


@dataclass(frozen=True)
class Design:
    """A shape that a parent can be pruned to."""

    shape: ModelShape
    step_s: float
    """Seconds of a draft step."""
    break_even: Requirement
    """The acceptance at which it is as fast as plain decoding."""
    to_win: Requirement
    """The acceptance at which it is as fast as the best draft at hand."""
    latency_set: int
    """Shapes with the same number take about as long."""
    on_front: bool
    """Whether no faster shape has as many weights in its layers."""


def enumerate_shapes(parent: ModelShape, max_parameters: int | None = None) -> list[ModelShape]:
    """Return the parent, and smaller depths, widths and FFN sizes, as far as other software can load them."""
    depths = sorted({depth for depth in DEPTHS if depth <= parent.layers} | {parent.layers})
    shapes = [parent]
    shapes += [
        narrowed(parent, layers, share, max(8, round(share * ffn_share * parent.ffn / 8) * 8))
        for layers, share, ffn_share in product(depths, SHARES, FFN_SHARES)
    ]
    fitting = [shape for shape in buildable(parent, shapes) if shape.parameters <= (max_parameters or shape.parameters)]
    if not fitting:
        raise OptionError(f"no shape of the parent has {max_parameters:,} parameters or fewer; allow more")
    return fitting


def design(
    shapes: Sequence[ModelShape],
    latency: LatencyModel,
    profile: Profile,
    context: float,
    lookaheads: Iterable[int],
    best_tokens_per_s: float | None = None,
) -> list[Design]:
    """Return a design of every shape, the fastest first.

    `best_tokens_per_s` is the throughput to beat, at least that of plain decoding.
    """
    plain_tokens_per_s = 1 / profile.plain_s(context)
    timed = [lookahead for lookahead in lookaheads if lookahead <= max(profile.lookaheads())]
    # Verification and everything else take the same time whatever the draft's shape.
    without_draft = {
        lookahead: Iteration(0.0, profile.verification_s(lookahead, context), profile.other_s(lookahead, context))
        for lookahead in timed
    }
    longest = max(timed)

    def step_s(shape: ModelShape) -> float:
        return latency.draft_s(shape, longest, context) / longest

    def required(shape: ModelShape, tokens_per_s: float) -> Requirement:
        requirements = []
        for lookahead, times in without_draft.items():
            iteration = Iteration(latency.draft_s(shape, lookahead, context), times.verify_s, times.other_s)
            tar = cost.required_tar(tokens_per_s, iteration)
            requirements.append(Requirement(lookahead, tar, cost.independent_acceptance(tar, lookahead)))
        return min(requirements, key=lambda requirement: (requirement.acceptance_rate, requirement.lookahead))

    ordered = sorted(shapes, key=lambda shape: (step_s(shape), -layer_weights(shape)))
    fastest_s, most_weights = step_s(ordered[0]), 0  # most_weights: of the shapes so far, all of which are as fast
    designs = []
    for shape in ordered:
        designs.append(
            Design(
                shape,
                step_s(shape),
                required(shape, plain_tokens_per_s),
                required(shape, max(plain_tokens_per_s, best_tokens_per_s or 0.0)),
                floor(log(step_s(shape) / fastest_s) / log(SAME_LATENCY)),
                layer_weights(shape) > most_weights,
            )
        )
        most_weights = max(most_weights, layer_weights(shape))
    return designs
