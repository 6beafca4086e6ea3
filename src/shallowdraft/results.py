"""Results of the API, beside the records of a run: frozen dataclasses that show themselves as tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shallowdraft.cost import Prediction
from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.errors import RecordError
from shallowdraft.records import Record, is_begun
from shallowdraft.runs.accuracy import AccuracyResult, read_accuracy
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.live import LiveRun, read_live_runs
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.replays import ReplayRecord, read_replays
from shallowdraft.runs.study import StudyResult, prediction_to_json, read_study
from shallowdraft.runs.tokens import TokenSources, read_tokens
from shallowdraft.runs.trace import Trace, read_trace

if TYPE_CHECKING:
    from shallowdraft.benchmarking.levels import Level
    from shallowdraft.profiling.latency_model import LatencyModel
    from shallowdraft.replaying.confidence import ConfidenceReplay
    from shallowdraft.replaying.model import ModelReplay
    from shallowdraft.studying.design import Design

SHOWN_LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
TYPICAL = 5  # the lookahead at which an interval is shown

Interval = tuple[float, float]


@dataclass(frozen=True)
class DraftTree:
    """The tree of some number of nodes that keeps most of a draft's choices."""

    parents: tuple[int, ...]
    depth: int
    tar: float


@dataclass(frozen=True)
class DraftReplay:
    """A draft's acceptance over a trace, at every lookahead from 1 to 32."""

    draft: str
    replay: "ModelReplay" = field(repr=False)
    """What `predict` needs: acceptance by output and position."""
    tree: DraftTree | None = None
    confidence: "tuple[ConfidenceReplay, ...]" = ()

    @cached_property
    def record(self) -> ReplayRecord:
        """All figures: TAR by lookahead, set and prompt, intervals, acceptance by position, silence."""
        return self.replay.record("model")

    @property
    def tar(self) -> dict[int, float]:
        """Tokens per iteration by lookahead."""
        return self.record.tar

    @property
    def tar_interval(self) -> dict[int, Interval]:
        """95 % intervals of TAR over prompts, by lookahead."""
        return self.record.tar_interval

    def to_json(self) -> Record:
        """Return all figures as JSON has them."""
        more: Record = {"tree": asdict(self.tree)} if self.tree else {}
        if self.confidence:
            more["confidence"] = [figures.to_json() for figures in self.confidence]
        return self.record.to_json() | more


@dataclass(frozen=True, repr=False)
class Replays(Tabular):
    """Replays of drafts over a trace."""

    trace: Trace
    drafts: tuple[DraftReplay, ...]
    failed: dict[str, str] = field(default_factory=dict)
    """Drafts that could not be replayed, and why."""

    @property
    def caption(self) -> str:
        kind = "greedy" if self.trace.sampling.greedy else f"temperature {self.trace.sampling.temperature:g}"
        return f"TAR on {len(self.trace.outputs)} outputs of {self.trace.target}, {kind}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("draft", *(f"d={lookahead}" for lookahead in SHOWN_LOOKAHEADS), f"95 % at {TYPICAL}")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for draft in sorted(self.drafts, key=lambda draft: -draft.tar[TYPICAL]):
            low, high = draft.tar_interval[TYPICAL]
            tars = (draft.tar[lookahead] for lookahead in SHOWN_LOOKAHEADS)
            rows.append((draft.draft, *tars, f"{low:.2f}–{high:.2f}"))
        return rows

    def __getitem__(self, draft: str) -> DraftReplay:
        return next(replay for replay in self.drafts if replay.draft == draft)

    def to_json(self) -> Record:
        """Return {"drafts": […], "failed": {…}}."""
        return {"drafts": [draft.to_json() for draft in self.drafts], "failed": self.failed}


@dataclass(frozen=True)
class DraftPrediction:
    """A draft at its best lookahead."""

    draft: str
    prediction: Prediction
    interval: Interval | None = None
    """95 % of the speed-up, over prompts; None for numbers that were typed in."""
    curve: tuple[Prediction, ...] = field(default=(), repr=False)
    """Predictions at every lookahead."""

    def to_json(self) -> Record:
        """Return the prediction with the draft and the interval."""
        return {"draft": self.draft, **prediction_to_json(self.prediction), "speed_up_interval": self.interval}


@dataclass(frozen=True, repr=False)
class Predictions(Tabular):
    """Predicted speeds of drafts, fastest first."""

    drafts: tuple[DraftPrediction, ...]
    notes: tuple[str, ...] = ()
    """Notes of the profile, on samples that it lacks."""

    @property
    def caption(self) -> str:
        best = self.drafts[0]
        return f"{best.draft} {best.prediction.verdict}".strip()

    @property
    def columns(self) -> tuple[str, ...]:
        times = ("draft ms", "verify ms", "other ms")
        return ("draft", "lookahead", "TAR", *times, "tokens/s", "plain tokens/s", "speed-up", "from", "to")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        return [_prediction_cells(draft) for draft in self.drafts]

    def __getitem__(self, draft: str) -> DraftPrediction:
        return next(prediction for prediction in self.drafts if prediction.draft == draft)

    def to_json(self) -> Record:
        """Return {"predictions": […]}."""
        return {"predictions": [draft.to_json() for draft in self.drafts]}


def _prediction_cells(draft: DraftPrediction) -> tuple[Cell, ...]:
    prediction, times = draft.prediction, draft.prediction.iteration
    milliseconds = (1e3 * seconds for seconds in (times.draft_s, times.verify_s, times.other_s))
    speeds = (prediction.tokens_per_s, 1 / prediction.plain_s, prediction.speed_up)
    return draft.draft, prediction.lookahead, prediction.tar, *milliseconds, *speeds, *(draft.interval or (None, None))


@dataclass(frozen=True, repr=False)
class DesignResult(Tabular):
    """Shapes worth building on this machine, fastest first, and what each must bring."""

    shapes: "tuple[Design, ...]"
    model: "LatencyModel"
    """The latency model that the times come from."""
    best: DraftPrediction | None = None
    """The fastest of the profile's drafts; None without a trace."""

    @property
    def caption(self) -> str:
        errors = f"typically {self.model.typical_error:.0%} off, {self.model.worst_error:.0%} at worst"
        return f"the most weights in layers for their latency; times are the latency model's, {errors}"

    @property
    def columns(self) -> tuple[str, ...]:
        goal = (f"TAR to beat {self.best.draft}",) if self.best else ()
        return ("shape", "parameters", "others as fast", "ms a step", "TAR to break even", "at lookahead", *goal)

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        sets = [design.latency_set for design in self.shapes]
        largest = {design.latency_set: design for design in self.shapes if design.on_front}
        rows: list[tuple[Cell, ...]] = []
        for design in largest.values():
            others = sets.count(design.latency_set) - 1
            needed = (_reachable(design.break_even.acceptance_rate, design.break_even.tar), design.break_even.lookahead)
            goal = (_reachable(design.to_win.acceptance_rate, design.to_win.tar),) if self.best else ()
            rows.append((str(design.shape), design.shape.parameters, others, 1e3 * design.step_s, *needed, *goal))
        return rows

    def to_json(self) -> Record:
        """Return {"best", "latency_model", "shapes": […]}."""
        best = self.best and self.best.to_json()
        return {"best": best, "latency_model": asdict(self.model), "shapes": [_design_json(d) for d in self.shapes]}


def _reachable(acceptance_rate: float, tar: float) -> float | None:
    """Return a TAR, or None where no acceptance rate gives it."""
    return None if isinf(acceptance_rate) else tar


def _design_json(design: "Design") -> Record:
    def needed(goal: Any) -> Record:
        rate = goal.acceptance_rate
        return asdict(goal) | {"acceptance_rate": None if isinf(rate) else rate}

    return {
        "shape": str(design.shape),
        "parameters": design.shape.parameters,
        "step_s": design.step_s,
        "break_even": needed(design.break_even),
        "to_win": needed(design.to_win),
        "latency_set": design.latency_set,
        "on_front": design.on_front,
    }


@dataclass(frozen=True, repr=False)
class SearchResult(Tabular):
    """The fastest draft that a search has built, and all that it judged."""

    name: str
    draft: Path
    """Folder of the draft."""
    rows: tuple[Record, ...]
    """Every candidate in every rung (runs/search.py)."""
    winner: Record
    """The winner's row in the last rung."""
    best: DraftPrediction | None = None
    """The fastest of the profile's drafts."""

    @property
    def failed(self) -> list[Record]:
        """Candidates that were passed over, and why."""
        return [row for row in self.rows if "failed" in row]

    @property
    def caption(self) -> str:
        hand = f"; best at hand: {self.best.draft}, {self.best.prediction.speed_up:.2f}x" if self.best else ""
        speed_up, lookahead = self.winner["speed_up"], self.winner["lookahead"]
        return f"{self.name} is predicted {speed_up:.2f}x at lookahead {lookahead}{hand}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("candidate", "rung", "tokens", "lookahead", "TAR", "predicted speed-up")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        judged = [row for row in self.rows if "failed" not in row]
        judged.sort(key=lambda row: (row["rung"], -row["tokens_per_s"]))
        names = ("candidate", "rung", "tokens", "lookahead", "tar", "speed_up")
        return [tuple(row[name] for name in names) for row in judged]

    def to_json(self) -> Record:
        """Return {"best", "found", "draft", "failed"}."""
        best = self.best and self.best.to_json()
        return {"best": best, "found": self.winner, "draft": str(self.draft), "failed": self.failed}


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report."""

    page: Path
    figures: tuple[Path, ...] = ()
    """Charts and tables, if they were asked for."""

    def to_json(self) -> Record:
        """Return {"page", "figures"}."""
        return {"page": str(self.page), "figures": [str(path) for path in self.figures]}


@dataclass(frozen=True, repr=False)
class BenchResult(Tabular):
    """Figures of a server at each concurrency."""

    server: str
    levels: "tuple[Level, ...]"
    unanswered: tuple[int, ...] = ()
    """Concurrencies at which nothing was answered."""

    @property
    def caption(self) -> str:
        return self.server

    @property
    def columns(self) -> tuple[str, ...]:
        latencies = ("first token ms", "p95", "between tokens ms")
        return ("at once", "requests", "failed", "tokens/s", *latencies, "TAR", "acceptance rate")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for level in self.levels:
            between_ms = level.between_s and 1e3 * level.between_s
            latencies = (1e3 * level.ttft_s, 1e3 * level.ttft_s_p95, between_ms)
            speculation = (level.tar, level.acceptance_rate)
            rows.append((level.concurrency, level.requests, level.failed, level.tokens_per_s, *latencies, *speculation))
        return rows

    def to_json(self) -> Record:
        """Return {"levels": […]}."""
        return {"levels": [asdict(level) for level in self.levels]}


@dataclass(frozen=True, repr=False)
class Run(Tabular):
    """The records of a run; each is read when it is first asked for."""

    folder: Path

    @property
    def files(self) -> RunFolder:
        """Paths of the run's files."""
        return RunFolder(self.folder)

    @cached_property
    def trace(self) -> Trace:
        """The target's outputs."""
        return read_trace(self._existing(self.files.trace, "record"))

    @cached_property
    def replays(self) -> list[ReplayRecord]:
        """Acceptance of every proposer."""
        return read_replays(self._existing(self.files.replays, "study"))

    @cached_property
    def profile(self) -> Profile:
        """Times of iterations."""
        return read_profile(self._existing(self.files.profile, "profile"))

    @cached_property
    def live(self) -> list[LiveRun]:
        """Live runs."""
        return read_live_runs(self._existing(self.files.live, "study"))

    @cached_property
    def tokens(self) -> list[TokenSources]:
        """The source of each token of some outputs."""
        return read_tokens(self._existing(self.files.tokens, "study"))

    @cached_property
    def study(self) -> StudyResult:
        """The result of the study."""
        return read_study(self._existing(self.files.study, "study"))

    @cached_property
    def accuracy(self) -> AccuracyResult:
        """Task accuracy of the drafts."""
        return read_accuracy(self._existing(self.files.accuracy, "accuracy"))

    def _existing(self, path: Path, stage: str) -> Path:
        if not path.exists():
            raise RecordError(f"{path}: there is no such file; write it with sd.{stage} or shallowdraft {stage}")
        return path

    @property
    def caption(self) -> str:
        return f"run in {self.folder}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("file", "KiB", "holds")

    @property
    def cells(self) -> Sequence[tuple[Cell, ...]]:
        files = {
            self.files.trace: "outputs of the target",
            self.files.replays: "acceptance of every proposer",
            self.files.profile: "times of iterations",
            self.files.live: "live runs",
            self.files.tokens: "where tokens came from",
            self.files.study: "the study's result",
            self.files.accuracy: "task accuracy",
        }
        return [
            (path.name, path.stat().st_size / 1024, what)
            for path, what in files.items()
            if path.exists() and (path.suffix != ".jsonl" or is_begun(path))
        ]

    def to_json(self) -> Record:
        """Return {"folder", "files"}."""
        return {"folder": str(self.folder), "files": [str(row[0]) for row in self.cells]}
