"""The scheduler: one thread runs the batch, prompts reach it through a bounded queue and get updates as they come."""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from shallowdraft.decoding.batch import Batch
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.results import FinishReason
from shallowdraft.decoding.rows import GeneratedRow
from shallowdraft.errors import ShallowdraftError
from shallowdraft.serving.metrics import Metrics
from shallowdraft.serving.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """Text that an iteration added to a prompt, or the error that ends it."""

    text: str = ""
    finish_reason: FinishReason | None = None
    tokens: int = 0
    """New tokens since the prompt, these included."""
    error: str | None = None


@dataclass(eq=False)
class ServedPrompt:
    """A prompt from the queue to its last update."""

    ids: list[int]
    settings: Settings
    stream: int
    """The number of its random stream, among the prompts of its request."""
    notify: Callable[[Update], None]
    """Called from the engine's thread."""
    cancelled: bool = False
    pieces_sent: int = 0
    begin_s: float = field(default_factory=time.perf_counter)


class QueueFullError(Exception):
    """No room for another request now."""


class StoppingError(Exception):
    """No more requests are taken."""


class Scheduler:
    """Lets prompts join the batch in the order they came, as rows become free."""

    def __init__(self, new_batch: Callable[[], Batch], max_rows: int, max_waiting: int, metrics: Metrics) -> None:
        self._new_batch, self._max_rows, self._max_waiting, self._metrics = new_batch, max_rows, max_waiting, metrics
        self._batch = new_batch()
        self._running: dict[GeneratedRow, ServedPrompt] = {}  # changed by the engine's thread alone
        self._waiting: deque[ServedPrompt] = deque()
        self._prefilling = False  # a prompt that has left the queue and has no row yet
        self._changed = threading.Condition()  # held to change the queue or `stopping`
        self._loop: Future[None] | None = None
        self.stopping = self._failed = False
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: len(self._running) + self._prefilling)

    def start(self, worker: Worker, on_end: Callable[[], None]) -> None:
        """Run in the worker's thread; call `on_end` when all is answered after `stop`, or after a fatal error."""
        self._loop = worker.start(self._run)
        self._loop.add_done_callback(lambda _: on_end())

    @property
    def healthy(self) -> bool:
        """Whether new requests are taken."""
        return self._loop is not None and not self._failed and not self.stopping

    @property
    def error(self) -> BaseException | None:
        """The error that ended the scheduler, if one did."""
        return self._loop.exception() if self._loop and self._loop.done() else None

    def submit(self, prompts: Sequence[ServedPrompt]) -> None:
        """Queue all prompts of a request, or none of them."""
        with self._changed:
            if not self.healthy:
                raise StoppingError
            if len(self._waiting) + len(prompts) > self._max_waiting:
                raise QueueFullError
            self._waiting.extend(prompts)
            self._changed.notify()

    def cancel(self, prompts: Sequence[ServedPrompt]) -> None:
        """Drop prompts whose client has gone; their rows become free before the next iteration."""
        with self._changed:
            for prompt in prompts:
                prompt.cancelled = True
            self._waiting = deque(prompt for prompt in self._waiting if not prompt.cancelled)

    def stop(self) -> None:
        """Take no more requests, and end when all are answered."""
        with self._changed:
            self.stopping = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if not self._run_iteration():
                    self._restart()
        finally:  # reached by an error only if a new batch could not be made either
            with self._changed:
                self._failed = True
                self._fail(self._waiting)
                self._waiting.clear()

    def _wait_for_work(self) -> bool:
        """Wait for prompts; return False if there are none and no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self.stopping)
            return bool(self._waiting or self._running)

    def _run_iteration(self) -> bool:
        """Admit a prompt and run an iteration; return False if that failed."""
        try:
            self._admit()
            self._iterate()
        except Exception:
            log.exception("an iteration failed; its requests were given up")
            return False
        return True

    def _restart(self) -> None:
        """Replace a batch that failed, after its memory is free."""
        self._fail(self._running.values())
        self._running.clear()
        del self._batch
        gc.collect()  # reference cycles would keep the memory of the failed batch
        self._batch = self._new_batch()

    def _admit(self) -> None:
        """Drop cancelled rows, then admit one prompt: the running rows wait only while one prompt is read."""
        self._remove([row for row, prompt in self._running.items() if prompt.cancelled])
        with self._changed:
            if not self._waiting or len(self._running) == self._max_rows:
                return
            prompt, self._prefilling = self._waiting.popleft(), True
        try:  # without the lock, so that requests can be queued meanwhile
            self._prefill(prompt)
        finally:
            self._prefilling = False

    def _prefill(self, prompt: ServedPrompt) -> None:
        try:
            row = self._batch.join(prompt.ids, prompt.settings, prompt.stream)
        except ShallowdraftError as error:  # of this prompt alone; the batch is intact
            prompt.notify(Update(error=str(error)))
            return
        except Exception:  # the batch may be broken, and is replaced
            self._fail([prompt])
            raise
        self._metrics.count_prefill(len(prompt.ids), time.perf_counter() - prompt.begin_s)
        self._running[row] = prompt
        self._send_update(row, prompt)

    def _iterate(self) -> None:
        if not self._running:
            return
        self._batch.step()
        for row, prompt in list(self._running.items()):  # a copy, since a row that has ended is removed
            if row.finite:
                self._metrics.count_iteration(row.accepted_by_iteration[-1])
            self._send_update(row, prompt)

    def _send_update(self, row: GeneratedRow, prompt: ServedPrompt) -> None:
        """Send the text that is new, and remove a row that has ended."""
        if not row.finite:
            self._remove([row])
            prompt.notify(Update(error="the models produced NaN or infinite logits"))
            return
        new, prompt.pieces_sent = row.pieces[prompt.pieces_sent :], len(row.pieces)
        # The last piece may be text that was held back, without a token.
        self._metrics.tokens.inc(sum(piece.token_id is not None for piece in new))
        text = "".join(piece.text for piece in new)
        if row.finish_reason is not None:
            self._remove([row])
            self._metrics.count_finish(row.finish_reason, time.perf_counter() - prompt.begin_s)
        prompt.notify(Update(text, row.finish_reason, len(row.tokens)))

    def _remove(self, rows: Sequence[GeneratedRow]) -> None:
        self._batch.leave(rows)
        for row in rows:
            del self._running[row]

    def _fail(self, prompts: Iterable[ServedPrompt]) -> None:
        for prompt in prompts:
            prompt.notify(Update(error="the request failed in the server"))
