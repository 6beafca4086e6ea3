"""Executors of a study's cells: this process, one cell after the other, or a Ray cluster, one task per cell.

Only work whose result is the same on any machine goes to a cluster. Times are always measured in this process.
"""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shallowdraft.errors import ClusterError

Cell = TypeVar("Cell")
Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10
RETRIES = 5  # of a cell after its worker was lost


class Executor(Protocol):
    """Maps a function over cells."""

    def map(self, function: Callable[[Cell], Result], cells: Sequence[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield the number of each cell and its result, in the order in which they finish."""


class Here:
    """An executor that computes every cell in this process, in order."""

    def map(self, function: Callable[[Cell], Result], cells: Sequence[Cell]) -> Iterator[tuple[int, Result]]:
        return ((number, function(cell)) for number, cell in enumerate(cells))


class Cluster:
    """An executor that computes every cell as a task of a Ray cluster; another worker repeats the task of a lost one.

    Models travel as the names of their checkpoints, and relative paths start at this process's folder. So checkpoints
    that are neither in the zoo nor on the hub must lie on a disk that all machines share.
    """

    def __init__(self, address: str, *, gpus: int = 0) -> None:
        try:
            import ray
        except ImportError:
            raise ClusterError("--cluster needs Ray; install it: pip install 'shallowdraft[cluster]'") from None
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal():  # without an answer, Ray itself would wait for many minutes
                socket.create_connection((host.removeprefix("ray://"), int(port)), CONNECT_TIMEOUT_S).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClusterError(
                f"there is no Ray cluster at {address} ({reason}); start one: ray start --head"
            ) from None
        self._ray: Any = ray
        self._call: Any = ray.remote(num_gpus=gpus, max_retries=RETRIES)(_call)

    def map(self, function: Callable[[Cell], Result], cells: Sequence[Cell]) -> Iterator[tuple[int, Result]]:
        packed, shared = self._ray.cloudpickle.dumps, self._ray.put(self._ray.cloudpickle.dumps(function))
        tasks = (self._call.remote(str(Path.cwd()), shared, packed(cell)) for cell in cells)
        running = {task: number for number, task in enumerate(tasks)}
        while running:
            (done, *_), _ = self._ray.wait([*running])
            yield running.pop(done), self._result(done)

    def _result(self, done: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(done)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise ClusterError(
                f"the cluster lost a task {RETRIES + 1} times ({type(error).__name__}); "
                "see that its workers have memory enough and stay up, then go on with the same command"
            ) from None


def _call(folder: str, function: bytes, cell: bytes) -> Any:
    """Call the function in a worker, in the caller's folder: unpacking may load a model from a relative path."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return pickle.loads(function)(pickle.loads(cell))
