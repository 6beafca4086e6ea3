"""Live runs: one line per prompt, round and candidate, each run between two plain ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from shallowdraft.files import Count, PositiveSeconds, Seconds
from shallowdraft.records import Record, Records
from shallowdraft.runs.candidate import Candidate, DrafterName
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.trace import PromptKey

KIND = "live runs"
EARLIER_NAMES = {"target_s": "verify_s"}


class _StateFields(TypedDict):
    plain_s: PositiveSeconds
    handover_s: Seconds
    arithmetic_s: Seconds


class _LiveRunFields(TypedDict):
    """The fields that a line must have."""

    set: str
    id: str
    output_digest: NotRequired[str]
    round: Count
    draft: str
    lookahead: Count
    drafter: NotRequired[DrafterName]
    tree: NotRequired[list[int]]
    emitted: Count
    iterations: Count
    seconds: PositiveSeconds
    draft_s: NotRequired[Seconds]
    verify_s: NotRequired[Seconds]
    differs: NotRequired[str | None]
    tie: bool
    states: tuple[_StateFields, _StateFields]


@dataclass(frozen=True)
class LiveRun:
    """One candidate on one prompt, decoded by the engine."""

    set: str
    id: str
    output_digest: str
    """Digest of the trace's output for this prompt; empty in early records."""
    round: int
    candidate: Candidate
    emitted: int
    iterations: int
    seconds: float
    """Seconds of decoding, without the prefill."""
    draft_s: float
    verify_s: float
    differs: str | None
    """How the output differs from plain decoding's; None if it does not."""
    tie: bool
    """Whether the output is plain decoding's, but for ties of rounding."""
    states: tuple[MachineState, MachineState]
    """The machine before and after the run."""

    @property
    def prompt_key(self) -> PromptKey:
        return self.set, self.id

    def to_json(self) -> Record:
        """Return the line of this run."""
        fields = {name: value for name, value in vars(self).items() if name not in ("candidate", "states")}
        return fields | asdict(self.candidate) | {"states": [asdict(state) for state in self.states]}

    @classmethod
    def from_json(cls, row: Record) -> "LiveRun":
        """Read a run from a line with checked fields."""
        before, after = (
            MachineState(*(state[name] for name in _StateFields.__annotations__)) for state in row["states"]
        )
        return cls(
            row["set"],
            row["id"],
            row.get("output_digest", ""),
            row["round"],
            Candidate.of(row),
            row["emitted"],
            row["iterations"],
            row["seconds"],
            row.get("draft_s", 0.0),
            row.get("verify_s", 0.0),
            row.get("differs"),
            row["tie"],
            (before, after),
        )


def open_live_runs(path: Path, about: Record) -> Records:
    """Begin a file of live runs, or go on with one of the same description."""
    return Records.open(path, KIND, about, _LiveRunFields, renamed=EARLIER_NAMES)


def append_live_runs(file: Records, runs: Sequence[LiveRun]) -> None:
    """Write runs to the end of a file."""
    file.append(*(run.to_json() for run in runs))


def read_live_runs(path: Path) -> list[LiveRun]:
    """Read all runs of a file."""
    return live_runs_of(Records.read(path, KIND, _LiveRunFields, renamed=EARLIER_NAMES))


def live_runs_of(file: Records) -> list[LiveRun]:
    """Read all runs of a file that is open."""
    return [LiveRun.from_json(row) for row in file]
