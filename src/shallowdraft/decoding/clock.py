"""Where the time of a run goes, by phase, without making a GPU wait."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

PHASES = ("prefill", "draft", "verify")

Reading = Callable[[str], float]
"""Seconds of a phase up to where the clock was read."""


class Clock(Protocol):
    """Adds up the seconds of named phases."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count what happens inside."""

    def read(self) -> Reading:
        """Totals up to here. On a GPU, up to where the work that was given to it so far ends: nothing is waited for
        until a phase is asked for.
        """

    def reset(self) -> None:
        """Begin from nothing."""


def new_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """The host's clock."""

    def __init__(self) -> None:
        self.reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin_s

    def read(self) -> Reading:
        spent = dict(self._seconds)
        return lambda name: spent.get(name, 0.0)

    def reset(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)


class DeviceClock:
    """The GPU's own clock, read in the stream: it keeps counting where an iteration is replayed from a graph."""

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

    def read(self) -> Reading:
        spent = self._spent.clone()
        return lambda name: float(spent[PHASES.index(name)]) / 1e9

    def reset(self) -> None:
        self._spent.zero_()
