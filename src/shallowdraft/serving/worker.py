"""One thread for everything that computes.

OpenMP keeps threads for every thread that ever computed with it, and where they are more than cores it lets none of
them spin: at each of a pass's hundred barriers they sleep and are woken. A server that loaded models in one thread and
decoded in another took 4.5 ms for a token that takes 1.5 (two cores).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread that does one thing after the other; it does not keep the process alive."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def start(self, job: Callable[[], T]) -> Future[T]:
        """When it has done what came before."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # for whoever asks for the result
                done.set_exception(error)

        self._todo.put(run)
        return done

    def do(self, job: Callable[[], T]) -> T:
        """And wait for it."""
        return self.start(job).result()

    def _work(self) -> None:
        while True:
            self._todo.get()()
