"""Tensors of a Hugging Face checkpoint, as the layouts of the families name them."""

from collections.abc import Iterator
from dataclasses import dataclass

Named = tuple[str, tuple["Stored", ...]]
"""Our name of a parameter, and the tensors of the checkpoint that it is concatenated from, along dimension 0."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    size: tuple[int, ...]


def linear(ours: str, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool) -> Iterator[Named]:
    yield ours + ".weight", tuple(Stored(name + ".weight", (rows, columns)) for name, rows in parts)
    if bias:
        yield ours + ".bias", tuple(Stored(name + ".bias", (rows,)) for name, rows in parts)


def norm(ours: str, theirs: str, width: int) -> Iterator[Named]:
    yield ours + ".weight", (Stored(theirs + ".weight", (width,)),)
    yield ours + ".bias", (Stored(theirs + ".bias", (width,)),)
