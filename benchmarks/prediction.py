"""Predicted against live throughput: every draft of the zoo, several sets of prompts, every lookahead.

Acceptance comes from replaying a trace, times from a profile that another process wrote before. Live, all ways take
turns on every prompt, so that they meet the same machine; both sides are ratios to plain decoding. Greedy, batch 1.

    python benchmarks/prediction.py [--sets zoo gsm8k hellaswag] [--prompts 12] [--lookaheads 8] [--profile FILE]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shallowdraft as sd
from shallowdraft import cost
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.models import zoo
from shallowdraft.profiling.latency import Profile, read_profile
from shallowdraft.prompts import load_prompts
from shallowdraft.records import commit, processor
from shallowdraft.replay.acceptance import Replay, replay
from shallowdraft.replay.traces import Trace, read_trace, record

Way = tuple[str, int]


def traced(target: sd.Model, name: str, given: argparse.Namespace, folder: Path) -> Trace:
    prompts = [prompt for prompt in load_prompts(name) if len(prompt.text) < given.characters][: given.prompts]
    steps = record(
        target,
        [(name, prompt) for prompt in prompts],
        folder / f"{name}.jsonl",
        max_new_tokens=given.new_tokens,
        sampling=Sampling(),
    )
    for _ in steps:
        pass
    return read_trace(folder / f"{name}.jsonl")


def profiled(given: argparse.Namespace, folder: Path) -> Profile:
    """By another process."""
    path = given.profile or folder / "profile.jsonl"
    lookaheads = [str(d) for d in range(1, given.lookaheads + 1)]
    command = [sys.executable, "-m", "shallowdraft", "profile", "--target", "zoo:target", "--out", str(path)]
    command += ["--draft", *(f"zoo:{name}" for name in given.drafts), "--lookaheads", *lookaheads]
    subprocess.run([*command, "--rounds", str(given.rounds)], check=True, stdout=subprocess.DEVNULL)
    return read_profile(path)


def live(target: sd.Model, drafts: dict[str, sd.Model], trace: Trace, given: argparse.Namespace) -> dict[Way, float]:
    """Speed over plain decoding's by way."""
    ways: list[Way] = [("", 0), *((name, d) for name in drafts for d in range(1, given.lookaheads + 1))]
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for output in trace.outputs:
        for name, lookahead in ways:
            options = {"draft": drafts[name], "lookahead": lookahead} if name else {}
            run = sd.generate(target, output.prompt, max_new_tokens=given.new_tokens, **options)
            assert run.token_ids == output.output
            tokens[name, lookahead] += run.stats.emitted
            seconds[name, lookahead] += run.stats.total_s - run.stats.prefill_s
    plain = tokens["", 0] / seconds["", 0]
    return {way: tokens[way] / seconds[way] / plain for way in ways[1:]}


def predicted(found: Replay, profile: Profile, trace: Trace) -> dict[int, float]:
    context = trace.mean_context
    made = cost.predictions(found.tar(), profile.iterations(found.draft, context), profile.plain_s(context))
    return {lookahead: one.speed_up for lookahead, one in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["zoo", "gsm8k", "hellaswag"])
    parser.add_argument("--drafts", nargs="+", default=[name for name in zoo.names() if name != "target"])
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--characters", type=int, default=600, help="longer prompts are left out")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lookaheads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of the profile")
    parser.add_argument("--profile", type=Path, help="file to take or write the profile")
    given = parser.parse_args()
    target = sd.load("zoo:target", device="cpu")
    drafts = {f"zoo:{name}": sd.load_draft(f"zoo:{name}", device="cpu") for name in given.drafts}
    errors: dict[tuple[str, str, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        profile = profiled(given, Path(name))
        print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {processor()}; {given.prompts} prompts a set")
        print(f"{'set':<12}{'draft':<20}" + "".join(f"{f'd={d}':>14}" for d in range(1, given.lookaheads + 1)))
        for of_set in given.sets:
            trace = traced(target, of_set, given, Path(name))
            measured = live(target, drafts, trace, given)
            for draft, model in drafts.items():
                made = predicted(replay(model, trace), profile, trace)
                cells = []
                for d in range(1, given.lookaheads + 1):
                    errors[of_set, draft, d] = made[d] / measured[draft, d] - 1
                    cells.append(f"{made[d]:>7.2f} {measured[draft, d]:>6.2f}")
                print(f"{of_set:<12}{draft:<20}" + "".join(cells), flush=True)
    sizes = np.abs(list(errors.values()))
    worst = max(errors, key=lambda key: abs(errors[key]))
    bias = float(np.median(list(errors.values())))
    print("predicted, then measured speed-up")
    print(f"error over {len(errors)} points: median {np.median(sizes):.1%}, 90 % below {np.quantile(sizes, 0.9):.1%}")
    print(f"worst {errors[worst]:+.1%} at {worst}; median with sign {bias:+.1%}")


if __name__ == "__main__":
    main()
