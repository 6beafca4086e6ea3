"""What follows from the records of a server that was asked: figures at every concurrency, and against another server.

Tokens a second are those of a request, times how many were under way, so that the end of a round, where fewer are, does
not count against the server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shallowdraft.errors import RecordError
from shallowdraft.intervals import bootstrap
from shallowdraft.records import Record, Records

KIND = "server runs"

Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Level:
    """A server at one concurrency; times are seconds, intervals 95 % over prompts."""

    concurrency: int
    requests: int
    failed: int
    tokens_per_s: float
    tokens_per_s_interval: Interval
    ttft_s: float
    """To the first token: the median."""
    ttft_s_interval: Interval
    ttft_s_p95: float
    between_s: float
    """Between tokens: from the first to the last, over how many come behind the first."""
    between_s_interval: Interval
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
    tokens = np.array([row["tokens"] for row in answers], float)
    total, first = np.array([row["total_s"] for row in answers]), np.array([row["arrivals_s"][0] for row in answers])
    last = np.array([row["arrivals_s"][-1] for row in answers])
    groups = _by_prompt(answers)
    speed = _bounded(lambda at: many * tokens[at].sum(-1) / total[at].sum(-1), groups)
    ttft = _bounded(lambda at: np.median(first[at], -1), groups)
    between = _bounded(lambda at: (last - first)[at].sum(-1) / np.maximum(tokens[at] - 1, 0).sum(-1).clip(1), groups)
    own = [row["speculation"] for row in answers if row["speculation"]]
    tar, rate = _speculation(own or [row["counters"] for row in rows if "counters" in row])
    p95 = float(np.quantile(first, 0.95))
    sets: dict[str, int] = {}
    for row in answers:
        sets[row["set"]] = sets.get(row["set"], 0) + row["tokens"]
    return Level(many, len(answers), len(failed), *speed, *ttft, p95, *between, tar, rate, sets)


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
    """Tokens and seconds of each prompt's answers."""
    found: dict[tuple[str, str], Floats] = {}
    for row in Records.read(path, KIND):
        if "tokens" in row and row["concurrency"] == concurrency:
            key, once = (row["set"], row["id"]), np.array([row["tokens"], row["total_s"]], float)
            found[key] = found[key] + once if key in found else once
    return found


def _by_prompt(answers: Sequence[Record]) -> NDArray[np.int64]:
    """Rows of answers to the same prompt, as many as every prompt has."""
    groups: dict[tuple[str, str], list[int]] = {}
    for at, row in enumerate(answers):
        groups.setdefault((row["set"], row["id"]), []).append(at)
    fewest = min(map(len, groups.values()))
    return np.array([group[:fewest] for group in groups.values()])


def _bounded(figure: Callable[[NDArray[np.int64]], Floats], groups: NDArray[np.int64]) -> tuple[float, Interval]:
    """A figure of all answers, and its interval: prompts are drawn, their rounds stay together."""
    low, high = bootstrap(lambda draws: figure(groups[draws].reshape(len(draws), -1)), len(groups))
    return float(figure(groups.reshape(-1))), (float(low), float(high))


def _speculation(found: Sequence[Record]) -> tuple[float | None, float | None]:
    """TAR and acceptance rate: of these requests alone, by counters, or the recent mean that the server tells."""
    steps, drafted, accepted = (
        sum(one[name] for one in found) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    if steps:
        return 1 + accepted / steps, accepted / drafted if drafted else None
    recent = [one["recent_tar"] for one in found if one.get("recent_tar")]
    return (recent[-1] if recent else None), None
