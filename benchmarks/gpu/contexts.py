"""Tokens a second and share of the floor by batch and context; the floor counts the cache that is read too.

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
ROOM = 130e9  # bytes of memory for weights and caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096, 16384])
    parser.add_argument("--csv", type=Path, help="write the shares to this file too")
    given = parser.parse_args()
    case = CASES[PAIR]
    longest = max(given.contexts) + 1024
    target, draft = (replace(shape, context=longest) for shape in (case.target, case.draft))
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    pair = make_pair(target, draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        assert model.decoder.pack().fused is not None, "a kernel fell back"
    weights = [shape.pass_bytes("bfloat16") for shape in (target, draft)]
    per_token = [shape.kv_bytes_per_token("bfloat16") for shape in (target, draft)]
    print(provenance())
    print(f"{PAIR}, lookahead {case.lookahead}; memory is read with {bytes_s / 1e12:.2f} TB/s")
    print(f"{'batch':>6} {'context':>8} {'way':<12} {'ms':>8} {'floor':>8} {'share':>7} {'tokens/s':>9}")
    shares: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for batch in given.batches:
        for context in given.contexts:
            if sum(weights) + batch * (context + 300) * sum(per_token) > ROOM:
                print(f"{batch:>6} {context:>8} does not fit the memory")
                continue
            prompts = [[(row + one) % target.vocab for one in range(context)] for row in range(batch)]
            limits = [context + 3 * (case.lookahead + 1) * ITERATIONS] * batch
            for way, steps in (("plain", 0), ("speculative", case.lookahead)):
                drafter = ModelDrafter(pair.draft.decoder, steps, Sampling(), target.vocab) if steps else NoDrafter()
                engine = Engine.for_prompts(pair.target.decoder, drafter, Sampling(), prompts, limits)
                engine.prefill()
                for _ in range(3):
                    engine.iterate()
                before = engine.state.length.float().mean().item()
                took = statistics.median(timed(lambda engine=engine: engine.iterate(), ITERATIONS))
                grown = (engine.state.length.float().mean().item() - before) / (ITERATIONS + 2)
                reads = [one + batch * context * cache for one, cache in zip(weights, per_token, strict=True)]
                floor = (reads[0] + steps * reads[1]) / bytes_s
                shares.setdefault((way, batch), []).append((context, floor / took))
                print(
                    f"{batch:>6} {context:>8} {way:<12} {1e3 * took:8.3f} {1e3 * floor:8.3f} {floor / took:7.1%} "
                    f"{batch * grown / took:9.1f}",
                    flush=True,
                )
                del engine
                torch.cuda.empty_cache()
    if given.csv:
        lines = [f"{way},{batch},{c},{share:.4f}" for (way, batch), at in shares.items() for c, share in at]
        given.csv.write_text("\n".join(["way,batch,context,share", *lines]) + "\n")


if __name__ == "__main__":
    main()
