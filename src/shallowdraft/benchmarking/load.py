"""The load on a server: every prompt at every concurrency, one record a request.

A fixed number of requests is under way; whenever one ends the next is sent.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from shallowdraft.benchmarking.endpoint import Counters, Endpoint
from shallowdraft.errors import RecordError, ServerError
from shallowdraft.files import read_lines
from shallowdraft.identity import folder_digest
from shallowdraft.models import zoo
from shallowdraft.prompts import Prompt
from shallowdraft.records import DIGEST, Record, Records
from shallowdraft.runs.servers import KIND, read_requests

WARM_UP = Prompt("", "", "Hello")


@dataclass(frozen=True)
class Load:
    """The requests to send to a server, and what its owner says that it speculates with."""

    prompts: Sequence[tuple[str, Prompt]]
    """Prompts, each with the name of its set."""
    concurrency: Sequence[int]
    max_tokens: int
    rounds: int = 1
    temperature: float = 0.0
    chat: bool = False
    draft: str | None = None
    """The draft of the server; None without speculation."""
    lookahead: int | None = None

    def request(self, prompt: Prompt) -> dict[str, Any]:
        """Return the body of a request, without the model's name."""
        content = {"messages": prompt.turn} if self.chat else {"prompt": prompt.content}
        return content | {"max_tokens": self.max_tokens, "temperature": self.temperature}

    @property
    def about(self) -> Record:
        """The fields of a file's first line that describe the load."""
        speculation = {"draft": self.draft, "lookahead": self.lookahead} if self.draft else {}
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "chat": self.chat} | speculation


@dataclass(frozen=True)
class _Request:
    """A prompt to send, in one round."""

    round: int
    set: str
    prompt: Prompt


def run_load(endpoint: Endpoint, load: Load, path: Path) -> Iterator[int]:
    """Send all requests that the file has no answer to; yield the number of requests that are done.

    A request that fails is sent again by the next run. Before each concurrency the server gets a prompt that is not
    recorded, so that its warm-up is in no record. While requests are under way a record is only handed to the operating
    system, which keeps it if this process is killed; the disk is synced at the end of each concurrency.
    """
    about = _with_digests({"url": endpoint.url, "model": endpoint.model} | load.about, path)
    file = Records.open(path, KIND, about, engine=endpoint.engine)
    rows = (row for row in read_requests(path) if "tokens" in row)
    answered = {(row["concurrency"], row["round"], row["set"], row["id"]) for row in rows}
    requests = [_Request(number, name, prompt) for number in range(load.rounds) for name, prompt in load.prompts]
    pending = {level: _pending(requests, level, answered) for level in load.concurrency}
    done = len(requests) * len(load.concurrency) - sum(map(len, pending.values()))
    yield done
    for concurrency, unanswered in pending.items():
        if not unanswered:
            continue
        with suppress(ServerError):  # the first recorded request will report it
            endpoint.ask(load.request(WARM_UP), chat=load.chat)
        for row in _run_level(endpoint, load, concurrency, unanswered):
            file.append({"concurrency": concurrency, "in_run": len(unanswered)} | row, sync=False)
            if "counters" not in row:
                done += 1
                yield done
        file.append()  # syncs the file


def _with_digests(about: Record, path: Path) -> Record:
    """Add the digests of the models whose folders are on this machine, so that replaced weights are another model.

    In a file that was begun without a digest, as by an earlier version, that model is still compared by its name.
    """
    digests = {f"{role}{DIGEST}": digest for role in ("model", "draft") if (digest := _digest(about.get(role)))}
    if path.exists() and next(read_lines(path, RecordError, ended=True), None):
        begun = Records.read(path, KIND).about
        digests = {key: digest for key, digest in digests.items() if key in begun}
    return about | digests


def _digest(model: str | None) -> str | None:
    """Return the digest of a model of the zoo or in a folder; None for any other name."""
    if model is None:
        return None
    in_zoo = model.startswith(zoo.PREFIX) and model.removeprefix(zoo.PREFIX) in zoo.names()
    return folder_digest(zoo.folder(model) if in_zoo else Path(model))


def _pending(
    requests: Sequence[_Request], concurrency: int, answered: set[tuple[int, int, str, str]]
) -> list[_Request]:
    keys = ((concurrency, request.round, request.set, request.prompt.id) for request in requests)
    return [request for request, key in zip(requests, keys, strict=True) if key not in answered]


class SharedClock:
    """A clock that runs n times slower while n requests are under way.

    The seconds of all requests on this clock add up to the seconds in which any request was under way.
    """

    def __init__(self) -> None:
        self._lock, self._under_way = Lock(), 0
        self._time_s = self._updated_s = 0.0

    def begin(self) -> float:
        """Count one request more and return the clock's time."""
        return self._update(1)

    def end(self) -> float:
        """Count one request less and return the clock's time."""
        return self._update(-1)

    def _update(self, change: int) -> float:
        with self._lock:
            now_s = time.perf_counter()
            # The time since the last change was shared by the requests that were under way.
            self._time_s += (now_s - self._updated_s) / max(self._under_way, 1)
            self._updated_s, self._under_way = now_s, self._under_way + change
            return self._time_s


def _run_level(endpoint: Endpoint, load: Load, concurrency: int, requests: Sequence[_Request]) -> Iterator[Record]:
    """Yield a record of each request as it ends, then one of the server's counters."""
    before = endpoint.counters()
    todo: SimpleQueue[_Request] = SimpleQueue()
    done: SimpleQueue[Record | BaseException] = SimpleQueue()
    stop, clock = Event(), SharedClock()
    for request in requests:
        todo.put(request)

    def send_requests() -> None:
        with suppress(Empty):
            while not stop.is_set():
                done.put(_send(endpoint, load, todo.get_nowait(), stop, clock))

    # As many threads as requests under way: each sends its next request as soon as its answer is complete.
    for _ in range(concurrency):  # daemons, so that an interrupt does not wait for a server that hangs
        Thread(target=send_requests, daemon=True).start()
    try:
        for _ in requests:
            row = done.get()
            if isinstance(row, BaseException):
                raise row
            yield row
    finally:
        stop.set()
    after = endpoint.counters()
    if after:
        yield {"counters": after.since(before or Counters())}


def _send(endpoint: Endpoint, load: Load, request: _Request, stop: Event, clock: SharedClock) -> Record | BaseException:
    """Return a record of the answer or of the server's error; return any other error for the caller to raise."""
    key = {"round": request.round, "set": request.set, "id": request.prompt.id}
    begin_s = clock.begin()
    try:
        answer = endpoint.ask(load.request(request.prompt), chat=load.chat, keep_going=lambda: not stop.is_set())
    except ServerError as error:
        return key | {"error": str(error)}
    except BaseException as error:
        return error
    finally:
        share_s = clock.end() - begin_s
    return key | asdict(answer) | {"share_s": share_s}
