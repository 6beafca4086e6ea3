"""Predicted against live speed-up: every draft of the zoo, several sets of prompts, every lookahead.

Acceptance comes from replaying a trace, times from a profile that another process wrote before. Each live run takes
place between two runs of plain decoding, so that all three meet the machine in the same state. The speed-up is the
ratio to these plain runs, and it is predicted for the speed that plain decoding had in them. Greedy, batch 1.

    python benchmarks/prediction.py [--sets zoo gsm8k hellaswag] [--prompts 12] [--lookaheads 8] [--out DIR]

With --out the records are kept, and an interrupted benchmark continues from them.
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
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.trace import Trace
from shallowdraft.studying.forecast import forecast_in_states
from shallowdraft.studying.live import LiveResult, measured, run_live


def record_trace(target: sd.Model, prompt_set: str, args: argparse.Namespace, folder: Path) -> Trace:
    """Record the target's output after the first short prompts of a set."""
    short = [prompt for prompt in load_prompts(prompt_set) if len(prompt.text) < args.characters]
    prompts = [(prompt_set, prompt) for prompt in short[: args.prompts]]
    out = folder / f"{prompt_set}.jsonl"
    return sd.record(target, prompts, out, max_new_tokens=args.new_tokens, progress=False)


def profile_drafts(args: argparse.Namespace, folder: Path) -> Profile:
    """Profile the target and its drafts in another process."""
    path = folder / "profile.jsonl"
    command = [sys.executable, "-m", "shallowdraft", "profile", "--target", "zoo:target", "--out", str(path)]
    command += ["--drafts", *(f"zoo:{name}" for name in args.drafts)]
    command += ["--lookaheads", f"1:{args.lookaheads}", "--rounds", str(args.rounds)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_profile(path)


def measure_live(
    target: sd.Model, drafts: dict[str, sd.Model], trace: Trace, args: argparse.Namespace, path: Path
) -> dict[Candidate, LiveResult]:
    """Run every draft live at every lookahead; return the results that count."""
    candidates = [Candidate.with_draft(draft, d) for draft in drafts.values() for d in range(1, args.lookaheads + 1)]
    size = {"max_new_tokens": args.new_tokens, "rounds": args.live_rounds}
    for _ in run_live(target, draft_options(drafts), candidates, trace.outputs, path, **size, about={}):
        pass
    results = measured(path, trace.outputs, candidates)
    if results.stalled:
        print(f"prompts left out because the machine stalled: {', '.join(map(' '.join, results.stalled))}", flush=True)
    for candidate, result in results.impossible.items():
        speed = result.speed
        print(
            f"{candidate.draft} at lookahead {candidate.lookahead} is left out: its speed-up of {speed.speed_up:.3f} "
            f"exceeds its TAR of {speed.tar:.3f}, which is impossible"
        )
    return results.by_candidate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["zoo", "gsm8k", "hellaswag"])
    parser.add_argument("--drafts", nargs="+", default=[name for name in zoo.names() if name != "target"])
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each set")
    parser.add_argument("--characters", type=int, default=600, help="prompts of this length and more are left out")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lookaheads", type=int, default=8, help="the largest lookahead")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of the profile")
    parser.add_argument("--live-rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the records")
    args = parser.parse_args()
    target = sd.load("zoo:target", device="cpu")
    drafts = {f"zoo:{name}": sd.load_draft(f"zoo:{name}", device="cpu") for name in args.drafts}
    errors: dict[tuple[str, str, int], float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        profile = profile_drafts(args, folder)
        print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {processor()}; {args.prompts} prompts a set")
        print(f"{'set':<12}{'draft':<20}" + "".join(f"{f'd={d}':>14}" for d in range(1, args.lookaheads + 1)))
        for prompt_set in args.sets:
            trace = record_trace(target, prompt_set, args, folder)
            runs = measure_live(target, drafts, trace, args, folder / f"{prompt_set}-live.jsonl")
            for draft, model in drafts.items() if runs else ():
                replay, cells = sd.replay(trace, [model]).drafts[0].replay, []
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
    magnitudes = np.abs(list(errors.values()))
    worst = max(errors, key=lambda key: abs(errors[key]))
    bias = float(np.median(list(errors.values())))
    print("each cell: predicted speed-up, measured speed-up")
    middle, high = np.median(magnitudes), np.quantile(magnitudes, 0.9)
    print(f"relative error over {len(errors)} points: median {middle:.1%}, 90 % below {high:.1%}")
    print(f"worst {errors[worst]:+.1%} at {worst}; signed median {bias:+.1%}")


if __name__ == "__main__":
    main()
