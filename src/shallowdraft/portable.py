"""Shapes that other software can load: transformers, and the engines that a draft is exported to. No torch here.

Transformers refuses a Llama whose number of heads does not divide d_model, whatever head_dim its config has. It takes
the heads of an OPT, and vLLM those of a Qwen2, to be d_model / heads wide. A T5 may have any heads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shallowdraft.errors import OptionError
from shallowdraft.shapes.shape import Family, ModelShape, child_shape

FULL_WIDTH: tuple[Family, ...] = ("opt", "qwen2")
"""Families whose heads must together be as wide as d_model."""


def refusal(shape: ModelShape) -> str | None:
    """Return the reason for which some other software would not load the shape; None if there is none."""
    if shape.encoder:
        return None
    width = shape.heads * shape.head_dim
    if shape.family in FULL_WIDTH and width != shape.d_model:
        return f"in {shape.family} heads are as wide as d_model, and {shape.heads} of {shape.head_dim} are {width} wide"
    if shape.d_model % shape.heads:
        return f"{shape.heads} heads do not divide d_model {shape.d_model}"
    return None


def require_portable(shape: ModelShape, parent: ModelShape | None = None) -> None:
    """Raise for a shape that other software would not load; name the nearest that it would, no larger than a parent."""
    if reason := refusal(shape):
        nearest = " or ".join(map(str, _nearest_portable(shape, parent)))
        raise OptionError(f"{shape}: {reason}; transformers or an engine would not load such a model; take {nearest}")


def _nearest_portable(shape: ModelShape, parent: ModelShape | None) -> Iterator[ModelShape]:
    """Yield the next narrower and wider shape with the same heads, then with fewer and more heads of the same width."""
    group = shape.heads // shape.kv_heads
    max_width = parent.d_model if parent else shape.d_model + shape.heads * shape.head_dim
    max_kv_heads = parent.kv_heads if parent else shape.d_model // group
    for widths in (range(shape.d_model - 1, 0, -1), range(shape.d_model + 1, max_width + 1)):
        yield from _first_portable(shape, ((width, shape.kv_heads) for width in widths))
    for counts in (range(shape.kv_heads - 1, 0, -1), range(shape.kv_heads + 1, max_kv_heads + 1)):
        yield from _first_portable(shape, ((shape.d_model, count) for count in counts))


def _first_portable(shape: ModelShape, sizes: Iterable[tuple[int, int]]) -> Iterator[ModelShape]:
    """Yield the first shape of these d_models and numbers of key/value heads that is portable, if there is one."""
    group = shape.heads // shape.kv_heads
    for d_model, kv_heads in sizes:
        resized = replace(shape, d_model=d_model, heads=kv_heads * group, kv_heads=kv_heads)
        candidate = child_shape(shape, resized)
        if refusal(candidate) is None:
            yield candidate
            return
