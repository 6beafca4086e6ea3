"""A run as the report shows it: what its folder holds; what is missing is empty or None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft.benchmarking.levels import Level
from shallowdraft.cost import Prediction
from shallowdraft.records import Record
from shallowdraft.runs.accuracy import AccuracyResult
from shallowdraft.runs.replays import TarFigures
from shallowdraft.runs.study import LiveSpeed
from shallowdraft.runs.tokens import TokenSources
from shallowdraft.runs.trace import PromptKey

Interval = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """A proposer: its acceptance, and its row in the study's table once that has ended."""

    name: str
    label: str
    """A short name, for charts."""
    drafter: str
    draft: str
    digest: str = ""
    shape: str = ""
    layers: int = 0
    parameters: int = 0
    prediction: Prediction | None = None
    """At its best size; None while the study is unfinished."""
    interval: Interval = (0.0, 0.0)
    """95 % of the predicted speed-up."""
    live: LiveSpeed | None = None
    disturbed: str | None = None
    """Why what was measured does not count."""
    curve: Sequence[Prediction] = ()
    """Predictions by size."""
    tars: TarFigures = field(default_factory=TarFigures)
    sets: Mapping[str, TarFigures] = field(default_factory=dict)
    """TAR by prompt set."""
    acceptance_by_position: Sequence[float] = ()

    @property
    def best(self) -> Prediction:
        """The prediction, of an entry that has one."""
        assert self.prediction
        return self.prediction

    @property
    def speed_up(self) -> float:
        """Measured if it was, else predicted."""
        return self.live.speed_up if self.live else self.best.speed_up

    @property
    def bounds(self) -> Interval:
        """95 % of that speed-up."""
        return self.live.interval if self.live else self.interval

    @property
    def how(self) -> str:
        return "measured" if self.live else "predicted"


@dataclass(frozen=True)
class ShapeStep:
    """A shape that was timed with random weights: seconds of one draft step."""

    shape: str
    layers: int
    d_model: int
    step_s: float


@dataclass(frozen=True)
class Requested:
    """What was requested of a server."""

    prompts: frozenset[PromptKey]
    max_tokens: int
    temperature: float
    chat: bool

    def differences(self, other: "Requested") -> str:
        """Return how these requests differ from others, in words."""
        reasons = {
            "other prompts": self.prompts != other.prompts,
            f"{self.max_tokens} tokens instead of {other.max_tokens}": self.max_tokens != other.max_tokens,
            f"temperature {self.temperature:g} instead of {other.temperature:g}": self.temperature != other.temperature,
            "as a chat" if self.chat else "not as a chat": self.chat != other.chat,
        }
        return ", ".join(reason for reason, differs in reasons.items() if differs)


@dataclass(frozen=True)
class BenchedServer:
    """What `bench` measured of a server at one concurrency."""

    name: str
    """Of its file."""
    draft: str | None
    draft_digest: str | None
    lookahead: int | None
    level: Level
    speed_up: float | None
    """Over the same server without a draft, if that was measured too."""
    interval: Interval
    """95 % of the speed-up."""
    requested: Requested

    @property
    def greedy(self) -> bool:
        """Whether it was asked for its likeliest tokens after the very prompts."""
        return not self.requested.temperature and not self.requested.chat

    @property
    def at_once(self) -> str:
        return f"{self.level.concurrency} at once"

    def drafts_with(self, entry: Entry) -> bool:
        """Return whether its draft is that of an entry, by content if that is known, else by name."""
        if entry.drafter != "model" or not self.draft:
            return False
        return entry.draft == self.draft if not self.draft_digest else entry.digest == self.draft_digest


@dataclass(frozen=True)
class RunView:
    """What a folder holds."""

    folder: Path
    about: Record
    """Target, shape, device, as far as they are known."""
    time: str
    """When its last file was begun."""
    entries: list[Entry]
    """Fastest first."""
    verdict: str | None = None
    """None while the study is unfinished."""
    plain_tokens_per_s: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    stalled: Sequence[str] = ()
    """Prompts that no measured speed-up counts."""
    outputs: list[bool | None] = field(default_factory=list)
    """Of each live run whether its output is plain decoding's; None if it is but for a tie of rounding."""
    texts: list[TokenSources] = field(default_factory=list)
    steps: list[ShapeStep] = field(default_factory=list)
    accuracy: AccuracyResult | None = None
    servers: list[BenchedServer] = field(default_factory=list)

    @property
    def target(self) -> str:
        return str(self.about.get("target", "an unknown target"))

    @property
    def predicted(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.prediction]

    @property
    def measured(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.live]

    def tokens_per_s(self, entry: Entry) -> float:
        """Return an entry's speed-up times the speed of plain decoding, so that all entries meet the same machine."""
        assert self.plain_tokens_per_s
        return entry.speed_up * self.plain_tokens_per_s

    @property
    def sets(self) -> list[str]:
        """Names of the prompt sets, in order."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.sets))
