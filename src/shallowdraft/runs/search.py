"""Searches for a draft: the candidates that were built and judged, one line per candidate and rung."""

from pathlib import Path
from typing import TypedDict

from shallowdraft.files import Count, Size
from shallowdraft.records import Record, Records

KIND = "search"


class Judgement(TypedDict):
    """A candidate that was built, replayed and timed."""

    candidate: str
    rung: Count
    tokens: Count
    lookahead: Size
    tar: float
    speed_up: float
    tokens_per_s: float


class Failure(TypedDict):
    """A candidate that failed, so that it was passed over."""

    candidate: str
    rung: Count
    failed: str


def open_search(path: Path, about: Record) -> Records:
    """Begin the record of a search, or go on with one of the same description."""
    return Records.open(path, KIND, about, Judgement | Failure)


def read_search(path: Path) -> list[Record]:
    """Read all lines: a Failure has the field `failed`, a Judgement has not."""
    return list(Records.read(path, KIND, Judgement | Failure))
