"""What follows from the records of a server that was asked: figures at every concurrency, and against another server.

Tokens a second are those of the requests that were answered over their share of the time that passed: seconds in which
n were under way count as an nth. Where none failed, that is all tokens over the seconds in which any was under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shallowdraft.errors import RecordError
from shallowdraft.intervals import bootstrap
from shallowdraft.records import Record, Records

KIND = "requests of a server"

Interval = tuple[float, float]
Floats = NDArray[np.float64]


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
    rows = list(Records.read(path, KIND))
    levels = sorted({row["concurrency"] for row in rows if "tokens" in row})
    if not levels:
        errors = [row["error"] for row in rows if "error" in row]
        raise RecordError(f"{path}: holds no answer of the server" + (f"; it said: {errors[-1]}" if errors else ""))
    return [_summary(many, [row for row in rows if row["concurrency"] == many]) for many in levels]


def _summary(many: int, rows: Sequence[Record]) -> Level:
    answers = [row for row in rows if "tokens" in row]
    answered = {(row["round"], row["set"], row["id"]) for row in answers}
    failed = {(row["round"], row["set"], row["id"]) for row in rows if "error" in row} - answered
    prompts: dict[tuple[str, str], list[Record]] = {}
    sets: dict[str, int] = {}
    for row in answers:
        prompts.setdefault((row["set"], row["id"]), []).append(row)
        sets[row["set"]] = sets.get(row["set"], 0) + row["tokens"]
    sums = np.array([np.sum([_parts(row) for row in group], 0) for group in prompts.values()])
    tokens, total, share, span, behind = range(5)

    def ratio(top: int, bottom: int) -> tuple[float, Interval]:
        return _bounded(lambda at: sums[at, top].sum(-1) / sums[at, bottom].sum(-1).clip(1e-9), len(sums))

    first = _padded([[row["arrivals_s"][0] for row in group] for group in prompts.values()])
    speed, speed_interval = ratio(tokens, share)
    ttft, ttft_interval = _bounded(lambda at: np.nanmedian(first[at].reshape(len(at), -1), -1), len(first))
    between, between_interval = ratio(span, behind) if sums[:, behind].any() else (None, None)
    own = [row["speculation"] for row in answers if row["speculation"]]
    tar, rate = _speculation(own or [row["counters"] for row in rows if "counters" in row])
    return Level(
        concurrency=many,
        requests=len(answers),
        failed=len(failed),
        under_way=ratio(total, share)[0],
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


def _parts(row: Record) -> tuple[float, ...]:
    """Tokens, seconds, the share of them, seconds from the first token to the last, and tokens behind the first."""
    arrivals = row["arrivals_s"]
    return row["tokens"], row["total_s"], row["share_s"], arrivals[-1] - arrivals[0], max(row["tokens"] - 1, 0)


def speed_up(path: Path, plain: Path, concurrency: int) -> tuple[float, Interval] | None:
    """How many times as fast as another server, on the prompts that both answered at this concurrency."""
    fast, slow = _by_id(path, concurrency), _by_id(plain, concurrency)
    both = [key for key in fast if key in slow]
    if not both:
        return None
    times = np.array([[slow[key], fast[key]] for key in both])  # [prompts, 2, tokens and seconds]
    known = times.sum(0)

    def figure(sums: Floats) -> Floats:
        pace = sums[..., 1] / sums[..., 0]
        ratio: Floats = pace[..., 0] / pace[..., 1]
        return ratio

    low, high = bootstrap(lambda draws: figure(times[draws].sum(1)), len(both))
    return float(figure(known)), (float(low), float(high))


def _by_id(path: Path, concurrency: int) -> dict[tuple[str, str], Floats]:
    """Tokens and share of the time of each prompt's answers."""
    found: dict[tuple[str, str], Floats] = {}
    for row in Records.read(path, KIND):
        if "tokens" in row and row["concurrency"] == concurrency:
            key, once = (row["set"], row["id"]), np.array([row["tokens"], row["share_s"]], float)
            found[key] = found[key] + once if key in found else once
    return found


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
