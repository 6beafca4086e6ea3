"""Helpers of the GPU scripts: the memory bandwidth, timed calls, and the origin of a measurement."""

import statistics
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from shallowdraft.records import commit

GIB = 2**30


def bandwidth() -> float:
    """Measure the bytes per second that this GPU reads: the better of two methods over 8 GiB of random numbers."""
    matrix = torch.empty(32768, 131072, device="cuda", dtype=torch.bfloat16).normal_()
    vector, out = torch.ones(131072, device="cuda", dtype=torch.bfloat16), torch.empty_like(matrix[:, : 131072 // 2])
    read_s = min(timed(lambda: torch.mv(matrix, vector)))
    copy_s = min(timed(lambda: out.copy_(matrix[:, : 131072 // 2])))
    matrix_bytes = matrix.numel() * matrix.element_size()
    # The copy reads half of the matrix and writes as many bytes
    return max(matrix_bytes / read_s, matrix_bytes / copy_s)


def timed(call: Callable[[], object], times: int = 10) -> list[float]:
    """Return the GPU seconds of each call, after two calls to warm up."""
    events = []
    for _ in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events[2:]]


def spread(values: list[float], digits: int = 1) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def provenance() -> str:
    """Return date, commit, GPU and version of torch."""
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
