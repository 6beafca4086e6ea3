"""Tokens: the source of each token of some outputs, for the report."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Rate, from_record
from shallowdraft.records import Record, Records
from shallowdraft.runs.candidate import DrafterName

KIND = "inside"

Source = Literal["accepted", "correction", "bonus", "own"]
"""An accepted draft token; the target's in place of a rejected one; the target's behind a proposal that was accepted
as a whole; the target's without a proposal."""

Token = tuple[str, Source, str | None]
"""Its text, its source, and the text of the proposal that it replaced."""


@dataclass(frozen=True)
class TokenSources:
    """One output as one candidate made it, token by token."""

    set: str
    id: str
    sample: Count
    draft: str
    lookahead: Count
    drafter: DrafterName
    tree: tuple[Count, ...]
    digest: str
    dtype: str
    tar: Rate
    prompt: str
    """The end of the prompt."""
    tokens: tuple[Token, ...]


def write_tokens(path: Path, about: Record, rows: Iterable[TokenSources]) -> None:
    """Append the rows that differ from the last of the same output and proposer."""
    Records.open(path, KIND, about).renew(map(asdict, rows), "set", "id", "sample", "drafter", "draft")


def read_tokens(path: Path) -> list[TokenSources]:
    """Read the last row of every output and proposer."""
    latest: dict[tuple[str, str, int, str, str], TokenSources] = {}
    for where, record in Records.read(path, KIND).placed():
        row = from_record(
            TokenSources, {"tree": [], "digest": "", "dtype": ""} | record, where, RecordError, extra_fields=True
        )
        latest[row.set, row.id, row.sample, row.drafter, row.draft] = row
    return list(latest.values())
