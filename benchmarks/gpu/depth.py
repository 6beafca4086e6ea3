"""A draft's latency by depth and width, with CUDA graphs and fused kernels: the paper's Figure 4 and Table 6.

Eight draft steps run in one graph; batch 1, 128 tokens of context, bf16. Table 6's shapes are timed with the norm
before attention and MLP, as in other OPT models; OPT-350M's own order has no fused kernels. A latency model
is fitted to all shapes.

    python benchmarks/gpu/depth.py [--csv FILE]
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from floor import bandwidth, provenance, timed

from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.shape import ModelShape

STEPS, CONTEXT = 8, 128
SIZE = {"vocab": 32000, "context": 2048}


def families() -> dict[str, list[ModelShape]]:
    """Return shapes of Figure 4 a, b and c for a LLaMA-7B parent, of Table 6, and of the paper's pruned LLaMAs."""
    widths = ((24, 2048, 16, 5504), (12, 2880, 20, 7936), (6, 4096, 32, 11008), (3, 5760, 40, 15872))
    named = ["opt-350m", *(f"opt-350m-{layers}l" for layers in (20, 16, 12, 8, 4))]
    pruned = ("noft-wide-1.3b", "noft-wide-796m", "noft-wide-543m", "noft-wide-290m")
    return {
        "4a: equal weights in layers": [ModelShape(*size, **SIZE) for size in widths],
        "4b: depth at d_model 2048": [ModelShape(n, 2048, 16, 5504, **SIZE) for n in (1, 2, 4, 8, 16, 24, 32)],
        "4c: width at 4 layers": [
            ModelShape(4, width, width // 128, 43 * width // 16, **SIZE) for width in (512, 1024, 2048, 4096, 8192)
        ],
        "table 6": [replace(NAMED[name], post_norm=False, final_norm=True, embed_dim=0) for name in named],
        "table 1": [ModelShape(24, 2048, 16, 5504, **SIZE), *(NAMED[name] for name in pruned)],
    }


def random_weights(shape: ModelShape) -> Decoder:
    """Return a decoder with random weights and fused kernels on the GPU."""
    with torch.device("meta"):
        decoder = Decoder(shape)
    decoder = decoder.to_empty(device="cuda").to(torch.bfloat16).requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
    assert decoder.pack().fused is not None, "the fused kernels cannot run this shape"
    return decoder


def step_s(shape: ModelShape) -> list[float]:
    """Time a draft step several times."""
    decoder = random_weights(shape)
    cache = decoder.new_cache(1, 512)
    tokens, positions = torch.ones(1, 1, dtype=torch.int64, device="cuda"), torch.full((1, 1), CONTEXT, device="cuda")
    with torch.inference_mode():

        def steps() -> None:
            decoder.decode(tokens, positions, cache, 512, STEPS, shape.vocab)

        steps()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
    return [seconds / STEPS for seconds in timed(graph.replay, 15)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    print(provenance())
    print(f"memory is read at {bytes_s / 1e12:.2f} TB/s\n")
    rows = []
    for family, shapes in families().items():
        print(family)
        for shape in shapes:
            times = step_s(shape)
            median_s, floor_s = statistics.median(times), shape.pass_bytes("bfloat16") / bytes_s
            rows.append((family, str(shape), shape.layers, shape.pass_parameters, median_s, floor_s))
            print(
                f"  {shape!s:<28} {shape.pass_parameters / 1e6:8.0f} M  {1e6 * median_s:8.1f} us a step "
                f"({1e6 * min(times):.1f} to {1e6 * max(times):.1f})  {floor_s / median_s:6.1%} of the floor",
                flush=True,
            )
            torch.cuda.empty_cache()
    features = np.array([[1.0, layers, floor_s] for _, _, layers, _, _, floor_s in rows])  # [shapes, 3]
    measured_s = np.array([row[4] for row in rows])
    # Least squares on relative errors
    coefficients, *_ = np.linalg.lstsq(features / measured_s[:, None], np.ones(len(measured_s)), rcond=None)
    errors = features @ coefficients / measured_s - 1
    start, layer, reading = coefficients
    print(
        f"\nlatency model: {1e6 * start:.1f} us a step + {1e6 * layer:.2f} us a layer + {reading:.2f} times the floor; "
        f"typically {np.median(np.abs(errors)):.1%} off, {np.abs(errors).max():.1%} at worst"
    )
    for (family, name, *_), error in zip(rows, errors, strict=True):
        print(f"  {family[:8]:<10} {name:<28} {error:+.1%}")
    if args.csv:
        lines = [f"{family},{name},{layers},{weights},{s:.9f},{f:.9f}" for family, name, layers, weights, s, f in rows]
        args.csv.write_text("\n".join(["family,shape,layers,weights,step_s,floor_s", *lines]) + "\n")


if __name__ == "__main__":
    main()
