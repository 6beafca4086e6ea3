"""Clocks that add up the time of a run by phase, without making a GPU wait."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

PHASES = ("prefill", "draft", "verify")

Reading = Callable[[str], float]
"""Returns the seconds of a phase up to the moment at which the clock was read."""


class Clock(Protocol):
    """Adds up the seconds of named phases."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time spent inside to a phase."""

    def read(self) -> Reading:
        """Read the totals up to now.

        On a GPU: up to the end of the work queued so far. Only calling the result waits for that.
        """

    def reset(self) -> None:
        """Set every phase to zero."""


def new_clock(device: torch.device) -> Clock:
    """Create the clock of a device."""
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
    """The GPU's own clock, read by kernels in the stream: it also counts when an iteration is replayed from a graph."""

    def __init__(self, device: torch.device) -> None:
        from shallowdraft.kernels import gpu

        self._stamp = gpu.stamp
        self._spent = torch.zeros(len(PHASES), dtype=torch.int64, device=device)  # nanoseconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        total = self._spent[PHASES.index(name)]
        # total += end - begin, as two kernels in the stream, which a captured graph replays.
        self._stamp(total, -1)
        yield
        self._stamp(total, 1)

    def read(self) -> Reading:
        spent = self._spent.clone()
        return lambda name: float(spent[PHASES.index(name)]) / 1e9

    def reset(self) -> None:
        self._spent.zero_()
