"""Where the cells of a study are computed: here, one after the other, or as tasks of a Ray cluster.

Only what gives the same result on any machine goes to a cluster. Times are always taken here.
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
Found = TypeVar("Found")

ANSWER_S = 10
RETRIES = 5  # of a cell whose worker was lost


class Executor(Protocol):
    """Maps a function over cells."""

    def map(self, function: Callable[[Cell], Found], cells: Sequence[Cell]) -> Iterator[tuple[int, Found]]:
        """The number of each cell and what was found, as they come."""


class Here:
    """In this process, in order."""

    def map(self, function: Callable[[Cell], Found], cells: Sequence[Cell]) -> Iterator[tuple[int, Found]]:
        return ((number, function(cell)) for number, cell in enumerate(cells))


class Cluster:
    """As tasks of a Ray cluster, one a cell; a lost worker's is done again by another.

    Models travel as the names of their checkpoints, relative paths are those of this process's folder: what is not in
    the zoo or on the hub lies on a disk that all machines have.
    """

    def __init__(self, address: str, *, gpus: int = 0) -> None:
        try:
            import ray
        except ImportError:
            raise ClusterError("--cluster needs Ray; install it: pip install 'shallowdraft[cluster]'") from None
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal():  # where nobody answers, Ray itself would wait for many minutes
                socket.create_connection((host.removeprefix("ray://"), int(port)), ANSWER_S).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClusterError(
                f"there is no Ray cluster at {address} ({reason}); start one: ray start --head"
            ) from None
        self._ray: Any = ray
        self._call: Any = ray.remote(num_gpus=gpus, max_retries=RETRIES)(_call)

    def map(self, function: Callable[[Cell], Found], cells: Sequence[Cell]) -> Iterator[tuple[int, Found]]:
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
    """In a worker; what unpacking loads may lie at a relative path."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return pickle.loads(function)(pickle.loads(cell))
