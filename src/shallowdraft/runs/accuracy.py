"""accuracy.json: how good drafts are at tasks, and whether that says anything about their TAR."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.errors import RecordError
from shallowdraft.files import Share, from_record, read_json
from shallowdraft.records import Record, provenance, write_whole


@dataclass(frozen=True)
class ShareCorrect:
    """A share of right answers, with its 95 % interval over questions."""

    value: Share
    interval: tuple[Share, Share]
    chance: Share = 0.0
    """Of guessing."""

    @property
    def above_chance(self) -> bool:
        return self.interval[0] > self.chance


@dataclass(frozen=True)
class TaskScore:
    """A draft on a task."""

    accuracy: ShareCorrect
    loss: float
    """Mean negative log-likelihood of a token of the right choices."""
    normalised: ShareCorrect | None = None
    """By the likelihood of a character."""


@dataclass(frozen=True)
class DraftScores:
    """A draft on all tasks."""

    name: str
    tar: float | None
    """Tokens per iteration, where the draft was replayed."""
    sets: dict[str, TaskScore]
    """By task."""
    digest: str = ""


@dataclass(frozen=True)
class AccuracyClaim:
    """Whether the drafts' ability on a task foretells their TAR."""

    of_accuracy: float | None
    """Rank correlation of accuracy with TAR over drafts; None if no accuracy is above chance."""
    of_loss: float | None = None
    """Rank correlation of the negated loss with TAR: 1 means that a better model is accepted more."""
    statement: str = ""


@dataclass(frozen=True, repr=False)
class AccuracyResult(Tabular):
    """Scores of all drafts, and what follows from them."""

    drafts: tuple[DraftScores, ...]
    claims: dict[str, AccuracyClaim] = field(default_factory=dict)
    """By task."""
    lookahead: int = 5
    """At which TAR is taken."""
    target: str = ""
    """The target of the trace; empty without one."""
    target_digest: str | None = None

    @property
    def caption(self) -> str:
        statements = [f"{task}: {claim.statement}" for task, claim in self.claims.items()]
        return "; ".join(statements) or "accuracy by the likelihood of choices"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("draft", "task", "accuracy", "from", "to", "chance", "loss", f"TAR at {self.lookahead}")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for draft in self.drafts:
            for task, score in draft.sets.items():
                share = score.accuracy
                rows.append((draft.name, task, share.value, *share.interval, share.chance, score.loss, draft.tar))
        return rows

    def to_json(self) -> Record:
        """Return the fields as `accuracy --json` prints them."""
        return asdict(self)


def write_accuracy(path: Path, result: AccuracyResult) -> None:
    """Write the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result.to_json() | {"provenance": provenance()}, indent=2) + "\n")


def read_accuracy(path: Path) -> AccuracyResult:
    """Read the file; what `accuracy --json` printed for earlier versions is read too."""
    try:
        record = read_json(path, RecordError, "write it again: shallowdraft accuracy --out RUN")
        return from_record(AccuracyResult, record, str(path), RecordError, extra_fields=True)
    except RecordError as error:
        raise RecordError(f"{error}; this is not what shallowdraft accuracy writes, run it again") from None
