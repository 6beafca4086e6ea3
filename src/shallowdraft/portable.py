"""Shapes that other software loads: transformers, and the engines that a draft is exported to. No torch here.

Transformers refuses a Llama whose heads do not divide d_model, whatever width they are said to have. It takes the heads
of an OPT, and vLLM those of a Qwen2, to be d_model / heads wide. T5 may have any heads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shallowdraft.errors import OptionError
from shallowdraft.shapes.shape import Family, ModelShape, child_shape

FULL_WIDTH: tuple[Family, ...] = ("opt", "qwen2")
"""Families whose heads together must be as wide as d_model."""


def refusal(shape: ModelShape) -> str | None:
    """Say why some other software would not load the shape; None where all of it does."""
    if shape.encoder:
        return None
    width = shape.heads * shape.head_dim
    if shape.family in FULL_WIDTH and width != shape.d_model:
        return f"in {shape.family} heads are as wide as d_model, and {shape.heads} of {shape.head_dim} are {width} wide"
    if shape.d_model % shape.heads:
        return f"{shape.heads} heads do not divide d_model {shape.d_model}"
    return None


def require_portable(shape: ModelShape, parent: ModelShape | None = None) -> None:
    """Raise for a shape that other software would not load, naming the nearest ones, no larger than the parent."""
    if reason := refusal(shape):
        nearest = " or ".join(map(str, _nearest(shape, parent)))
        raise OptionError(f"{shape}: {reason}; transformers or an engine would not load such a model; take {nearest}")


def _nearest(shape: ModelShape, parent: ModelShape | None) -> Iterator[ModelShape]:
    """The next narrower and wider with the same heads, then with fewer and more heads of the same width."""
    group = shape.heads // shape.kv_heads
    widest = parent.d_model if parent else shape.d_model + shape.heads * shape.head_dim
    most_groups = parent.kv_heads if parent else shape.d_model // group
    for widths in (range(shape.d_model - 1, 0, -1), range(shape.d_model + 1, widest + 1)):
        yield from _first_portable(shape, ((width, shape.kv_heads) for width in widths))
    for counts in (range(shape.kv_heads - 1, 0, -1), range(shape.kv_heads + 1, most_groups + 1)):
        yield from _first_portable(shape, ((shape.d_model, count) for count in counts))


def _first_portable(shape: ModelShape, sizes: Iterable[tuple[int, int]]) -> Iterator[ModelShape]:
    """The shape with the first d_model and number of key/value heads that will do, if any does."""
    group = shape.heads // shape.kv_heads
    for d_model, kv_heads in sizes:
        wanted = replace(shape, d_model=d_model, heads=kv_heads * group, kv_heads=kv_heads)
        candidate = child_shape(shape, wanted)
        if refusal(candidate) is None:
            yield candidate
            return
