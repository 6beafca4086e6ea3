"""The fields that a report needs of each kind of record; records may have more."""

from typing import Annotated, Any, NotRequired, TypedDict

from shallowdraft.cost import Silence
from shallowdraft.files import Count, PositiveSeconds, Range, Seconds, Share, Size

Rate = Annotated[float, Range(1e-9, 1e12)]
"""Tokens an iteration or a second, speed-ups."""
Bounds = tuple[Rate, Rate]


class Times(TypedDict):
    """Seconds of an iteration."""

    draft_s: Seconds
    verify_s: PositiveSeconds
    other_s: Seconds


class EarlierTimes(TypedDict):
    """Seconds of an iteration, by the names that earlier versions wrote."""

    draft_s: Seconds
    target_s: PositiveSeconds
    rest_s: Seconds


class _Untimed(TypedDict):
    """A prediction at one size, without the parts of its iteration."""

    lookahead: Count
    nodes: Count
    tar: Rate
    plain_s: PositiveSeconds
    silence: NotRequired[Silence | None]


class Predicted(_Untimed, Times):
    """A prediction at one size."""


class EarlierPredicted(_Untimed, EarlierTimes):
    """A prediction at one size, as earlier versions wrote it."""


class Disturbed(TypedDict):
    """Why what was measured is no result."""

    why: str


class Measured(TypedDict):
    """A speed-up that was measured."""

    speed_up: Rate
    interval: Bounds


class Proposer(TypedDict):
    """Who proposes."""

    name: str
    drafter: str
    draft: str


class Ranked(Proposer):
    """A row of a study."""

    shape: NotRequired[str]
    lookahead: Size
    nodes: NotRequired[Count]
    tar: Rate
    break_even_tar: Rate
    iteration: Times | EarlierTimes
    predicted_speed_up: NotRequired[Rate]
    predicted_interval: Bounds
    live: Measured | None
    disturbed: NotRequired[Disturbed | None]
    silence: NotRequired[Silence | None]
    curve: NotRequired[list[Predicted | EarlierPredicted]]


class Study(TypedDict):
    """The answer of a study."""

    verdict: str
    plain_tokens_per_s: Rate
    rows: list[Ranked]
    failed: NotRequired[dict[str, str]]
    stalled: NotRequired[list[str]]


class Figures(TypedDict, total=False):
    """Tokens an iteration by size."""

    tar: dict[int, Rate]
    tar_interval: dict[int, Bounds]


class Replay(Proposer, Figures):
    """Acceptance of a proposer."""

    shape: NotRequired[str]
    layers: NotRequired[Count]
    parameters: NotRequired[Count]
    sets: NotRequired[dict[str, Figures]]
    acceptance_by_position: NotRequired[list[Share]]


class LiveRun(TypedDict):
    """Whether an output is plain decoding's."""

    differs: str | None
    tie: bool


class Plan(TypedDict):
    """A line of a profile that says which samples were to be taken."""

    planned: list[dict[str, Any]]


class Sample(TypedDict):
    """Seconds of drafting."""

    draft: str
    lookahead: Size
    context: Count
    batch: Count
    draft_s: Seconds


class Inside(TypedDict):
    """A text and where its tokens came from."""

    set: str
    id: str
    sample: Count
    drafter: str
    draft: str
    lookahead: Count
    tar: Rate
    prompt: str
    tokens: list[tuple[str, str, str | None]]


class Correct(TypedDict):
    """A share of right answers."""

    value: Share
    interval: tuple[Share, Share]


class Score(TypedDict):
    """A draft on a task."""

    accuracy: Correct
    loss: float


class Scored(TypedDict):
    """A draft on all tasks."""

    name: str
    tar: Rate | None
    sets: dict[str, Score]


class Claim(TypedDict):
    """What accuracy says about TAR."""

    of_accuracy: float | None
    statement: str


class Accuracy(TypedDict):
    """What `accuracy --json` prints."""

    drafts: list[Scored]
    claims: dict[str, Claim]
