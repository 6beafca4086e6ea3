"""A run as the report sees it: whatever a study's folder holds; what is missing is empty or None."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft.bench.levels import Level
from shallowdraft.cost import Prediction
from shallowdraft.records import Record

LONGEST_LABEL = 22

Interval = tuple[float, float]
Candidate = tuple[str, str, int]
"""Drafter, draft and lookahead."""


@dataclass(frozen=True)
class Tars:
    """TAR by size."""

    value: Mapping[int, float] = field(default_factory=dict)
    interval: Mapping[int, Interval] = field(default_factory=dict)
    """Over prompts, where that is known."""

    def bounds(self, size: int) -> tuple[float | None, float | None]:
        return self.interval.get(size, (None, None))


@dataclass(frozen=True)
class Live:
    """A speed-up that was measured."""

    speed_up: float
    interval: Interval


@dataclass(frozen=True)
class Entry:
    """A proposer."""

    name: str
    label: str
    """A short name, for charts."""
    drafter: str
    draft: str
    shape: str = ""
    layers: int = 0
    parameters: int = 0
    prediction: Prediction | None = None
    """At its best; None while a run is unfinished."""
    interval: Interval = (0.0, 0.0)
    """Of the predicted speed-up."""
    live: Live | None = None
    disturbed: str | None = None
    """Why what was measured is no result."""
    curve: Sequence[Prediction] = ()
    """By size."""
    tars: Tars = field(default_factory=Tars)
    sets: Mapping[str, Tars] = field(default_factory=dict)
    acceptance_by_position: Sequence[float] = ()

    @property
    def best(self) -> Prediction:
        """Of those that a run has predicted."""
        assert self.prediction
        return self.prediction

    @property
    def speed_up(self) -> float:
        """Measured, or else predicted."""
        return self.live.speed_up if self.live else self.best.speed_up

    @property
    def bounds(self) -> Interval:
        """Of that speed-up."""
        return self.live.interval if self.live else self.interval

    @property
    def how(self) -> str:
        return "measured" if self.live else "predicted"


@dataclass(frozen=True)
class Step:
    """Of a shape that was timed with random weights: seconds of one draft step."""

    shape: str
    layers: int
    d_model: int
    step_s: float


@dataclass(frozen=True)
class Text:
    """What a proposer made of a prompt, token by token."""

    set: str
    id: str
    sample: int
    candidate: Candidate
    tar: float
    prompt: str
    tokens: Sequence[tuple[str, str, str | None]]
    """Text, source, the proposal that it replaced."""


@dataclass(frozen=True)
class Score:
    """A draft on a task."""

    draft: str
    task: str
    tar: float
    accuracy: float
    interval: Interval
    loss: float


@dataclass(frozen=True)
class Accuracy:
    """Of drafts, and what it says about TAR."""

    scores: list[Score]
    ranks: dict[str, float | None]
    """Rank correlation with TAR by task."""
    statements: dict[str, str]


@dataclass(frozen=True)
class Asked:
    """What was asked of a server."""

    prompts: frozenset[tuple[str, str]]
    """Set and id."""
    max_tokens: int
    temperature: float
    chat: bool

    def unlike(self, other: "Asked") -> str:
        """In what it differs."""
        reasons = {
            "other prompts": self.prompts != other.prompts,
            f"{self.max_tokens} tokens instead of {other.max_tokens}": self.max_tokens != other.max_tokens,
            f"temperature {self.temperature:g} instead of {other.temperature:g}": self.temperature != other.temperature,
            "as a chat" if self.chat else "not as a chat": self.chat != other.chat,
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)


@dataclass(frozen=True)
class Server:
    """What `bench` measured of a server at one concurrency."""

    name: str
    """Of its file."""
    draft: str | None
    lookahead: int | None
    level: Level
    speed_up: Live | None
    """Over the same server without a draft, where that was measured too."""
    asked: Asked

    @property
    def greedy(self) -> bool:
        """Whether it was asked for its likeliest tokens behind the very prompts."""
        return not self.asked.temperature and not self.asked.chat

    @property
    def at_once(self) -> str:
        return f"{self.level.concurrency} at once"


@dataclass(frozen=True)
class Run:
    """What a folder holds."""

    folder: Path
    about: Record
    """Target, shape, device, as far as they are known."""
    time: str
    """When its last file was begun."""
    entries: list[Entry]
    """Fastest first."""
    verdict: str | None = None
    """None: the study has not ended."""
    plain_tokens_per_s: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    stalled: list[str] = field(default_factory=list)
    """Prompts that no measured speed-up counts."""
    outputs: list[bool | None] = field(default_factory=list)
    """Of live runs: True where it is plain decoding's, None where it is but for a tie of rounding."""
    texts: list[Text] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    accuracy: Accuracy | None = None
    servers: list[Server] = field(default_factory=list)

    @property
    def target(self) -> str:
        return str(self.about.get("target", "an unknown target"))

    @property
    def predicted(self) -> list[Entry]:
        return [one for one in self.entries if one.prediction]

    @property
    def measured(self) -> list[Entry]:
        return [one for one in self.entries if one.live]

    def tokens_per_s(self, entry: Entry) -> float:
        """As many as its speed-up makes of plain decoding's, so that all meet the same machine."""
        assert self.plain_tokens_per_s
        return entry.speed_up * self.plain_tokens_per_s

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.entries for name in one.sets))


def label(named: Sequence[tuple[str, str, str]]) -> list[str]:
    """Short names of proposers, given kind, draft and name: of a path its end, as much as tells drafts apart."""
    short = {"model": "", "tree": "tree "}
    drafts = ends([draft for kind, draft, _ in named if kind in short])
    found = [cut(short[kind] + drafts[draft] if kind in short else name) for kind, draft, name in named]
    return numbered(found)


def numbered(names: list[str]) -> list[str]:
    """With numbers before them where they are not told apart."""
    return names if len(set(names)) == len(names) else [f"{at} {one}" for at, one in enumerate(names, 1)]


def ends(paths: Iterable[str]) -> dict[str, str]:
    """Of each path its end, as much as tells them apart."""
    parts = {one: Path(one).parts for one in paths}
    longest = max(map(len, parts.values()), default=0)
    found = ({one: "/".join(its[-count:]) for one, its in parts.items()} for count in range(1, longest + 1))
    return next((short for short in found if len(set(short.values())) == len(parts)), {one: one for one in parts})


def cut(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]
