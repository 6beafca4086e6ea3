"""Which cut of a product reads its weight fastest: candidates beside the rule's choice (`gpu.tiling`) and cuBLAS.

A product is chained over weights of 600 MB and more, in one graph, so that none is in the L2 cache. cuBLAS does the
product alone, ours with the norm before and the activation or residual after it. Kernels are compiled by 14 processes
first.

    python benchmarks/gpu/tilings.py [--sizes 12288x2560 22016x2560g ...] [--rows 1 5]

A size is outputs x inputs; `g` marks a gated product.
"""

import argparse
import os
import statistics
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


def parsed(text: str) -> Size:
    outputs, _, inputs = text.removesuffix("g").partition("x")
    return int(outputs), int(inputs), text.endswith("g")


def candidates(rows: int) -> list[Tiling]:
    """Tiles whose numbers a warp's registers hold, or whose stages fit the shared memory."""
    if rows <= 2:
        cuts = combinations((2, 4, 8), (256, 512, 1024, 2048, 4096), (2, 4, 8), (1, 3))
        return [
            Tiling(*cut, dot=False, lines=16) for cut in cuts if 16 <= rows * cut[0] * cut[1] // (32 * cut[2]) <= 64
        ]
    cuts = combinations((16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 8))
    return [
        Tiling(*cut, dot=True, last=True)
        for cut in cuts
        if 2 <= cut[0] // (4 * cut[2]) <= 8 and 60_000 <= cut[3] * cut[1] * 2 * (cut[0] + max(16, rows)) <= 200_000
    ]


def run(size: Size, rows: int, tiling: Tiling, weights: list[gpu.Weight]) -> torch.Tensor:
    outputs, inputs, gated = size
    x = torch.ones(rows, inputs, device="cuda", dtype=torch.bfloat16)
    norm = gpu.InputNorm(torch.ones(inputs, device="cuda", dtype=torch.bfloat16), 1e-5)
    back = not gated and outputs < 2 * inputs
    residual = torch.ones(rows, outputs, device="cuda", dtype=torch.bfloat16) if back else None
    for weight in weights:
        y = gpu.product(
            x, weight, tiling, norm=None if back else norm, residual=residual,
            activation=gpu.GATED if gated else None, pdl=True,
        )  # fmt: skip
    return y


def compiled(job: tuple[Size, int, Tiling]) -> str | None:
    size, rows, tiling = job
    weight = gpu.Weight(torch.ones(size[0], size[1], device="cuda", dtype=torch.bfloat16))
    try:
        run(size, rows, tiling, [weight])
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory or too many registers: what a sweep is to find out
        return type(error).__name__
    return None


def seconds(call: object) -> float:
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
    given = parser.parse_args()
    chip, bytes_s = gpu.chip(torch.device("cuda")), bandwidth()
    torch.cuda.empty_cache()
    jobs = []
    for text, rows in combinations(given.sizes, given.rows):
        size = parsed(text)
        own = gpu.tiling(chip, size[0], size[1], rows, size[2])
        jobs += [(size, rows, tiling) for tiling in dict.fromkeys([own, *candidates(rows)])]
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), get_context("spawn")) as pool:
        failed = dict(zip(jobs, pool.map(compiled, jobs, chunksize=4), strict=True))
    print(provenance())
    print(f"memory is read with {bytes_s / 1e12:.2f} TB/s; shares of that; {len(jobs)} candidates")
    for text, rows in combinations(given.sizes, given.rows):
        size = parsed(text)
        one = 2 * size[0] * size[1]
        count = int(CHAINED // one) + 2
        weights = [gpu.Weight(torch.randn(size[0], size[1], device="cuda").bfloat16()) for _ in range(count)]
        floor = count * one / bytes_s
        x = torch.ones(rows, size[1], device="cuda", dtype=torch.bfloat16)
        cublas = seconds(lambda weights=weights, x=x: [F.linear(x, weight.matrix) for weight in weights])
        mine = [job for job in jobs if job[:2] == (size, rows) and failed[job] is None]
        found = {job[2]: seconds(lambda job=job, weights=weights: run(*job, weights)) for job in mine}
        own = gpu.tiling(chip, size[0], size[1], rows, size[2])
        taken = f"{floor / found[own]:.1%}" if own in found else "does not run"
        print(f"{text:<12} {rows:>3} rows: rule {taken}, cuBLAS {floor / cublas:.1%}; best", flush=True)
        for tiling in sorted(found, key=found.__getitem__)[:4]:
            cut = f"{tiling.outputs}x{tiling.inputs}, {tiling.warps} warps, {tiling.stages} stages"
            print(f"    {floor / found[tiling]:.1%}  {cut}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
