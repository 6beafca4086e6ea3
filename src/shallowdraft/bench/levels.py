"""What follows from the records of a server that was asked: figures at every concurrency, and against another server.

Tokens a second are those of the requests that were answered over their share of the time that passed: seconds in which
n were under way count as an nth. Where none failed, that is all tokens over the seconds in which any was under way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Range, Seconds, Size, require_fields
from shallowdraft.intervals import bootstrap
from shallowdraft.records import Record, Records

KIND = "requests of a server"

Counted = Annotated[float, Range(-1e15, 1e15)]
Interval = tuple[float, float]
Floats = NDArray[np.float64]
Request = tuple[int, str, str]
"""Round, and the prompt's set and id."""


class AskedOf(TypedDict):
    """What the first line says was asked of a server."""

    max_tokens: Count
    temperature: float
    chat: bool
    draft: NotRequired[str | None]
    lookahead: NotRequired[Size | None]


class _Counted(TypedDict):
    """What a server counted."""

    num_spec_steps: Counted
    num_draft_tokens: Counted
    num_accepted_draft_tokens: Counted
    recent_tar: NotRequired[float | None]


class _Failed(TypedDict):
    """A request that failed."""

    concurrency: Size
    round: Count
    set: str
    id: str
    error: str


class _Answered(TypedDict):
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
    speculation: _Counted | None


class _OfLevel(TypedDict):
    """What was counted over all requests of a concurrency."""

    concurrency: Size
    counters: _Counted


def requests(path: Path) -> Iterator[Record]:
    """The records of a file, each of one of three kinds."""
    for where, row in Records.read(path, KIND).placed():
        kind = _Answered if "tokens" in row else _Failed if "error" in row else _OfLevel
        require_fields(row, kind, where, RecordError)
        if row.get("arrivals_s") == []:
            raise RecordError(f"{where}: arrivals_s is empty; there is at least the end")
        yield row


@dataclass(frozen=True)
class Level:
    """A server at one concurrency; times are seconds, intervals 95 % over prompts."""

    concurrency: int
    requests: int
    failed: int
    under_way: float
    """Requests at a time, on average: fewer than wanted where there were too few, or at the end."""
    tokens_per_s: float
    tokens_per_s_interval: Interval
    ttft_s: float
    """To the first token: the median."""
    ttft_s_interval: Interval
    ttft_s_p95: float
    between_s: float | None
    """Between tokens: from the first to the last, over how many come behind the first; None where none does."""
    between_s_interval: Interval | None
    tar: float | None
    """Tokens an iteration: 1 + accepted / iterations, as the server counts them."""
    acceptance_rate: float | None
    set_tokens: dict[str, int]
    """Tokens written after the prompts of each set."""


def summarise(path: Path) -> list[Level]:
    """From the records of a file, where any request was answered."""
    rows = list(requests(path))
    levels = sorted({row["concurrency"] for row in rows if "tokens" in row})
    if not levels:
        errors = [row["error"] for row in rows if "error" in row]
        raise RecordError(f"{path}: holds no answer of the server" + (f"; it said: {errors[-1]}" if errors else ""))
    return [_summary(many, [row for row in rows if row["concurrency"] == many]) for many in levels]


def _summary(many: int, rows: Sequence[Record]) -> Level:
    answers = [row for row in rows if "tokens" in row]
    failed = _requests([row for row in rows if "error" in row]) - _requests(answers)
    sets: dict[str, int] = {}
    for row in answers:
        sets[row["set"]] = sets.get(row["set"], 0) + row["tokens"]
    prompts, among = (_by_prompt(chosen) for chosen in (answers, _among_enough(answers, many)))
    speed, speed_interval = _ratio(among, _tokens, _share_s)
    longer = any(row["tokens"] > 1 for row in answers)
    between, between_interval = _ratio(prompts, _span_s, _behind) if longer else (None, None)
    first = _padded([[row["arrivals_s"][0] for row in group] for group in prompts.values()])
    ttft, ttft_interval = _bounded(lambda at: np.nanmedian(first[at].reshape(len(at), -1), -1), len(first))
    own = [row["speculation"] for row in answers if row["speculation"]]
    tar, rate = _speculation(own or [row["counters"] for row in rows if "counters" in row])
    return Level(
        concurrency=many,
        requests=len(answers),
        failed=len(failed),
        under_way=_ratio(among, _total_s, _share_s)[0],
        tokens_per_s=speed,
        tokens_per_s_interval=speed_interval,
        ttft_s=ttft,
        ttft_s_interval=ttft_interval,
        ttft_s_p95=float(np.nanquantile(first, 0.95)),
        between_s=between,
        between_s_interval=between_interval,
        tar=tar,
        acceptance_rate=rate,
        set_tokens=sets,
    )


def speed_up(path: Path, plain: Path, concurrency: int) -> tuple[float, Interval] | None:
    """How many times as fast as another server, on the prompts that both answered at this concurrency.

    None where there are none, or, of several requests at once, where one was asked more: a request's share of the time
    depends on how many it shared it with.
    """
    fast, slow = (_answers(file, concurrency) for file in (path, plain))
    if concurrency > 1 and _requests(fast) != _requests(slow):
        return None
    known = [_by_prompt(_among_enough(rows, concurrency)) for rows in (slow, fast)]
    both = [prompt for prompt in known[1] if prompt in known[0]]
    if not both:
        return None
    parts = _share_s, _tokens
    sums = np.array([[sum(map(part, prompts[one])) for prompts in known for part in parts] for one in both])

    def figure(at: NDArray[np.int64]) -> Floats:
        slow_s, slow_tokens, fast_s, fast_tokens = np.moveaxis(sums[at].sum(-2), -1, 0)
        ratio: Floats = slow_s / slow_tokens / (fast_s / fast_tokens)
        return ratio

    return _bounded(figure, len(both))


def _answers(path: Path, concurrency: int) -> list[Record]:
    return [row for row in requests(path) if "tokens" in row and row["concurrency"] == concurrency]


def _requests(rows: Sequence[Record]) -> set[Request]:
    return {(row["round"], row["set"], row["id"]) for row in rows}


def _among_enough(answers: Sequence[Record], many: int) -> Sequence[Record]:
    """Those that were asked among as many as are to be under way, if any were: one that is asked again later is alone
    with the server, and all of the time is its share.
    """
    return [row for row in answers if row["in_run"] >= many] or answers


def _by_prompt(answers: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for row in answers:
        found.setdefault((row["set"], row["id"]), []).append(row)
    return found


def _ratio(
    prompts: Mapping[tuple[str, str], Sequence[Record]],
    above: Callable[[Record], float],
    below: Callable[[Record], float],
) -> tuple[float, Interval]:
    """Of two sums over all answers."""
    tops, bottoms = (np.array([sum(map(part, group)) for group in prompts.values()]) for part in (above, below))
    return _bounded(lambda at: tops[at].sum(-1) / bottoms[at].sum(-1).clip(1e-9), len(tops))


_tokens, _total_s, _share_s = itemgetter("tokens"), itemgetter("total_s"), itemgetter("share_s")


def _span_s(row: Record) -> float:
    """From the first token to the last."""
    return float(row["arrivals_s"][-1] - row["arrivals_s"][0])


def _behind(row: Record) -> int:
    """Tokens behind the first."""
    return max(0, int(row["tokens"]) - 1)


def _padded(rows: Sequence[Sequence[float]]) -> Floats:
    """Of like length, with what is no number."""
    most = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (most - len(row))] for row in rows])


def _bounded(figure: Callable[[NDArray[np.int64]], Floats], prompts: int) -> tuple[float, Interval]:
    """A figure of all prompts, given rows of their numbers, and its interval."""
    low, high = bootstrap(figure, prompts)
    return float(figure(np.arange(prompts)[None])[0]), (float(low), float(high))


def _speculation(found: Sequence[Record]) -> tuple[float | None, float | None]:
    """TAR and acceptance rate: of these requests alone, by counters, or the recent mean that the server tells."""
    steps, drafted, accepted = (
        sum(one[name] for one in found) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    if steps:
        return 1 + accepted / steps, accepted / drafted if drafted else None
    recent = [one["recent_tar"] for one in found if one.get("recent_tar")]
    return (recent[-1] if recent else None), None
