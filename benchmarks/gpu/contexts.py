"""Tokens per second and share of the memory floor by batch and context; the floor includes reads of the KV cache.

python benchmarks/gpu/contexts.py [--batches 1 2 4 8 16] [--contexts 128 1024 4096 16384] [--csv FILE]
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from decoding import AGREEMENT, CASES
from floor import bandwidth, provenance, timed

from shallowdraft.decoding.drafters.drafter import NoDrafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.models.synthetic import make_pair
from shallowdraft.runs.sampling import Sampling

PAIR, ITERATIONS = "7b-wide", 20
ROOM = 130e9  # bytes of memory for weights and KV caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096, 16384])
    parser.add_argument("--csv", type=Path, help="also write the shares to this file")
    args = parser.parse_args()
    case = CASES[PAIR]
    longest = max(args.contexts) + 1024
    target, draft = (replace(shape, context=longest) for shape in (case.target, case.draft))
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    pair = make_pair(target, draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        assert model.decoder.pack().fused is not None, "the fused kernels cannot run this shape"
    weights = [shape.pass_bytes("bfloat16") for shape in (target, draft)]
    per_token = [shape.kv_bytes_per_token("bfloat16") for shape in (target, draft)]
    print(provenance())
    print(f"{PAIR}, lookahead {case.lookahead}; memory is read at {bytes_s / 1e12:.2f} TB/s")
    print(f"{'batch':>6} {'context':>8} {'decoding':<12} {'ms':>8} {'floor':>8} {'share':>7} {'tokens/s':>9}")
    shares: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for batch in args.batches:
        for context in args.contexts:
            if sum(weights) + batch * (context + 300) * sum(per_token) > ROOM:
                print(f"{batch:>6} {context:>8} does not fit in memory")
                continue
            prompts = [[(row + position) % target.vocab for position in range(context)] for row in range(batch)]
            limits = [context + 3 * (case.lookahead + 1) * ITERATIONS] * batch
            for decoding, steps in (("plain", 0), ("speculative", case.lookahead)):
                drafter = ModelDrafter(pair.draft.decoder, steps, Sampling(), target.vocab) if steps else NoDrafter()
                engine = Engine.for_prompts(pair.target.decoder, drafter, Sampling(), prompts, limits)
                engine.prefill()
                for _ in range(3):
                    engine.iterate()
                before = engine.state.length.float().mean().item()
                iteration_s = statistics.median(timed(lambda engine=engine: engine.iterate(), ITERATIONS))
                # timed() runs two more iterations to warm up
                tar = (engine.state.length.float().mean().item() - before) / (ITERATIONS + 2)
                caches = [batch * context * token_bytes for token_bytes in per_token]
                target_bytes, draft_bytes = (sum(parts) for parts in zip(weights, caches, strict=True))
                floor_s = (target_bytes + steps * draft_bytes) / bytes_s
                shares.setdefault((decoding, batch), []).append((context, floor_s / iteration_s))
                print(
                    f"{batch:>6} {context:>8} {decoding:<12} {1e3 * iteration_s:8.3f} {1e3 * floor_s:8.3f} "
                    f"{floor_s / iteration_s:7.1%} {batch * tar / iteration_s:9.1f}",
                    flush=True,
                )
                del engine
                torch.cuda.empty_cache()
    if args.csv:
        lines = ["way,batch,context,share"]
        for (decoding, batch), by_context in shares.items():
            lines += [f"{decoding},{batch},{context},{share:.4f}" for context, share in by_context]
        args.csv.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
