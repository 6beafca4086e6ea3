"""A model of drafting latency, fitted to shapes that were timed with random weights.

    draft_s = start_s + lookahead * (step_s + layers * layer_s + weights * weight_s + attended numbers * attended_s)

No coefficient is below 0. The fit minimises relative errors, and keeps them, so that a user sees how well it fits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from statistics import median

import numpy as np

from shallowdraft.errors import OptionError, RecordError
from shallowdraft.portable import FULL_WIDTH, refusal
from shallowdraft.records import RANDOM
from shallowdraft.runs.profile import Profile
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

DEPTHS = (1, 2, 4, 8)  # layers of the shapes to time
SHARES = (1.0, 0.75, 0.5, 0.375, 0.25)  # of the parent's width
FIXED_DEPTH = 2  # layers of the shapes that differ in width
WIDTH_STEPS = (32, 8, 1)  # a d_model is a multiple of the largest of these that comes near enough to the width sought
NEAR = 1 / 8  # the relative distance that is near enough
FEWEST = 5  # shapes for a fit: the number of coefficients


@dataclass(frozen=True)
class Observation:
    """The time of all draft steps of an iteration."""

    shape: ModelShape
    lookahead: int
    context: float
    """Tokens in the KV cache."""
    seconds: float


@dataclass(frozen=True)
class LatencyModel:
    """Coefficients in seconds, each for one feature of a shape."""

    start_s: float
    """Per iteration, whatever is drafted."""
    step_s: float
    """Per draft step."""
    layer_s: float
    """Per layer and step."""
    weight_s: float
    """Per weight that a step reads, in the precision that was timed."""
    attended_s: float
    """Per number in the KV cache that a step attends to."""
    residuals: tuple[float, ...] = ()
    """Relative error on every observation."""

    def draft_s(self, shape: ModelShape, lookahead: int, context: float) -> float:
        """Return the predicted seconds of all draft steps of an iteration."""
        coefficients = (self.start_s, self.step_s, self.layer_s, self.weight_s, self.attended_s)
        return float(np.dot(coefficients, _features(shape, lookahead, context)))

    @property
    def typical_error(self) -> float:
        """The median relative error."""
        return median(abs(error) for error in self.residuals)

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.residuals)


def _features(shape: ModelShape, lookahead: int, context: float) -> tuple[float, ...]:
    """Return the number of iterations (1), and of steps, layers, weights and attended numbers of all its steps."""
    attended = context * 2 * shape.layers * shape.kv_heads * shape.head_dim  # 2: keys and values
    return 1.0, *(lookahead * feature for feature in (1.0, shape.layers, shape.pass_parameters, attended))


def fit(observations: Sequence[Observation]) -> LatencyModel:
    """Fit a latency model by non-negative least squares on relative errors."""
    from scipy.optimize import nnls

    shapes = {observation.shape for observation in observations}
    if len(shapes) < FEWEST:
        raise RecordError(
            f"{len(shapes)} shapes were timed; a latency model needs {FEWEST}, with different depths and widths"
        )
    features = np.array([_features(timed.shape, timed.lookahead, timed.context) for timed in observations])
    seconds = np.array([timed.seconds for timed in observations])
    # Least squares of predicted / measured - 1: each row of features [observations, 5] is divided by its seconds, and
    # each should give 1. A negative time per layer or weight would make larger shapes faster, so none is allowed.
    # Features differ by ten orders of magnitude, from 1 iteration to 1e10 weights: each column is scaled to at most 1.
    scale = features.max(0)
    coefficients, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    model = LatencyModel(*(coefficients / scale).tolist())
    residuals = [
        model.draft_s(timed.shape, timed.lookahead, timed.context) / timed.seconds - 1 for timed in observations
    ]
    return replace(model, residuals=tuple(residuals))


def observations(profile: Profile, like: ModelShape) -> list[Observation]:
    """Return the times of the shapes in a profile, as children of `like`."""
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
    """Return the shape that a draft with random weights is named after, as a child of `like`."""
    return child_shape(like, parse_shape(name.removeprefix(RANDOM), vocab=like.vocab, context=like.context))


def narrowed(parent: ModelShape, layers: int, share: float, ffn: int | None = None) -> ModelShape:
    """Return a narrower child: a share of the parent's width in whole key/value groups, an FFN in multiples of 8."""
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


def _width(parent: ModelShape, heads: int, sought: float) -> int:
    """Return a d_model near the one sought that the number of heads divides, if possible a multiple of 32 or 8."""
    if parent.family in FULL_WIDTH:
        return heads * parent.head_dim
    for step in WIDTH_STEPS:
        unit = lcm(step, heads)
        width = unit * max(1, min(round(sought / unit), parent.d_model // unit))
        if abs(width - sought) <= NEAR * sought:
            break
    return width


def figure_4(parent: ModelShape) -> dict[str, list[ModelShape]]:
    """Return the families of the paper's Figure 4: one number of weights, one width, and one depth.

    In the first, the same number of weights in layers is spread over fewer, wider or more, narrower layers.
    """
    depths = [layers for layers in DEPTHS if layers <= parent.layers]
    fixed = min(FIXED_DEPTH, parent.layers)
    flat = narrowed(parent, 1, 1.0)
    weights = layer_weights(flat)
    same_weights = []
    for layers in depths:
        share = layers**-0.5  # a layer's weights grow with the square of its width
        narrow = narrowed(parent, 1, share, 8)
        # The FFN, in multiples of 8, makes up for the rounding of the width: each 8 add the same number of weights.
        per_eight = layer_weights(replace(narrow, ffn=narrow.ffn + 8)) - layer_weights(narrow)
        ffn = narrow.ffn + round((weights / layers - layer_weights(narrow)) / per_eight) * 8
        if 8 <= ffn <= parent.ffn:
            same_weights.append(narrowed(parent, layers, share, ffn))
    return {
        "as many weights in layers": same_weights,
        "depth at full width": [narrowed(parent, layers, 1.0) for layers in depths],
        f"width at depth {fixed}": [narrowed(parent, fixed, share) for share in SHARES],
    }


def layer_weights(shape: ModelShape) -> int:
    """Return the number of parameters of all layers together."""
    head = 0 if shape.tied else shape.vocab * shape.embed_dim
    return shape.parameters - shape.embedding_parameters - head


def trial_shapes(parent: ModelShape) -> list[ModelShape]:
    """Return the shapes to time for a latency model: those of Figure 4, and depths at half the width."""
    half_width = [narrowed(parent, layers, 0.5) for layers in DEPTHS if layers <= parent.layers]
    return buildable(parent, [*chain.from_iterable(figure_4(parent).values()), *half_width])


def buildable(parent: ModelShape, shapes: Iterable[ModelShape]) -> list[ModelShape]:
    """Return the shapes that are no wider than the parent and that other software can load, each once."""
    fitting = [shape for shape in dict.fromkeys(shapes) if shape.d_model <= parent.d_model and refusal(shape) is None]
    if not fitting:
        raise OptionError(
            f"{parent}: {refusal(parent)}, and no shape that it can be pruned to would be loaded by transformers and "
            "engines; take another parent"
        )
    return fitting
