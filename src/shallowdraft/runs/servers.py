"""Servers: the requests that `bench` sent to one, a line each, and the server's counters meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Range, Seconds, Size, require_fields
from shallowdraft.records import Record, Records

KIND = "requests of a server"

CounterIncrease = Annotated[float, Range(-1e15, 1e15)]
RequestKey = tuple[int, str, str]
"""The round of a request, and the set and id of its prompt."""


class BenchSettings(TypedDict):
    """The first line's description of the requests and the server."""

    max_tokens: Count
    temperature: float
    chat: bool
    draft: NotRequired[str | None]
    lookahead: NotRequired[Size | None]
    model_digest: NotRequired[str]
    draft_digest: NotRequired[str]


class _SpeculationCounts(TypedDict):
    """A server's counts of speculation, of a request or over all requests of a concurrency."""

    num_spec_steps: CounterIncrease
    num_draft_tokens: CounterIncrease
    num_accepted_draft_tokens: CounterIncrease
    recent_tar: NotRequired[float | None]


class _FailedRequest(TypedDict):
    """A request that failed."""

    concurrency: Size
    round: Count
    set: str
    id: str
    error: str


class _AnsweredRequest(TypedDict):
    """A request that was answered."""

    concurrency: Size
    in_run: Count
    round: Count
    set: str
    id: str
    arrivals_s: list[Seconds]
    total_s: Seconds
    share_s: Seconds
    tokens: Count
    speculation: _SpeculationCounts | None


class _LevelCounters(TypedDict):
    """The server's counters over all requests of a concurrency."""

    concurrency: Size
    counters: _SpeculationCounts


def open_requests(path: Path) -> Records:
    """Open a file of requests, and check the settings in its first line."""
    file = Records.read(path, KIND)
    require_fields(file.about, BenchSettings, f"{path}:1", RecordError)
    return file


def read_requests(path: Path) -> Iterator[Record]:
    """Yield the records of a file: answered requests, failed ones, and counters of a concurrency."""
    for where, row in Records.read(path, KIND).placed():
        fields = _AnsweredRequest if "tokens" in row else _FailedRequest if "error" in row else _LevelCounters
        require_fields(row, fields, where, RecordError)
        if row.get("arrivals_s") == []:
            raise RecordError(f"{where}: arrivals_s is empty; it holds at least the time of the end")
        yield row
