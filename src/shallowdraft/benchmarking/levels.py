"""Figures of a server from its records: throughput, latency and acceptance at every concurrency, and speed-ups.

Of every second in which n requests were under way, each request counts a share of 1/n (`share_s`). Tokens per second
are the tokens of the answered requests over the sum of their shares. If no request failed, that is all tokens over the
seconds in which any request was under way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shallowdraft.errors import RecordError
from shallowdraft.intervals import bootstrap
from shallowdraft.records import Record
from shallowdraft.runs.servers import RequestKey, read_requests
from shallowdraft.runs.trace import PromptKey

Interval = tuple[float, float]
Floats = NDArray[np.float64]
Draws = NDArray[np.int64]
"""Numbers of prompts, drawn with replacement [resamples, prompts]."""


@dataclass(frozen=True)
class Level:
    """The figures of a server at one concurrency; times are seconds, intervals 95 % over prompts."""

    concurrency: int
    requests: int
    failed: int
    under_way: float
    """Mean number of concurrent requests: below the concurrency if there were too few prompts, and near the end."""
    tokens_per_s: float
    tokens_per_s_interval: Interval
    ttft_s: float
    """Median time to the first token."""
    ttft_s_interval: Interval
    ttft_s_p95: float
    between_s: float | None
    """Time between tokens: from the first to the last, over the tokens after the first; None if there are none."""
    between_s_interval: Interval | None
    tar: float | None
    """Tokens per iteration: 1 + accepted / iterations, as the server counts them."""
    acceptance_rate: float | None
    set_tokens: dict[str, int]
    """New tokens of the prompts of each set."""


def summarise(path: Path) -> list[Level]:
    """Compute the figures of every concurrency in a file at which a request was answered."""
    rows = list(read_requests(path))
    levels = sorted({row["concurrency"] for row in rows if "tokens" in row})
    if not levels:
        errors = [row["error"] for row in rows if "error" in row]
        raise RecordError(f"{path}: holds no answer of the server" + (f"; it said: {errors[-1]}" if errors else ""))
    return [_level(concurrency, [row for row in rows if row["concurrency"] == concurrency]) for concurrency in levels]


def _level(concurrency: int, rows: Sequence[Record]) -> Level:
    answers = [row for row in rows if "tokens" in row]
    # A request that failed and was answered by a later run has not failed.
    failed = _request_keys([row for row in rows if "error" in row]) - _request_keys(answers)
    set_tokens: dict[str, int] = {}
    for row in answers:
        set_tokens[row["set"]] = set_tokens.get(row["set"], 0) + row["tokens"]
    by_prompt, loaded = _by_prompt(answers), _by_prompt(_under_full_load(answers, concurrency))
    tokens_per_s, tokens_per_s_interval = _ratio(loaded, _tokens, _share_s)
    has_gaps = any(row["tokens"] > 1 for row in answers)
    between_s, between_s_interval = _ratio(by_prompt, _span_s, _gaps) if has_gaps else (None, None)
    # Seconds to the first token [prompts, answers]; a resample takes all answers of its prompts.
    first_s = _padded([[row["arrivals_s"][0] for row in group] for group in by_prompt.values()])
    ttft_s, ttft_s_interval = _with_interval(
        lambda draws: np.nanmedian(first_s[draws].reshape(len(draws), -1), -1), len(first_s)
    )
    # Counts per request are preferred: the server's counters include the requests of other clients.
    per_request = [row["speculation"] for row in answers if row["speculation"]]
    tar, acceptance_rate = _speculation(per_request or [row["counters"] for row in rows if "counters" in row])
    return Level(
        concurrency=concurrency,
        requests=len(answers),
        failed=len(failed),
        under_way=_ratio(loaded, _total_s, _share_s)[0],
        tokens_per_s=tokens_per_s,
        tokens_per_s_interval=tokens_per_s_interval,
        ttft_s=ttft_s,
        ttft_s_interval=ttft_s_interval,
        ttft_s_p95=float(np.nanquantile(first_s, 0.95)),
        between_s=between_s,
        between_s_interval=between_s_interval,
        tar=tar,
        acceptance_rate=acceptance_rate,
        set_tokens=set_tokens,
    )


def speed_up(path: Path, plain: Path, concurrency: int) -> tuple[float, Interval] | None:
    """Return the speed-up over another server at this concurrency, on the prompts that both answered.

    Return None if there are no common prompts. Above concurrency 1, return None also if the requests differ: the share
    of a request depends on the requests that it was concurrent with.
    """
    fast, slow = (_answers(file, concurrency) for file in (path, plain))
    if concurrency > 1 and _request_keys(fast) != _request_keys(slow):
        return None
    slow_prompts, fast_prompts = (_by_prompt(_under_full_load(rows, concurrency)) for rows in (slow, fast))
    common = [prompt for prompt in fast_prompts if prompt in slow_prompts]
    if not common:
        return None
    # Sums of each prompt [prompts, 4].
    sums = np.array([[*_sums(slow_prompts[prompt]), *_sums(fast_prompts[prompt])] for prompt in common])

    def figure(draws: Draws) -> Floats:
        # [resamples, prompts, 4] summed over prompts: each server's seconds and tokens [resamples]
        slow_s, slow_tokens, fast_s, fast_tokens = np.moveaxis(sums[draws].sum(-2), -1, 0)
        ratio: Floats = slow_s / slow_tokens / (fast_s / fast_tokens)
        return ratio

    return _with_interval(figure, len(common))


def _sums(answers: Sequence[Record]) -> tuple[float, float]:
    """Return the shares in seconds and the tokens of all answers to a prompt."""
    return sum(map(_share_s, answers)), sum(map(_tokens, answers))


def _answers(path: Path, concurrency: int) -> list[Record]:
    return [row for row in read_requests(path) if "tokens" in row and row["concurrency"] == concurrency]


def _request_keys(rows: Sequence[Record]) -> set[RequestKey]:
    return {(row["round"], row["set"], row["id"]) for row in rows}


def _under_full_load(answers: Sequence[Record], concurrency: int) -> Sequence[Record]:
    """Keep the requests that were sent at the wanted concurrency, if any were.

    A request that failed and is sent again later has the server to itself, and all of the time is its share.
    """
    return [row for row in answers if row["in_run"] >= concurrency] or answers


def _by_prompt(answers: Sequence[Record]) -> dict[PromptKey, list[Record]]:
    groups: dict[PromptKey, list[Record]] = {}
    for row in answers:
        groups.setdefault((row["set"], row["id"]), []).append(row)
    return groups


def _ratio(
    prompts: Mapping[PromptKey, Sequence[Record]],
    numerator: Callable[[Record], float],
    denominator: Callable[[Record], float],
) -> tuple[float, Interval]:
    """Return the ratio of two sums over all answers, and its interval."""
    # Sums of each prompt [prompts]: a prompt is drawn with all of its answers.
    above, below = (np.array([sum(map(part, rows)) for rows in prompts.values()]) for part in (numerator, denominator))
    # A resample may hold only answers of one token, which have no gaps: its denominator is then 0.
    return _with_interval(lambda draws: above[draws].sum(-1) / below[draws].sum(-1).clip(1e-9), len(above))


_tokens, _total_s, _share_s = itemgetter("tokens"), itemgetter("total_s"), itemgetter("share_s")


def _span_s(row: Record) -> float:
    """Return the seconds from the first token to the last."""
    return float(row["arrivals_s"][-1] - row["arrivals_s"][0])


def _gaps(row: Record) -> int:
    """Return the number of tokens after the first."""
    return max(0, int(row["tokens"]) - 1)


def _padded(rows: Sequence[Sequence[float]]) -> Floats:
    """Stack rows of different lengths, padded with NaN."""
    longest = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (longest - len(row))] for row in rows])


def _with_interval(figure: Callable[[Draws], Floats], prompts: int) -> tuple[float, Interval]:
    """Return a figure of all prompts and its interval; `figure` takes draws and returns a value a row."""
    low, high = bootstrap(figure, prompts)
    # Every prompt once is the draw [1, prompts] of the figure itself.
    return float(figure(np.arange(prompts)[None])[0]), (float(low), float(high))


def _speculation(counts: Sequence[Record]) -> tuple[float | None, float | None]:
    """Return TAR and acceptance rate from counts, or only the last recent mean of TAR that the server reported."""
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    iterations, drafted, accepted = (sum(row[name] for row in counts) for name in names)
    if iterations:
        return 1 + accepted / iterations, accepted / drafted if drafted else None
    # SGLang has no counters, only a mean over recent requests; the last one is the closest to this load.
    recent = [row["recent_tar"] for row in counts if row.get("recent_tar")]
    return (recent[-1] if recent else None), None
