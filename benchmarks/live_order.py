"""Live speed-ups of the same candidates in two opposite orders, beside a busy process: do they agree?

One core is busy half of the time, 100 ms on and 100 ms off. Two series of live runs, as a study makes them, take turns
prompt by prompt. For each prompt and round, one series runs the candidates in the reverse order of the other. Speed-ups
agree if their 95 % intervals overlap. Greedy, batch 1, the zoo on a CPU.

    python benchmarks/live_order.py [--set zoo] [--prompts 24] [--rounds 2] [--out DIR]

With --out the records are kept, and an interrupted benchmark continues from them. --calm omits the busy process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # as the command does
import torch

import shallowdraft as sd
from shallowdraft.decoding.candidate import draft_options
from shallowdraft.records import commit, processor
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.study import LiveSpeed
from shallowdraft.studying.live import LiveResults, measured, run_live

NGRAM = Candidate("n-gram", 8, "ngram")
SLICE_S = 0.1
BUSY = """
import time
while True:
    until_s = time.perf_counter() + {slice_s}
    while time.perf_counter() < until_s:
        pass
    time.sleep({slice_s})
"""


@contextmanager
def busy() -> Iterator[None]:
    """Keep one core busy half of the time."""
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(slice_s=SLICE_S)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def calm() -> Iterator[None]:
    """Keep no core busy."""
    yield


def both_orders(
    target: sd.Model, candidates: list[Candidate], args: argparse.Namespace, folder: Path
) -> list[LiveResults]:
    """Run the candidates live in both orders, and return the results of each."""
    drafts = {
        candidate.draft: sd.load_draft(candidate.draft, device="cpu") for candidate in candidates if candidate != NGRAM
    }
    proposers = draft_options(drafts) | {("ngram", NGRAM.draft): {"drafter": "ngram"}}
    tokens = {"max_new_tokens": args.new_tokens}
    trace = sd.record(target, args.set, folder / "trace.jsonl", limit=args.prompts, **tokens, progress=False)
    size = {**tokens, "rounds": args.rounds}
    orders = {folder / "one.jsonl": candidates, folder / "other.jsonl": candidates[::-1]}
    with calm() if args.calm else busy():
        steps = [
            run_live(target, proposers, order, trace.outputs, path, **size, about={}) for path, order in orders.items()
        ]
        for _ in zip_longest(*steps):
            pass
    return [measured(path, trace.outputs, candidates) for path in orders]


def format_speed(speed: LiveSpeed | None) -> str:
    if speed is None:
        return "impossible"
    low, high = speed.interval
    return f"{speed.speed_up:.2f}x ({low:.2f} to {high:.2f})"


def agree(first: LiveSpeed | None, second: LiveSpeed | None) -> bool:
    """Return whether both were measured, and their intervals overlap."""
    if first is None or second is None:
        return False
    return max(first.interval[0], second.interval[0]) <= min(first.interval[1], second.interval[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="zoo")
    parser.add_argument("--drafts", nargs="+", default=["1x256", "2x192", "4x128"], help="drafts of the zoo")
    parser.add_argument("--lookahead", type=int, default=2, help="lookahead of the drafts; that of n-grams is 8")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calm", action="store_true", help="run without the busy process")
    parser.add_argument("--out", type=Path, help="folder for the records")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    candidates = [NGRAM, *(Candidate(f"zoo:{name}", args.lookahead) for name in args.drafts)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        runs = both_orders(sd.load("zoo:target", device="cpu"), candidates, args, folder)
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}, torch {torch.__version__}")
    load = "no busy process" if args.calm else "one core is busy half of the time"
    print(f"{args.prompts} prompts of {args.set}, {args.rounds} rounds, {args.threads} threads; {load}")
    print(f"{'candidate':<20}{'TAR':>6}  {'first order (95 %)':<24}{'reverse order':<24}agree")
    agreements = []
    for candidate in candidates:
        results = [run.by_candidate.get(candidate) for run in runs]
        first, second = (result.speed if result else None for result in results)
        agreements.append(agree(first, second))
        tar = next((speed.tar for speed in (first, second) if speed), float("nan"))
        name = f"{candidate.draft}, d = {candidate.lookahead}"
        speeds = f"{format_speed(first):<24}{format_speed(second):<24}"
        print(f"{name:<20}{tar:>6.2f}  {speeds}{'yes' if agreements[-1] else 'NO'}")
    for order, run in zip(("first order", "reverse order"), runs, strict=True):
        print(f"prompts on which the machine stalled, {order}: {', '.join(map(' '.join, run.stalled)) or 'none'}")
    return int(not all(agreements))


if __name__ == "__main__":
    sys.exit(main())
