"""Plain and speculative decoding at batch 1 against the memory floor, on synthetic pairs of known agreement.

The floor of an iteration is the time to read every weight of the target except the input embedding once, and those of
the draft once per step, at the bandwidth measured in the same run. The output must be the text that the pair is built
to write.

    python benchmarks/gpu/decoding.py [--pairs 7b-wide 7b-deep] [--rounds 7]
"""

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # 65B fits only without fragmentation
import torch
from floor import bandwidth, provenance, spread

import shallowdraft as sd
from shallowdraft.models.synthetic import SyntheticPair, make_pair
from shallowdraft.shapes.shape import ModelShape

SIZE = {"vocab": 32000, "context": 4096}
LLAMA_7B = ModelShape(32, 4096, 32, 11008, **SIZE)
LLAMA_65B = ModelShape(80, 8192, 64, 22016, **SIZE)
SHEARED = ModelShape(24, 2048, 16, 5504, **SIZE)
WIDE_796M = ModelShape(5, 2560, 32, 11008, head_dim=128, **SIZE)


@dataclass(frozen=True)
class SyntheticCase:
    """A pair of shapes to measure."""

    target: ModelShape
    draft: ModelShape
    lookahead: int
    paper_tar: float | None = None
    """TAR of Wide-796M with LLaMA-65B on MMLU, from the paper's Table 3; it gives Sheared-1.3B's in a figure only."""


CASES = {
    "7b-wide": SyntheticCase(LLAMA_7B, ModelShape(5, 4096, 32, 11008, **SIZE), 4),
    "7b-deep": SyntheticCase(LLAMA_7B, SHEARED, 4),
    "65b-wide": SyntheticCase(LLAMA_65B, WIDE_796M, 7, 2.66),
    "65b-deep": SyntheticCase(LLAMA_65B, SHEARED, 7, 2.66),
}
PROMPT, NEW, AGREEMENT = 64, 256, 0.8


@dataclass(frozen=True)
class Round:
    """Seconds per iteration and of its parts, tokens per second, and TAR."""

    iteration_s: float
    draft_s: float
    verify_s: float
    tokens_per_s: float
    tar: float


def measure(pair: SyntheticPair, draft: sd.Model | None, lookahead: int, rounds: int) -> list[Round]:
    """Decode a new prompt in each round, after two rounds of warm-up."""
    measured = []
    for number in range(rounds + 2):
        prompt = [(7 * number + position) % SIZE["vocab"] for position in range(PROMPT)]
        out = sd.generate(pair.target, prompt, draft=draft, lookahead=lookahead, max_new_tokens=NEW, stop_tokens=())
        assert out.token_ids == pair.walk(prompt[-1], NEW), "the output is not the expected text"
        stats = out.stats
        seconds = stats.total_s - stats.prefill_s
        per_iteration = (total_s / stats.iterations for total_s in (seconds, stats.draft_s, stats.verify_s))
        measured.append(Round(*per_iteration, stats.emitted / seconds, stats.tar))
    return measured[2:]  # the first round compiles the kernels, the second captures the graphs


def report(name: str, rounds: list[Round], steps: int, target_s: float, draft_s: float) -> str:
    """Describe rounds beside their floors: `target_s` for a verification pass, `draft_s` for a draft step."""

    def middle(field: str) -> float:
        return statistics.median(getattr(measured, field) for measured in rounds)

    floor_s = target_s + steps * draft_s
    lines = [
        f"{name}: {spread([measured.tokens_per_s for measured in rounds])} tokens/s, TAR {middle('tar'):.2f}, "
        f"iteration {spread([1e3 * measured.iteration_s for measured in rounds], 3)} ms; floor {1e3 * floor_s:.3f} ms: "
        f"{floor_s / middle('iteration_s'):.1%}"
    ]
    verified = f"verification {1e3 * middle('verify_s'):.3f} ms, {target_s / middle('verify_s'):.1%} of its floor"
    if steps:
        verified = (
            f"drafting {1e3 * middle('draft_s'):.3f} ms, {steps * draft_s / middle('draft_s'):.1%} of its floor; "
        ) + verified
    rest = middle("iteration_s") - middle("draft_s") - middle("verify_s")
    return "\n  ".join([*lines, f"{verified}; the rest {1e3 * rest:.3f} ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["7b-wide", "7b-deep"], choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    print(provenance())
    print(f"memory is read at {bytes_s / 1e12:.2f} TB/s; prompt {PROMPT}, {NEW} tokens, bf16; medians (min to max)\n")
    for name in args.pairs:
        case = CASES[name]
        pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
        for model in (pair.target, pair.draft):
            assert model.decoder.pack().fused is not None, "the fused kernels cannot run this shape"
        target_s, draft_s = (shape.pass_bytes("bfloat16") / bytes_s for shape in (case.target, case.draft))
        begin_s = time.perf_counter()
        sd.generate(pair.target, [1] * PROMPT, draft=pair.draft, lookahead=case.lookahead, max_new_tokens=NEW)
        print(f"{name}: the first use took {time.perf_counter() - begin_s:.1f} s, with compilation and graph capture")
        plain = measure(pair, None, 1, args.rounds)
        print(report(f"{name} {case.target}, plain", plain, 0, target_s, draft_s), flush=True)
        rounds = measure(pair, pair.draft, case.lookahead, args.rounds)
        title = f"{name} with {case.draft}, lookahead {case.lookahead}"
        print(report(title, rounds, case.lookahead, target_s, draft_s), flush=True)
        if case.paper_tar:
            iteration_s = statistics.median(measured.iteration_s for measured in rounds)
            print(f"  at TAR {case.paper_tar}, the paper's with Wide-796M: {case.paper_tar / iteration_s:.1f} tokens/s")
        del pair
        gc.collect()  # a model and its cached engines refer to each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
