"""One thread for everything that computes.

OpenMP keeps a team of threads for every thread that ever computed, and once all teams together exceed the cores it no
longer lets them spin: at each of the hundred barriers of a forward pass they sleep and have to be woken. A server that
loaded models in one thread and decoded in another took 4.5 ms for a token that takes 1.5 (two cores).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A daemon thread that runs jobs one after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run_jobs, name="engine", daemon=True).start()

    def start(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job and return the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def do(self, job: Callable[[], T]) -> T:
        """Run a job and wait for its result."""
        return self.start(job).result()

    def _run_jobs(self) -> None:
        while True:
            self._jobs.get()()
