"""A run as the report shows it: the records in its folder; those that are missing are empty or None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft.benchmarking.levels import Level
from shallowdraft.cost import Prediction
from shallowdraft.records import Record
from shallowdraft.runs.accuracy import AccuracyResult
from shallowdraft.runs.candidate import DrafterName, ProposerKey
from shallowdraft.runs.replays import TarFigures
from shallowdraft.runs.study import LiveSpeed
from shallowdraft.runs.tokens import TokenSources
from shallowdraft.runs.trace import PromptKey

Interval = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """A proposer: its acceptance, and its row in the study's table once the study has finished."""

    name: str
    label: str
    """A short name, for charts."""
    drafter: DrafterName
    draft: str
    digest: str = ""
    shape: str = ""
    layers: int = 0
    parameters: int = 0
    prediction: Prediction | None = None
    """The prediction at its best size; None while the study is unfinished."""
    predicted_interval: Interval = (0.0, 0.0)
    """95 % interval of the predicted speed-up."""
    live: LiveSpeed | None = None
    disturbed: str | None = None
    """Why a measured speed-up does not count."""
    curve: Sequence[Prediction] = ()
    """The prediction at every size, at the machine's speed while profiling."""
    tars: TarFigures = field(default_factory=TarFigures)
    sets: Mapping[str, TarFigures] = field(default_factory=dict)
    """TAR by prompt set."""
    acceptance_by_position: Sequence[float] = ()

    @property
    def proposer(self) -> ProposerKey:
        """The key that the proposer has in every run."""
        return self.drafter, self.draft

    @property
    def best(self) -> Prediction:
        """The prediction; only entries of a finished study have one."""
        assert self.prediction
        return self.prediction

    @property
    def speed_up(self) -> float:
        """The measured speed-up if there is one, else the predicted."""
        return self.live.speed_up if self.live else self.best.speed_up

    @property
    def bounds(self) -> Interval:
        """95 % interval of that speed-up."""
        return self.live.interval if self.live else self.predicted_interval

    @property
    def basis(self) -> str:
        """Whether that speed-up is "measured" or "predicted"."""
        return "measured" if self.live else "predicted"


@dataclass(frozen=True)
class ShapeStep:
    """A draft shape that was timed with random weights."""

    shape: str
    layers: int
    d_model: int
    step_s: float
    """Seconds of one draft step."""


@dataclass(frozen=True)
class Requested:
    """The requests that a server was sent."""

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
    """The figures of a server at one concurrency, as `bench` measured them."""

    name: str
    """Name of its file, without the ending."""
    draft: str | None
    draft_digest: str | None
    lookahead: int | None
    level: Level
    speed_up: float | None
    """Speed-up over the same server without a draft, if that was measured too."""
    interval: Interval
    """95 % interval of the speed-up."""
    requested: Requested

    @property
    def greedy(self) -> bool:
        """Whether it decoded greedily, and the prompts as they are, not as chats."""
        return not self.requested.temperature and not self.requested.chat

    @property
    def where(self) -> str:
        """The concurrency as part of a sentence."""
        return f"at concurrency {self.level.concurrency}"

    def drafts_with(self, entry: Entry) -> bool:
        """Return whether its draft is that of an entry, by content if that is known, else by name."""
        if entry.drafter != "model" or not self.draft:
            return False
        return entry.draft == self.draft if not self.draft_digest else entry.digest == self.draft_digest


@dataclass(frozen=True)
class RunView:
    """The records of a run."""

    folder: Path
    about: Record
    """Target, shape, device and so on, as far as the records have them."""
    time: str
    """Time at which its last file was begun."""
    entries: list[Entry]
    """Fastest first."""
    verdict: str | None = None
    """Whether speculation pays, in a sentence; None while the study is unfinished."""
    plain_tokens_per_s: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    stalled: Sequence[str] = ()
    """Prompts that measured speed-ups leave out, because the machine stalled."""
    outputs: list[bool | None] = field(default_factory=list)
    """Whether the output of each live run is plain decoding's; None if it is except for a rounding tie."""
    texts: list[TokenSources] = field(default_factory=list)
    steps: list[ShapeStep] = field(default_factory=list)
    accuracy: AccuracyResult | None = None
    servers: list[BenchedServer] = field(default_factory=list)

    @property
    def target(self) -> str:
        return str(self.about.get("target", "an unknown target"))

    @property
    def predicted(self) -> list[Entry]:
        """Entries with a prediction: all of a finished study, none before."""
        return [entry for entry in self.entries if entry.prediction]

    @property
    def measured(self) -> list[Entry]:
        """Entries that ran live."""
        return [entry for entry in self.entries if entry.live]

    def tokens_per_s(self, entry: Entry) -> float:
        """Return an entry's speed-up times one speed of plain decoding, so that all entries are on the same machine."""
        assert self.plain_tokens_per_s
        return entry.speed_up * self.plain_tokens_per_s

    @property
    def sets(self) -> list[str]:
        """Names of the prompt sets, in order."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.sets))
