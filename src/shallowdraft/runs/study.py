"""study.json: the result of a study, the ranked candidates with their predictions and live results."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shallowdraft.cost import Iteration, Prediction, Silence
from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.errors import RecordError, ShallowdraftError
from shallowdraft.files import Count, Interval, PositiveSeconds, Rate, Seconds, from_record, read_json
from shallowdraft.records import Record, write_whole
from shallowdraft.runs.candidate import Candidate, DrafterName

SCHEMA = 2


@dataclass(frozen=True)
class LiveSpeed:
    """A candidate against plain decoding, measured by the engine."""

    tar: Rate
    tokens_per_s: Rate
    plain_tokens_per_s: Rate
    speed_up: Rate
    interval: Interval
    """The 95 % interval of the speed-up, over prompts."""
    lossless: bool
    """Whether every output is plain decoding's, but for ties of rounding."""


@dataclass(frozen=True)
class StudyRow:
    """A proposer at its best size."""

    name: str
    """The name in tables."""
    candidate: Candidate
    shape: str
    prediction: Prediction
    """The prediction; for a candidate that ran live, on its prompts and at the speed of plain decoding there."""
    predicted_interval: Interval
    """The 95 % interval of the predicted speed-up: TAR's bootstrap over prompts."""
    live: LiveSpeed | None = None
    impossible: LiveSpeed | None = None
    """A live result above the TAR, which no engine can reach: it does not count, and the prediction stands."""
    curve: tuple[Prediction, ...] = field(default=(), repr=False)
    """Predictions at every size, on the machine as it was while profiling."""

    @property
    def speed_up(self) -> float:
        """The measured speed-up if there is one, otherwise the predicted one."""
        return self.live.speed_up if self.live else self.prediction.speed_up

    def verdict(self, label: str) -> str:
        """Return a sentence on whether speculation with this candidate pays, in which the label is its name."""
        if not self.live:
            return f"{label} {self.prediction.verdict}"
        low, high = self.live.interval
        candidate = f"{label} {self.prediction.where}"
        if low > 1:
            return f"speculation pays: {candidate} is {self.live.speed_up:.2f}x as fast (95 %: {low:.2f} to {high:.2f})"
        if high < 1:
            return f"speculation does not pay: the best, {candidate}, is {self.live.speed_up:.2f}x as fast"
        times = f"{self.live.speed_up:.2f}x ({low:.2f} to {high:.2f})"
        return f"speculation makes no clear difference: {candidate} is {times}"

    @property
    def disturbed(self) -> str | None:
        """The reason for which a live result does not count; None if it does."""
        if self.impossible is None:
            return None
        (low, high), tar = self.impossible.interval, self.impossible.tar
        return (
            f"measured {self.impossible.speed_up:.3f}x ({low:.3f}–{high:.3f}), above its TAR of {tar:.3f} after all "
            "runs: impossible, as an iteration takes at least as long as a plain token; the machine was disturbed, and "
            "the prediction stands"
        )


@dataclass(frozen=True, repr=False)
class StudyResult(Tabular):
    """The result of a study."""

    rows: tuple[StudyRow, ...]
    """The fastest first: rows that ran live by the measured speed-up, then the others by the predicted one."""
    plain_tokens_per_s: float
    failed: dict[str, str] = field(default_factory=dict)
    """The reason for which a proposer could not be used, by its name."""
    stalled: tuple[str, ...] = ()
    """Prompts, with their sets, that are left out of measured speed-ups, as the machine stalled on them."""
    lossless: bool | None = None
    """Whether every live output is plain decoding's, but for ties of rounding; None if nothing ran live."""

    @property
    def verdict(self) -> str:
        """A sentence on whether speculation pays."""
        return self.rows[0].verdict(self.rows[0].name)

    @property
    def caption(self) -> str:
        return self.verdict

    @property
    def columns(self) -> tuple[str, ...]:
        predicted = ("predicted speed-up", "from", "to")
        return ("proposer", "size", "TAR", "needed TAR", "draft ms", "verify ms", *predicted, "measured", "from", "to")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for row in self.rows:
            prediction, times = row.prediction, row.prediction.iteration
            size = f"{prediction.nodes} nodes" if prediction.nodes else str(prediction.lookahead)
            milliseconds = (1e3 * times.draft_s, 1e3 * times.verify_s)
            predicted = (prediction.speed_up, *row.predicted_interval)
            live = (row.live.speed_up, *row.live.interval) if row.live else (None, None, None)
            rows.append((row.name, size, prediction.tar, prediction.break_even_tar, *milliseconds, *predicted, *live))
        return rows

    def to_json(self) -> Record:
        """Return the content of study.json."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "rows": [_row_to_json(row) for row in self.rows],
            "failed": self.failed,
            "stalled": list(self.stalled),
            "lossless": self.lossless,
        }


def _row_to_json(row: StudyRow) -> Record:
    return {
        "name": row.name,
        **asdict(row.candidate),
        "shape": row.shape,
        "prediction": prediction_to_json(row.prediction),
        "predicted_interval": row.predicted_interval,
        "speed_up": row.speed_up,
        "live": row.live and asdict(row.live),
        "impossible": row.impossible and asdict(row.impossible),
        "disturbed": row.disturbed,
        "curve": [prediction_to_json(prediction) for prediction in row.curve],
    }


def prediction_to_json(prediction: Prediction) -> Record:
    """Return a prediction as every record and command writes it: its fields, and figures that follow from them."""
    return {
        "lookahead": prediction.lookahead,
        "nodes": prediction.nodes,
        "tar": prediction.tar,
        "iteration": prediction.iteration.to_json(),
        "plain_s": prediction.plain_s,
        "silence": prediction.silence and asdict(prediction.silence),
        "tokens_per_s": prediction.tokens_per_s,
        "plain_tokens_per_s": 1 / prediction.plain_s,
        "speed_up": prediction.speed_up,
        "break_even_tar": prediction.break_even_tar,
        "waterfall": asdict(prediction.waterfall),
        "verdict": prediction.verdict,
    }


@dataclass(frozen=True)
class _IterationFields:
    draft_s: Seconds
    verify_s: PositiveSeconds
    other_s: Seconds


@dataclass(frozen=True)
class _PredictionFields:
    """The fields of a prediction from which all others follow."""

    lookahead: Count
    nodes: Count
    tar: Rate
    iteration: _IterationFields
    plain_s: PositiveSeconds
    silence: Silence | None = None

    def prediction(self) -> Prediction:
        times = Iteration(self.iteration.draft_s, self.iteration.verify_s, self.iteration.other_s)
        return Prediction(self.lookahead, self.tar, times, self.plain_s, self.nodes, self.silence)


@dataclass(frozen=True)
class _RowFields:
    name: str
    drafter: DrafterName
    draft: str
    lookahead: Count
    prediction: _PredictionFields
    predicted_interval: Interval
    shape: str = ""
    tree: tuple[Count, ...] = ()
    digest: str = ""
    dtype: str = ""
    live: LiveSpeed | None = None
    impossible: LiveSpeed | None = None
    curve: tuple[_PredictionFields, ...] = ()

    def row(self) -> StudyRow:
        return StudyRow(
            self.name,
            Candidate(self.draft, self.lookahead, self.drafter, self.tree, self.digest, self.dtype),
            self.shape,
            self.prediction.prediction(),
            self.predicted_interval,
            self.live,
            self.impossible,
            tuple(prediction.prediction() for prediction in self.curve),
        )


@dataclass(frozen=True)
class _StudyFields:
    rows: tuple[_RowFields, ...]
    plain_tokens_per_s: Rate
    failed: dict[str, str] = field(default_factory=dict)
    stalled: tuple[str, ...] = ()
    lossless: bool | None = None


def write_study(path: Path, result: StudyResult) -> None:
    """Write study.json whole."""
    write_whole(path, json.dumps(result.to_json(), indent=2) + "\n")


def read_study(path: Path) -> StudyResult:
    """Read study.json; one of another version is refused, as the study writes it again from the other records."""
    again = "run the study again, it reuses the other records"
    record: dict[str, Any] = read_json(path, RecordError, again)
    if record.get("schema") != SCHEMA:
        raise RecordError(f"{path}: written by another version of this package; {again}")
    try:
        fields = from_record(_StudyFields, record, str(path), RecordError, extra_fields=True)
        rows = tuple(row.row() for row in fields.rows)
    except ShallowdraftError as error:
        raise RecordError(f"{error}; {again}") from None
    if not rows:
        raise RecordError(f"{path}: has no rows; {again}")
    return StudyResult(rows, fields.plain_tokens_per_s, fields.failed, fields.stalled, fields.lossless)
