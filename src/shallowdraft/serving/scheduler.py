"""One thread runs the batch; requests reach it through a bounded queue, what they get is handed back as it comes."""

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
    """What is new of a request."""

    text: str = ""
    finish_reason: FinishReason | None = None
    tokens: int = 0
    """New tokens so far."""
    error: str | None = None
    """Why there will be nothing more."""


@dataclass(eq=False)
class Ticket:
    """A prompt on its way through the server."""

    prompt: list[int]
    settings: Settings
    stream: int
    """The number of its random stream, among the prompts of its request."""
    notify: Callable[[Update], None]
    """Called from the engine's thread."""
    cancelled: bool = False
    shown: int = 0
    begin_s: float = field(default_factory=time.perf_counter)


class QueueFullError(Exception):
    """No room for another request now."""


class StoppingError(Exception):
    """No more requests are taken."""


class Scheduler:
    """Lets requests join the batch in the order they came, as rows become free."""

    def __init__(self, new_batch: Callable[[], Batch], rows: int, queue: int, metrics: Metrics) -> None:
        self._new_batch, self._most_rows, self._most_waiting, self._metrics = new_batch, rows, queue, metrics
        self._batch = new_batch()
        self._running: dict[GeneratedRow, Ticket] = {}
        self._waiting: deque[Ticket] = deque()
        self._reading = False  # a prompt, which is neither
        self._changed = threading.Condition()
        self._ended: Future[None] | None = None
        self.stopping = self._given_up = False
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: len(self._running) + self._reading)

    def start(self, worker: Worker, ended: Callable[[], None]) -> None:
        """`ended` is called when all that was taken is answered after `stop`, or when nothing can be any more."""
        self._ended = worker.start(self._run)
        self._ended.add_done_callback(lambda _: ended())

    @property
    def healthy(self) -> bool:
        return self._ended is not None and not self._given_up and not self.stopping

    @property
    def error(self) -> BaseException | None:
        """Why nothing can be answered any more."""
        return self._ended.exception() if self._ended and self._ended.done() else None

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """All of them, or none."""
        with self._changed:
            if not self.healthy:
                raise StoppingError
            if len(self._waiting) + len(tickets) > self._most_waiting:
                raise QueueFullError
            self._waiting.extend(tickets)
            self._changed.notify()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more; rows become free before the next iteration."""
        with self._changed:
            for ticket in tickets:
                ticket.cancelled = True
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)

    def stop(self) -> None:
        """Take no more requests."""
        with self._changed:
            self.stopping = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._work():
                if not self._went_on():
                    self._start_again()
        finally:  # reached by an error only if not even a new batch could be made
            with self._changed:
                self._given_up = True
                self._give_up(self._waiting)
                self._waiting.clear()

    def _went_on(self) -> bool:
        try:
            self._admit()
            self._iterate()
        except Exception:
            log.exception("an iteration failed; its requests were given up")
            return False
        return True

    def _start_again(self) -> None:
        """With another batch, once nothing of the failed one takes memory."""
        self._give_up(self._running.values())
        self._running.clear()
        del self._batch
        gc.collect()
        self._batch = self._new_batch()

    def _work(self) -> bool:
        """Wait until there is some; False: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self.stopping)
            return bool(self._waiting or self._running)

    def _admit(self) -> None:
        """Let those leave for whom nobody waits, and one join: while its prompt is read, the rows that run wait."""
        self._let_go([row for row, ticket in self._running.items() if ticket.cancelled])
        with self._changed:
            if not self._waiting or len(self._running) == self._most_rows:
                return
            ticket, self._reading = self._waiting.popleft(), True
        try:
            self._join(ticket)
        finally:
            self._reading = False

    def _join(self, ticket: Ticket) -> None:
        try:
            row = self._batch.join(ticket.prompt, ticket.settings, ticket.stream)
        except ShallowdraftError as error:
            ticket.notify(Update(error=str(error)))
            return
        except Exception:
            self._give_up([ticket])
            raise
        self._metrics.begun(len(ticket.prompt), time.perf_counter() - ticket.begin_s)
        self._running[row] = ticket
        self._publish(row, ticket)

    def _iterate(self) -> None:
        if not self._running:
            return
        self._batch.step()
        for row, ticket in list(self._running.items()):
            if row.finite:
                self._metrics.iterated(row.accepted_by_iteration[-1])
            self._publish(row, ticket)

    def _publish(self, row: GeneratedRow, ticket: Ticket) -> None:
        if not row.finite:
            self._let_go([row])
            ticket.notify(Update(error="the models produced NaN or infinite logits"))
            return
        new, ticket.shown = row.pieces[ticket.shown :], len(row.pieces)
        self._metrics.tokens.inc(sum(piece.token_id is not None for piece in new))
        text = "".join(piece.text for piece in new)
        if row.finish_reason is not None:
            self._let_go([row])
            self._metrics.ended(row.finish_reason, time.perf_counter() - ticket.begin_s)
        ticket.notify(Update(text, row.finish_reason, len(row.tokens)))

    def _let_go(self, rows: Sequence[GeneratedRow]) -> None:
        self._batch.leave(rows)
        for row in rows:
            del self._running[row]

    def _give_up(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.notify(Update(error="the request failed in the server"))
