"""Every draft of the zoo at every lookahead against plain decoding, over the prompts that ship with the package.

Greedy, batch 1, float32 on a CPU. For each prompt all candidates take turns, in a new random order each time, so that
they meet the machine in the same state. The speed-up is the ratio of the sums of decoding time over all prompts, its
interval a bootstrap over prompts. Outputs must be those of plain decoding.

    python benchmarks/zoo.py [--drafts 1x256 2x192] [--lookaheads 1 2 3 4 5] [--new-tokens 64] [--threads 2]
"""

import argparse
from datetime import UTC, datetime
from random import Random

import numpy as np
import torch

import shallowdraft as sd
from shallowdraft.decoding.divergence import explain
from shallowdraft.models import zoo
from shallowdraft.prompts import load_prompts
from shallowdraft.records import commit, processor

Candidate = tuple[str, int]
"""A draft and a lookahead; ("", 0) is plain decoding."""


def measure(args: argparse.Namespace) -> dict[Candidate, list[sd.Statistics]]:
    """Return the statistics of every candidate on every prompt."""
    target = sd.load("zoo:target", device="cpu")
    drafts = {name: sd.load_draft(f"zoo:{name}", args.draft_dtype, "cpu") for name in args.drafts}
    candidates: list[Candidate] = [("", 0), *((name, lookahead) for name in drafts for lookahead in args.lookaheads)]
    statistics: dict[Candidate, list[sd.Statistics]] = {candidate: [] for candidate in candidates}
    for number, prompt in enumerate(load_prompts("zoo")):
        order = Random(number).sample(candidates, len(candidates))
        runs: dict[Candidate, sd.Generation] = {}
        for name, lookahead in order if number else order * 2:  # the first prompt warms up
            options = {"draft": drafts.get(name), "lookahead": max(1, lookahead)}
            runs[name, lookahead] = sd.generate(target, prompt.text, max_new_tokens=args.new_tokens, **options)
        for candidate, run in runs.items():
            difference = explain(target, target.encode(prompt.text), runs["", 0].token_ids, run.token_ids)
            assert difference is None or difference.tie, f"{candidate}: {difference}"
            statistics[candidate].append(run.stats)
    return statistics


def speed_up(plain: list[sd.Statistics], other: list[sd.Statistics]) -> tuple[float, float, float]:
    """Return the ratio of decoding speeds with its 90 % interval."""
    # [2, prompts]: plain decoding, then the candidate
    times = np.array([[stats.total_s - stats.prefill_s for stats in side] for side in (plain, other)])
    tokens = np.array([[stats.tokens for stats in side] for side in (plain, other)])

    def ratio(prompts: np.ndarray) -> float:
        speeds = tokens[:, prompts].sum(1) / times[:, prompts].sum(1)
        return float(speeds[1] / speeds[0])

    draws = np.random.default_rng(0).integers(0, len(plain), (1000, len(plain)))
    low, high = np.quantile([ratio(draw) for draw in draws], (0.05, 0.95))
    return ratio(np.arange(len(plain))), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", nargs="+", default=[name for name in zoo.names() if name != "target"])
    parser.add_argument("--lookaheads", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-dtype", help="float32 or int8; default: that of load_draft")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    statistics = measure(args)
    plain = statistics["", 0]
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}")
    print(f"{args.threads} threads, torch {torch.__version__}, {len(plain)} prompts, {args.new_tokens} tokens each")
    total = sd.total(plain, one_batch=False)
    print(f"plain decoding: {total.decode_tokens_per_s:.0f} tokens/s; outputs of all candidates are the same")
    print(f"{'draft':<16}{'lookahead':>10}{'TAR':>7}{'draft ms':>10}{'verify ms':>10}{'tokens/s':>10}  speed-up (90 %)")
    for (name, lookahead), stats in list(statistics.items())[1:]:
        total = sd.total(stats, one_batch=False)
        ratio, low, high = speed_up(plain, stats)
        times = "".join(f"{seconds / total.iterations * 1e3:>10.2f}" for seconds in (total.draft_s, total.verify_s))
        speed = f"{total.decode_tokens_per_s:>10.0f}"
        print(f"{name:<16}{lookahead:>10}{total.tar:>7.2f}{times}{speed}  {ratio:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
