"""One draft step in a CUDA graph, by three implementations: PyTorch's operations, torch.compile on them, our kernels.

python benchmarks/gpu/compiled.py [--shape 5x4096/32h/11008] [--mode max-autotune-no-cudagraphs]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from random import Random

import torch
from depth import CONTEXT, random_weights
from floor import bandwidth, provenance, timed
from torch import Tensor

from shallowdraft.shapes.notation import parse_shape


def graph_of(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, float]:
    """Capture the step in a CUDA graph; return the graph and the seconds of warm-up and capture."""
    begin_s = time.perf_counter()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="5x4096/32h/11008")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs")
    args = parser.parse_args()
    shape = parse_shape(args.shape, vocab=32000)
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    decoder = random_weights(shape)
    cache = decoder.new_cache(1, 512)
    tokens, positions = torch.ones(1, 1, dtype=torch.int64, device="cuda"), torch.full((1, 1), CONTEXT, device="cuda")

    def unfused() -> Tensor:
        hidden = decoder.layers(decoder.embed(tokens), positions, cache, 512)
        token: Tensor = decoder.head(hidden).argmax(-1)
        return token

    def ours() -> Tensor:
        return decoder.choose(tokens, positions, cache, 512, shape.vocab)[1]

    steps = {"PyTorch": unfused, "torch.compile": torch.compile(unfused, mode=args.mode), "our kernels": ours}
    with torch.inference_mode():
        graphs = {name: graph_of(step) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(5):  # they take turns, in random order
            for name in Random(number).sample(list(graphs), len(graphs)):
                times[name] += timed(graphs[name][0].replay, 5)
    print(provenance())
    floor = shape.pass_bytes("bfloat16") / bytes_s
    print(f"{shape}, one token after {CONTEXT}; floor {1e3 * floor:.3f} ms at {bytes_s / 1e12:.2f} TB/s")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(
            f"  {name:<14} {1e3 * middle:.3f} ms ({1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f}), "
            f"{floor / middle:.1%} of the floor; captured after {graphs[name][1]:.1f} s"
        )


if __name__ == "__main__":
    main()
