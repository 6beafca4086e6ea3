"""A law for the time of drafting, fitted to shapes that were timed with random weights.

    drafting = start + lookahead * (step + layers * layer + weights * weight + cached numbers attended to * attended)

All coefficients are at least 0; the fit minimises relative errors, and says how large they are left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from statistics import median

import numpy as np

from shallowdraft.errors import OptionError, RecordError
from shallowdraft.portable import FULL_WIDTH, refusal
from shallowdraft.records import RANDOM
from shallowdraft.runs.profile import Profile
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

DEPTHS = (1, 2, 4, 8)
SHARES = (1.0, 0.75, 0.5, 0.375, 0.25)
FIXED_DEPTH = 2
STEPS = (32, 8, 1)  # of d_model, the coarsest that comes near enough to the wanted width
NEAR = 1 / 8
FEWEST = 5  # shapes for a law


@dataclass(frozen=True)
class Observation:
    """All draft steps of an iteration."""

    shape: ModelShape
    lookahead: int
    context: float
    seconds: float


@dataclass(frozen=True)
class LatencyLaw:
    """Seconds by what causes them."""

    start_s: float
    """An iteration's, whatever is drafted."""
    step_s: float
    layer_s: float
    weight_s: float
    """A weight that is read, in the precision that was timed."""
    attended_s: float
    """A number in the cache that is attended to."""
    residuals: tuple[float, ...] = ()
    """Relative error on every observation."""

    def draft_s(self, shape: ModelShape, lookahead: int, context: float) -> float:
        coefficients = (self.start_s, self.step_s, self.layer_s, self.weight_s, self.attended_s)
        return float(np.dot(coefficients, _causes(shape, lookahead, context)))

    @property
    def typical_error(self) -> float:
        return median(abs(error) for error in self.residuals)

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.residuals)


def _causes(shape: ModelShape, lookahead: int, context: float) -> tuple[float, ...]:
    attended = context * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return 1.0, *(lookahead * cause for cause in (1.0, shape.layers, shape.pass_parameters, attended))


def fit(observations: Sequence[Observation]) -> LatencyLaw:
    from scipy.optimize import nnls

    shapes = {one.shape for one in observations}
    if len(shapes) < FEWEST:
        raise RecordError(f"{len(shapes)} shapes were timed; a law needs {FEWEST}, with different depths and widths")
    causes = np.array([_causes(one.shape, one.lookahead, one.context) for one in observations])
    seconds = np.array([one.seconds for one in observations])
    scale = causes.max(0)
    found, _ = nnls(causes / scale / seconds[:, None], np.ones(len(seconds)))
    law = LatencyLaw(*(found / scale).tolist())
    errors = tuple(law.draft_s(one.shape, one.lookahead, one.context) / one.seconds - 1 for one in observations)
    return replace(law, residuals=errors)


def observations(profile: Profile, like: ModelShape) -> list[Observation]:
    """Of the shapes in a profile, which are of the family of `like`."""
    return [
        Observation(
            shape_of(point.candidate.draft, like),
            point.candidate.lookahead,
            point.context,
            profile.iteration_of(point.candidate, point.context).draft_s,
        )
        for point in profile.samples
        if point.candidate.draft.startswith(RANDOM) and point.batch == 1
    ]


def shape_of(name: str, like: ModelShape) -> ModelShape:
    """The shape that a draft with random weights is named after."""
    return child_shape(like, parse_shape(name.removeprefix(RANDOM), vocab=like.vocab, context=like.context))


def narrowed(parent: ModelShape, layers: int, share: float, ffn: int | None = None) -> ModelShape:
    """So many layers, each that share of the parent's wide: whole key/value groups, FFN in eights."""
    kv_heads = max(1, round(share * parent.kv_heads))
    heads = kv_heads * (parent.heads // parent.kv_heads)
    return replace(
        parent,
        layers=layers,
        d_model=parent.d_model if share == 1 else _width(parent, heads, share * parent.d_model),
        heads=heads,
        kv_heads=kv_heads,
        ffn=min(parent.ffn, ffn or max(8, round(share * parent.ffn / 8) * 8)),
        embed_dim=0 if parent.embed_dim == parent.d_model else parent.embed_dim,
        full_layers=min(layers, parent.full_layers),
    )


def _width(parent: ModelShape, heads: int, wanted: float) -> int:
    """A d_model near the wanted one that so many of the parent's heads divide, a multiple of 32 or 8 if possible."""
    if parent.family in FULL_WIDTH:
        return heads * parent.head_dim
    for step in STEPS:
        unit = lcm(step, heads)
        width = unit * max(1, min(round(wanted / unit), parent.d_model // unit))
        if abs(width - wanted) <= NEAR * wanted:
            break
    return width


def figure_4(parent: ModelShape) -> dict[str, list[ModelShape]]:
    """The paper's three families: as many weights in fewer, wider layers; depths at one width; widths at one depth."""
    depths = [layers for layers in DEPTHS if layers <= parent.layers]
    fixed = min(FIXED_DEPTH, parent.layers)
    flat = narrowed(parent, 1, 1.0)
    weights = layer_weights(flat)
    same = []
    for layers in depths:
        share = layers**-0.5
        narrow = narrowed(parent, 1, share, 8)
        eight = layer_weights(replace(narrow, ffn=narrow.ffn + 8)) - layer_weights(narrow)
        ffn = narrow.ffn + round((weights / layers - layer_weights(narrow)) / eight) * 8
        if 8 <= ffn <= parent.ffn:
            same.append(narrowed(parent, layers, share, ffn))
    return {
        "as many weights in layers": same,
        "depth at full width": [narrowed(parent, layers, 1.0) for layers in depths],
        f"width at depth {fixed}": [narrowed(parent, fixed, share) for share in SHARES],
    }


def layer_weights(shape: ModelShape) -> int:
    """Parameters of all layers."""
    head = 0 if shape.tied else shape.vocab * shape.embed_dim
    return shape.parameters - shape.embedding_parameters - head


def trial_shapes(parent: ModelShape) -> list[ModelShape]:
    """What to time for a law: Figure 4's shapes, and depths at half the width."""
    families: Iterable[list[ModelShape]] = figure_4(parent).values()
    half = [narrowed(parent, layers, 0.5) for layers in DEPTHS if layers <= parent.layers]
    return buildable(parent, [shape for family in families for shape in family] + half)


def buildable(parent: ModelShape, shapes: Iterable[ModelShape]) -> list[ModelShape]:
    """Shapes that the parent has room for and other software loads, each once."""
    fitting = [shape for shape in dict.fromkeys(shapes) if shape.d_model <= parent.d_model and refusal(shape) is None]
    if not fitting:
        raise OptionError(
            f"{parent}: {refusal(parent)}, and no shape that it can be pruned to would be loaded by transformers and "
            "engines; take another parent"
        )
    return fitting
