"""Tensors of a Hugging Face checkpoint, in the layouts of model families."""

from collections.abc import Iterator
from dataclasses import dataclass

Named = tuple[str, tuple["Stored", ...]]
"""Our name of a parameter, and the checkpoint's tensors that form it, concatenated along dimension 0."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    size: tuple[int, ...]


def linear(ours: str, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool) -> Iterator[Named]:
    """Yield the weight, and the bias if there is one, of a projection; `parts` are its tensors' names and rows."""
    yield ours + ".weight", tuple(Stored(name + ".weight", (rows, columns)) for name, rows in parts)
    if bias:
        yield ours + ".bias", tuple(Stored(name + ".bias", (rows,)) for name, rows in parts)


def norm(ours: str, theirs: str, width: int) -> Iterator[Named]:
    """Yield the weight and the bias of a LayerNorm."""
    yield ours + ".weight", (Stored(theirs + ".weight", (width,)),)
    yield ours + ".bias", (Stored(theirs + ".bias", (width,)),)
