"""Tilings of a matrix product by their speed: all candidates beside the rule's choice (`gpu.tiling`) and cuBLAS.

A graph has a chain of products over more than 600 MB of weights, so that no weight is in the L2 cache. cuBLAS computes
the product alone; our kernel also the norm before it and the activation or residual after it. Fourteen processes first
compile the kernels.

    python benchmarks/gpu/tilings.py [--sizes 12288x2560 22016x2560g ...] [--rows 1 5]

A size is outputs x inputs; `g` marks a product with a gated activation.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product as combinations
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from floor import bandwidth, provenance, timed

from shallowdraft.kernels import gpu
from shallowdraft.kernels.gpu import Tiling

CHAINED = 600e6  # bytes of weights
PROCESSES = 14
Size = tuple[int, int, bool]


def parse_size(text: str) -> Size:
    """Return outputs, inputs, and whether the activation is gated."""
    outputs, _, inputs = text.removesuffix("g").partition("x")
    return int(outputs), int(inputs), text.endswith("g")


def candidates(rows: int) -> list[Tiling]:
    """Return tilings whose numbers fit in a warp's registers, or whose stages fit in shared memory."""
    if rows <= 2:
        tiles = combinations((2, 4, 8), (256, 512, 1024, 2048, 4096), (2, 4, 8), (1, 3))
        return [
            Tiling(outputs, inputs, warps, stages, dot=False, lines=16)
            for outputs, inputs, warps, stages in tiles
            if 16 <= rows * outputs * inputs // (32 * warps) <= 64  # numbers per thread
        ]
    tiles = combinations((16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 8))
    return [
        Tiling(outputs, inputs, warps, stages, dot=True, last=True)
        for outputs, inputs, warps, stages in tiles
        if 2 <= outputs // (4 * warps) <= 8
        and 60_000 <= stages * inputs * 2 * (outputs + max(16, rows)) <= 200_000  # bytes of shared memory
    ]


def run(size: Size, rows: int, tiling: Tiling, weights: list[gpu.Weight]) -> torch.Tensor:
    """Multiply with every weight; return the last product."""
    outputs, inputs, gated = size
    x = torch.ones(rows, inputs, device="cuda", dtype=torch.bfloat16)
    norm = gpu.InputNorm(torch.ones(inputs, device="cuda", dtype=torch.bfloat16), 1e-5)
    # A projection back to the residual stream, by its size
    adds_residual = not gated and outputs < 2 * inputs
    residual = torch.ones(rows, outputs, device="cuda", dtype=torch.bfloat16) if adds_residual else None
    for weight in weights:
        y = gpu.product(
            x, weight, tiling, norm=None if adds_residual else norm, residual=residual,
            activation=gpu.GATED if gated else None, pdl=True,
        )  # fmt: skip
    return y


def compile_error(job: tuple[Size, int, Tiling]) -> str | None:
    """Compile and run a kernel; return the name of its error, or None."""
    size, rows, tiling = job
    weight = gpu.Weight(torch.ones(size[0], size[1], device="cuda", dtype=torch.bfloat16))
    try:
        run(size, rows, tiling, [weight])
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory or too many registers; the sweep goes on
        return type(error).__name__
    return None


def seconds(call: Callable[[], object]) -> float:
    """Return the median GPU seconds of a call that is captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return statistics.median(timed(graph.replay, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["12288x4096", "4096x4096", "22016x4096g", "4096x11008", "12288x2560", "2560x4096", "22016x2560g"]
    parser.add_argument("--sizes", nargs="+", default=sizes)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 5])
    args = parser.parse_args()
    chip, bytes_s = gpu.chip(torch.device("cuda")), bandwidth()
    torch.cuda.empty_cache()
    jobs = []
    for text, rows in combinations(args.sizes, args.rows):
        size = parse_size(text)
        chosen = gpu.tiling(chip, size[0], size[1], rows, size[2])
        jobs += [(size, rows, tiling) for tiling in dict.fromkeys([chosen, *candidates(rows)])]
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_error, jobs, chunksize=4), strict=True))
    print(provenance())
    print(f"memory is read at {bytes_s / 1e12:.2f} TB/s; figures are shares of it; {len(jobs)} candidates")
    for text, rows in combinations(args.sizes, args.rows):
        size = parse_size(text)
        weight_bytes = 2 * size[0] * size[1]
        count = int(CHAINED // weight_bytes) + 2
        weights = [gpu.Weight(torch.randn(size[0], size[1], device="cuda").bfloat16()) for _ in range(count)]
        floor_s = count * weight_bytes / bytes_s
        x = torch.ones(rows, size[1], device="cuda", dtype=torch.bfloat16)
        cublas_s = seconds(lambda weights=weights, x=x: [F.linear(x, weight.matrix) for weight in weights])
        runnable = [job for job in jobs if job[:2] == (size, rows) and errors[job] is None]
        times = {job[2]: seconds(lambda job=job, weights=weights: run(*job, weights)) for job in runnable}
        chosen = gpu.tiling(chip, size[0], size[1], rows, size[2])
        share = f"{floor_s / times[chosen]:.1%}" if chosen in times else "does not run"
        print(f"{text:<12} {rows:>3} rows: rule {share}, cuBLAS {floor_s / cublas_s:.1%}; best", flush=True)
        for tiling in sorted(times, key=times.__getitem__)[:4]:
            description = f"{tiling.outputs}x{tiling.inputs}, {tiling.warps} warps, {tiling.stages} stages"
            print(f"    {floor_s / times[tiling]:.1%}  {description}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
