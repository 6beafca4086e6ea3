"""Predicted against live throughput: every draft of the zoo, several sets of prompts, every lookahead.

Acceptance comes from replaying a trace, times from a profile that another process wrote before. Live, each run is
between two of plain decoding, so that they meet the same machine; both sides are ratios to it, and the prediction is
the one for its speed. Greedy, batch 1.

    python benchmarks/prediction.py [--sets zoo gsm8k hellaswag] [--prompts 12] [--lookaheads 8] [--out DIR]

With --out the records stay, and a second run goes on where the first one stopped.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shallowdraft as sd
from shallowdraft.decoding.candidate import draft_options
from shallowdraft.models import zoo
from shallowdraft.prompts import load_prompts
from shallowdraft.records import commit, processor
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.recording import record
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace, read_trace
from shallowdraft.studying.forecast import forecast_in_states
from shallowdraft.studying.live import LiveResult, measured, run_live


def traced(target: sd.Model, name: str, args: argparse.Namespace, folder: Path) -> Trace:
    prompts = [prompt for prompt in load_prompts(name) if len(prompt.text) < args.characters][: args.prompts]
    steps = record(
        target,
        [(name, prompt) for prompt in prompts],
        folder / f"{name}.jsonl",
        max_new_tokens=args.new_tokens,
        sampling=Sampling(),
    )
    for _ in steps:
        pass
    return read_trace(folder / f"{name}.jsonl")


def profiled(args: argparse.Namespace, folder: Path) -> Profile:
    """Profile in another process."""
    path = folder / "profile.jsonl"
    lookaheads = [str(d) for d in range(1, args.lookaheads + 1)]
    command = [sys.executable, "-m", "shallowdraft", "profile", "--target", "zoo:target", "--out", str(path)]
    command += ["--draft", *(f"zoo:{name}" for name in args.drafts), "--lookaheads", *lookaheads]
    subprocess.run([*command, "--rounds", str(args.rounds)], check=True, stdout=subprocess.DEVNULL)
    return read_profile(path)


def live(
    target: sd.Model, drafts: dict[str, sd.Model], trace: Trace, args: argparse.Namespace, path: Path
) -> dict[Candidate, LiveResult]:
    candidates = [Candidate.with_draft(draft, d) for draft in drafts.values() for d in range(1, args.lookaheads + 1)]
    size = {"max_new_tokens": args.new_tokens, "rounds": args.live_rounds}
    for _ in run_live(target, draft_options(drafts), candidates, trace.outputs, path, **size, about={}):
        pass
    results = measured(path, trace.outputs, candidates)
    if results.stalled:
        print(f"the machine stalled on {', '.join(map(' '.join, results.stalled))}: left out", flush=True)
    for candidate, result in results.impossible.items():
        speed = result.speed
        print(
            f"{candidate.draft} at {candidate.lookahead}: {speed.speed_up:.3f}x is above its TAR of {speed.tar:.3f}, "
            "which is impossible: left out"
        )
    return results.by_candidate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["zoo", "gsm8k", "hellaswag"])
    parser.add_argument("--drafts", nargs="+", default=[name for name in zoo.names() if name != "target"])
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--characters", type=int, default=600, help="longer prompts are left out")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lookaheads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="of the profile")
    parser.add_argument("--live-rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the records")
    args = parser.parse_args()
    target = sd.load("zoo:target", device="cpu")
    drafts = {f"zoo:{name}": sd.load_draft(f"zoo:{name}", device="cpu") for name in args.drafts}
    errors: dict[tuple[str, str, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = args.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        profile = profiled(args, folder)
        print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {processor()}; {args.prompts} prompts a set")
        print(f"{'set':<12}{'draft':<20}" + "".join(f"{f'd={d}':>14}" for d in range(1, args.lookaheads + 1)))
        for prompt_set in args.sets:
            trace = traced(target, prompt_set, args, folder)
            runs = live(target, drafts, trace, args, folder / f"{prompt_set}-live.jsonl")
            for draft, model in drafts.items() if runs else ():
                replay, cells = replay_model(model, trace), []
                for d in range(1, args.lookaheads + 1):
                    run = runs.get(Candidate.with_draft(model, d))
                    if run is None:
                        cells.append(f"{'impossible':>14}")
                        continue
                    predicted = forecast_in_states(replay, profile, d, run.states)
                    assert run.speed.lossless
                    assert abs(run.speed.tar - predicted.tar) < 1e-9
                    errors[prompt_set, draft, d] = predicted.speed_up / run.speed.speed_up - 1
                    cells.append(f"{predicted.speed_up:>7.2f} {run.speed.speed_up:>6.2f}")
                print(f"{prompt_set:<12}{draft:<20}" + "".join(cells), flush=True)
    sizes = np.abs(list(errors.values()))
    worst = max(errors, key=lambda key: abs(errors[key]))
    bias = float(np.median(list(errors.values())))
    print("predicted, then measured speed-up")
    print(f"error over {len(errors)} points: median {np.median(sizes):.1%}, 90 % below {np.quantile(sizes, 0.9):.1%}")
    print(f"worst {errors[worst]:+.1%} at {worst}; median with sign {bias:+.1%}")


if __name__ == "__main__":
    main()
