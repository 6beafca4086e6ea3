"""Load on a server: every prompt at every concurrency, one record a request.

So many requests are under way at any time; when one ends the next begins.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from shallowdraft.bench.endpoint import Counters, Endpoint
from shallowdraft.bench.levels import KIND, requests
from shallowdraft.errors import ServerError
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records

GREETING = Prompt("", "", "Hello")
Job = tuple[int, str, Prompt]
"""A round, and a prompt with the name of its set."""


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
    draft: str | None = None
    """What the server speculates with, as its owner says; None: nothing."""
    lookahead: int | None = None

    def request(self, prompt: Prompt) -> dict[str, Any]:
        asked = {"messages": prompt.turn} if self.chat else {"prompt": prompt.content}
        return asked | {"max_tokens": self.max_tokens, "temperature": self.temperature}

    @property
    def about(self) -> Record:
        speculation = {"draft": self.draft, "lookahead": self.lookahead} if self.draft else {}
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "chat": self.chat} | speculation


def run_load(endpoint: Endpoint, load: Load, path: Path) -> Iterator[int]:
    """Ask what was not answered yet; yields how many requests are done. What failed is asked again another time.

    Before each level the server is asked something else, so that what it does but once is in no record. While requests
    are under way a record is handed to the operating system, which keeps it if we are killed; the disk waits for the
    end of a level.
    """
    about = {"url": endpoint.url, "model": endpoint.model} | load.about
    file = Records.open(path, KIND, about, engine=endpoint.engine)
    done = {(row["concurrency"], row["round"], row["set"], row["id"]) for row in requests(path) if "tokens" in row}
    jobs: list[Job] = [(number, name, prompt) for number in range(load.rounds) for name, prompt in load.prompts]
    total = len(jobs) * len(load.concurrency)
    left = {many: [job for job in jobs if (many, job[0], job[1], job[2].id) not in done] for many in load.concurrency}
    count = total - sum(map(len, left.values()))
    yield count
    for many, wanted in left.items():
        if not wanted:
            continue
        with suppress(ServerError):  # the next request says so
            endpoint.ask(load.request(GREETING), chat=load.chat)
        for row in _level(endpoint, load, many, wanted):
            file.append({"concurrency": many, "in_run": len(wanted)} | row, sync=False)
            if "counters" not in row:
                count += 1
                yield count
        file.append()  # nothing more, but all of it is on disk


class Shared:
    """A clock that runs slower the more requests are under way: their seconds on it add up to those that passed."""

    def __init__(self) -> None:
        self._lock, self._under_way = Lock(), 0
        self._shown = self._read_s = 0.0

    def begin(self) -> float:
        return self._show(1)

    def end(self) -> float:
        return self._show(-1)

    def _show(self, more: int) -> float:
        with self._lock:
            now_s = time.perf_counter()
            self._shown += (now_s - self._read_s) / max(self._under_way, 1)
            self._read_s, self._under_way = now_s, self._under_way + more
            return self._shown


def _level(endpoint: Endpoint, load: Load, many: int, jobs: Sequence[Job]) -> Iterator[Record]:
    """Records of requests as they end, then what the server counted meanwhile."""
    before = endpoint.counters()
    todo: SimpleQueue[Job] = SimpleQueue()
    done: SimpleQueue[Record | BaseException] = SimpleQueue()
    stop, shared = Event(), Shared()
    for job in jobs:
        todo.put(job)

    def work() -> None:
        with suppress(Empty):
            while not stop.is_set():
                done.put(_asked(endpoint, load, todo.get_nowait(), stop, shared))

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


def _asked(endpoint: Endpoint, load: Load, job: Job, stop: Event, shared: Shared) -> Record | BaseException:
    """A record of the answer, or of what went wrong with the server; what went wrong with us is for the caller."""
    number, name, prompt = job
    key = {"round": number, "set": name, "id": prompt.id}
    begun = shared.begin()
    try:
        answer = endpoint.ask(load.request(prompt), chat=load.chat, go_on=lambda: not stop.is_set())
    except ServerError as error:
        return key | {"error": str(error)}
    except BaseException as error:
        return error
    finally:
        share_s = shared.end() - begun
    return key | asdict(answer) | {"share_s": share_s}
