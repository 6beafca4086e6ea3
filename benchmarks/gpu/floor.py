"""What the GPU scripts share: the bandwidth that weights can be read with, and medians of timed calls."""

import statistics
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from shallowdraft.records import commit

GIB = 2**30


def bandwidth() -> float:
    """Bytes a second that this GPU reads, the best of two ways over 8 GiB of random numbers."""
    matrix = torch.empty(32768, 131072, device="cuda", dtype=torch.bfloat16).normal_()
    vector, out = torch.ones(131072, device="cuda", dtype=torch.bfloat16), torch.empty_like(matrix[:, : 131072 // 2])
    read = min(timed(lambda: torch.mv(matrix, vector)))
    copied = min(timed(lambda: out.copy_(matrix[:, : 131072 // 2])))
    bytes_of = matrix.numel() * matrix.element_size()
    return max(bytes_of / read, bytes_of / copied)  # a copy of half of it reads one half and writes another


def timed(call: Callable[[], object], times: int = 10) -> list[float]:
    """Seconds of each call on the GPU, after two that do not count."""
    marks = []
    for _ in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks[2:]]


def spread(values: list[float], digits: int = 1) -> str:
    """The median, and the smallest and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def provenance() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
