"""Where the time of a run goes, by phase, without making a GPU wait."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the seconds of named phases: by the host's clock on a CPU, by events in the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((name, begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin_s

    def seconds(self, name: str) -> float:
        """Total of a phase so far; on CUDA this waits for the stream, so ask after the last iteration."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for phase, begin, end in self._events:
                self._seconds[phase] += begin.elapsed_time(end) / 1e3
            self._events.clear()
        return self._seconds[name]
