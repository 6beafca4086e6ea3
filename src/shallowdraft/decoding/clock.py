"""Where the time of a run goes, by phase, without making a GPU wait."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

PHASES = ("prefill", "draft", "verify")


class Clock(Protocol):
    """Adds up the seconds of named phases."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts what happens inside."""

    def seconds(self, name: str) -> float:
        """Total of a phase so far; on a GPU this waits for it, so ask after the last iteration."""

    def reset(self) -> None:
        """Back to nothing."""


def new_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """By the host's clock."""

    def __init__(self) -> None:
        self.reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin_s

    def seconds(self, name: str) -> float:
        return self._seconds[name]

    def reset(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)


class DeviceClock:
    """By the GPU's own clock, read in the stream: it keeps counting where an iteration is replayed from a graph."""

    def __init__(self, device: torch.device) -> None:
        from shallowdraft.kernels import gpu

        self._stamp = gpu.stamp
        self._spent = torch.zeros(len(PHASES), dtype=torch.int64, device=device)  # nanoseconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        at = self._spent[PHASES.index(name)]
        self._stamp(at, -1)
        yield
        self._stamp(at, 1)

    def seconds(self, name: str) -> float:
        return float(self._spent[PHASES.index(name)]) / 1e9

    def reset(self) -> None:
        self._spent.zero_()
