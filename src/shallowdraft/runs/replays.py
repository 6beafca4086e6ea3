"""Replays: the acceptance of every proposer, one line each; the last line of a proposer counts."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shallowdraft.cost import Silence
from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Interval, Rate, Share, from_record
from shallowdraft.records import Record, Records
from shallowdraft.runs.candidate import DrafterName

KIND = "replays"


@dataclass(frozen=True)
class TarFigures:
    """Tokens per iteration by size: the lookahead, or for trees the number of nodes."""

    tar: dict[int, Rate] = field(default_factory=dict)
    tar_interval: dict[int, Interval] = field(default_factory=dict)
    """The 95 % interval over prompts."""

    def bounds(self, size: int) -> tuple[float | None, float | None]:
        """Return the interval at a size; None for both bounds if it is unknown."""
        return self.tar_interval.get(size, (None, None))


@dataclass(frozen=True)
class PromptTar:
    """Tokens per iteration on one output."""

    set: str
    id: str
    sample: Count
    tar: dict[int, float]


@dataclass(frozen=True)
class ReplayRecord:
    """A proposer's acceptance over the trace."""

    name: str
    """The name in tables."""
    drafter: DrafterName
    draft: str
    digest: str = ""
    dtype: str = ""
    shape: str = ""
    layers: Count = 0
    parameters: Count = 0
    tar: dict[int, Rate] = field(default_factory=dict)
    tar_interval: dict[int, Interval] = field(default_factory=dict)
    sets: dict[str, TarFigures] = field(default_factory=dict)
    """TAR of each prompt set."""
    acceptance_by_position: tuple[Share, ...] = ()
    silence: dict[int, Silence] = field(default_factory=dict)
    """By size, the part in which the draft's context is full, so that it proposes nothing."""
    prompts: tuple[PromptTar, ...] = ()

    def to_json(self) -> Record:
        """Return the line of this replay."""
        return asdict(self)


def write_replays(path: Path, about: Record, replays: Iterable[ReplayRecord]) -> None:
    """Append the replays that differ from the last of the same proposer."""
    file = Records.open(path, KIND, about)
    file.renew((replay.to_json() for replay in replays), "drafter", "draft")


def read_replays(path: Path) -> list[ReplayRecord]:
    """Read the last replay of every proposer."""
    latest = {(row.drafter, row.draft): row for row in _rows(Records.read(path, KIND))}
    return list(latest.values())


def _rows(file: Records) -> Iterable[ReplayRecord]:
    return (from_record(ReplayRecord, row, where, RecordError, extra_fields=True) for where, row in file.placed())
