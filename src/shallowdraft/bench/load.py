"""Load on a server: every prompt at every concurrency, one record a request, and what follows from the records.

So many requests are under way at any time; when one ends the next begins. Tokens a second are those of a request, times
how many are under way, so that the end of a round, where fewer are, does not count against the server.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shallowdraft.bench.endpoint import Counters, Endpoint
from shallowdraft.errors import RecordError, ServerError
from shallowdraft.intervals import bootstrap
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records

KIND = "server runs"

Job = tuple[int, str, Prompt]
"""A round, and a prompt with the name of its set."""
Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """What to ask, and how."""

    prompts: Sequence[tuple[str, Prompt]]
    """Each with the name of its set."""
    concurrency: Sequence[int]
    max_tokens: int
    rounds: int = 1
    temperature: float = 0.0
    chat: bool = False

    def request(self, prompt: Prompt) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt.text}]} if self.chat else {"prompt": prompt.text}
        return asked | {"max_tokens": self.max_tokens, "temperature": self.temperature}

    @property
    def about(self) -> Record:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "chat": self.chat}


def run_load(endpoint: Endpoint, load: Load, path: Path, argv: Sequence[str]) -> Iterator[int]:
    """Ask what was not answered yet; yields how many requests are done. What failed is asked again another time."""
    about = {"url": endpoint.url, "model": endpoint.model} | load.about
    file = Records.open(path, KIND, about, argv=list(argv))
    done = {(row["concurrency"], row["round"], row["set"], row["id"]) for row in _answers(file)}
    jobs: list[Job] = [(number, name, prompt) for number in range(load.rounds) for name, prompt in load.prompts]
    total = len(jobs) * len(load.concurrency)
    left = {many: [job for job in jobs if (many, job[0], job[1], job[2].id) not in done] for many in load.concurrency}
    count = total - sum(map(len, left.values()))
    yield count
    for many, wanted in left.items():
        for row in _level(endpoint, load, many, wanted) if wanted else ():
            file.append({"concurrency": many} | row)
            if "counters" not in row:
                count += 1
                yield count


def _level(endpoint: Endpoint, load: Load, many: int, jobs: Sequence[Job]) -> Iterator[Record]:
    """Records of requests as they end, then what the server counted meanwhile."""
    before = endpoint.counters()
    todo: SimpleQueue[Job] = SimpleQueue()
    done: SimpleQueue[Record | BaseException] = SimpleQueue()
    stop = Event()
    for job in jobs:
        todo.put(job)

    def work() -> None:
        with suppress(Empty):
            while not stop.is_set():
                done.put(_asked(endpoint, load, todo.get_nowait(), stop))

    for _ in range(many):  # daemons: whoever interrupts us does not wait for a server that hangs
        Thread(target=work, daemon=True).start()
    try:
        for _ in jobs:
            row = done.get()
            if isinstance(row, BaseException):
                raise row
            yield row
    finally:
        stop.set()
    after = endpoint.counters()
    if after:
        yield {"counters": after.since(before or Counters())}


def _asked(endpoint: Endpoint, load: Load, job: Job, stop: Event) -> Record | BaseException:
    """A record of the answer, or of what went wrong with the server; what went wrong with us is for the caller."""
    number, name, prompt = job
    key = {"round": number, "set": name, "id": prompt.id}
    try:
        answer = endpoint.ask(load.request(prompt), chat=load.chat, go_on=lambda: not stop.is_set())
    except ServerError as error:
        return key | {"error": str(error)}
    except BaseException as error:
        return error
    return key | asdict(answer)


def _answers(file: Records) -> list[Record]:
    return [row for row in file if "tokens" in row]


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
    return Level(many, len(answers), len(failed), *speed, *ttft, p95, *between, tar, rate)


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
