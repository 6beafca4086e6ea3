"""Plain and speculative decoding at batch 1 against the memory floor, on pairs whose agreement is known.

The floor of an iteration: every weight of the target but the input embedding is read once, those of the draft once a
step, at the bandwidth that was measured in the same run. The output is compared with the known one.

    python benchmarks/gpu/decoding.py [--pairs 7b-wide 7b-deep] [--rounds 7]
"""

import argparse
import statistics

import torch
from floor import bandwidth, provenance, spread

import shallowdraft as sd
from shallowdraft.models.synthetic import Pair, make_pair
from shallowdraft.shapes import ModelShape

TARGET = ModelShape(32, 4096, 32, 11008, 32000, context=4096)
PAIRS = {
    "7b-wide": (TARGET, ModelShape(5, 4096, 32, 11008, 32000, context=4096)),
    "7b-deep": (TARGET, ModelShape(24, 2048, 16, 5504, 32000, context=4096)),
}
PROMPT, NEW, LOOKAHEAD, AGREEMENT = 64, 256, 4, 0.8


def measure(pair: Pair, draft: sd.Model | None, rounds: int) -> tuple[list[float], list[float], float]:
    """Tokens a second and milliseconds an iteration of each round, and tokens an iteration."""
    speeds, lengths, tar = [], [], 1.0
    for number in range(rounds + 2):
        prompt = [(7 * number + one) % 32000 for one in range(PROMPT)]
        out = sd.generate(pair.target, prompt, draft=draft, lookahead=LOOKAHEAD, max_new_tokens=NEW, stop_tokens=())
        assert out.token_ids == pair.walk(prompt[-1], NEW), "the output is not the known one"
        if number >= 2:  # the first runs the kernels, the second captures
            seconds = out.stats.total_s - out.stats.prefill_s
            speeds.append(out.stats.emitted / seconds)
            lengths.append(1e3 * seconds / out.stats.iterations)
            tar = out.stats.tar
    return speeds, lengths, tar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    print(provenance())
    print(f"memory is read with {bytes_s / 1e12:.2f} TB/s; prompt {PROMPT}, {NEW} tokens, lookahead {LOOKAHEAD}, bf16")
    print("median (smallest to largest) of the rounds\n")
    for name in given.pairs:
        shapes = PAIRS[name]
        pair = make_pair(*shapes, AGREEMENT, device="cuda", dtype=torch.bfloat16)
        for model in (pair.target, pair.draft):
            model.decoder.pack()
            assert model.decoder.fused is not None, "a kernel fell back"
        target_s, draft_s = (shape.pass_bytes("bfloat16") / bytes_s for shape in shapes)
        for way, draft, floor_s in (
            ("plain", None, target_s),
            ("speculative", pair.draft, target_s + LOOKAHEAD * draft_s),
        ):
            speeds, lengths, tar = measure(pair, draft, given.rounds)
            share = floor_s / (statistics.median(lengths) / 1e3)
            print(
                f"{name:<8} {way:<12} {spread(speeds)} tokens/s, {spread(lengths, 3)} ms an iteration, "
                f"floor {1e3 * floor_s:.3f} ms: {share:.1%} of it; {tar:.2f} tokens an iteration",
                flush=True,
            )
        del pair
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
