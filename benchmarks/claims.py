"""Claims 2 to 4 of "Decoding Speculative Decoding", tested on this machine with the zoo; prints a verdict on each.

2: of drafts of equal size, the one with fewer, wider layers drafts faster. 3: a draft's accuracy does not predict its
TAR. 4: of drafts of equal size, the wide, shallow one gives the most throughput.

    python benchmarks/claims.py --out DIR [--limit 40]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shallowdraft.intervals import bootstrap
from shallowdraft.models import zoo
from shallowdraft.models.checkpoint import find_folder, read_shape
from shallowdraft.profiling.latency_model import figure_4, fit, observations
from shallowdraft.records import RANDOM, commit, processor
from shallowdraft.runs.profile import Profile, read_profile

EQUAL = ("1x256", "2x192", "4x128", "8x96")  # equal numbers of weights in layers, wide to deep
LOOKAHEAD, CONTEXT = 8, 64


def shallowdraft(*arguments: str) -> str:
    """Run a command in another process, and return what it prints."""
    command = [sys.executable, "-m", "shallowdraft", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def depth_sets_latency(folder: Path) -> str:
    """Test claim 2 on the profile of the study, beside times of shapes with random weights."""
    profile = folder / "shapes.jsonl"
    shallowdraft(
        "profile", "--target", "zoo:target", "--shapes", "auto", "--contexts", str(CONTEXT), "--out", str(profile)
    )
    timed, parent = read_profile(profile), read_shape(find_folder("zoo:target"))
    lines = []
    for title, family in figure_4(parent).items():
        steps = (timed.iteration(f"{RANDOM}{shape}", LOOKAHEAD, CONTEXT).draft_s / LOOKAHEAD for shape in family)
        lines.append(
            f"  us per draft step, {title}: "
            + ", ".join(f"{shape} {1e6 * step_s:.0f}" for shape, step_s in zip(family, steps, strict=True))
        )
    latency = fit(observations(timed, parent))
    lines.append(
        f"  latency model: {1e6 * latency.layer_s:.1f} us per layer, "
        f"{1e12 * latency.weight_s:.1f} us per million weights; typically {latency.typical_error:.0%} off"
    )
    ratio, (low, high) = deep_over_wide(read_profile(folder / "run" / "profile.jsonl"))
    holds = "holds" if low > 1 else "does not hold here"
    head = f"with equally many weights, 8 layers take {ratio:.2f} ({low:.2f} to {high:.2f}) times as long as 1"
    return f"2. {holds}: {head}\n" + "\n".join(lines)


def deep_over_wide(profile: Profile) -> tuple[float, tuple[float, float]]:
    """Return the drafting time of the zoo's deepest draft / that of its widest, with its interval.

    Samples are paired, as the profile timed both drafts in turns.
    """

    def drafting(name: str) -> NDArray[np.float64]:
        """Return the drafting time / the time of a plain token in every sample."""
        samples = []
        for point, samples_of_point in profile.samples.items():
            if (point.candidate.draft, point.candidate.lookahead) == (f"zoo:{name}", LOOKAHEAD):
                samples += samples_of_point
        return np.array([sample["draft_s"] / sample["plain_s"] for sample in samples])

    wide, deep = drafting(EQUAL[0]), drafting(EQUAL[-1])
    low, high = bootstrap(lambda draws: np.median(deep[draws], -1) / np.median(wide[draws], -1), len(wide))
    return float(np.median(deep) / np.median(wide)), (float(low), float(high))


def accuracy_tells_nothing(folder: Path, limit: int | None) -> str:
    """Test claim 3 on all drafts of the zoo."""
    drafts = [f"zoo:{name}" for name in zoo.names() if name != "target"]
    args = ["accuracy", "--drafts", *drafts, "--sets", "hellaswag", "mmlu"]
    args += ["--trace", str(folder / "run" / "trace.jsonl"), "--json"]
    if limit is not None:
        args += ["--limit", str(limit)]
    result = json.loads(shallowdraft(*args))
    lines = [f"3. {name}: {claim['statement']}" for name, claim in result["claims"].items()]
    for draft in result["drafts"]:
        figures = []
        for name, score in draft["sets"].items():
            share, (low, high) = score["accuracy"]["value"], score["accuracy"]["interval"]
            figures.append(f"{name} {share:.0%} ({low:.0%} to {high:.0%}), loss {score['loss']:.2f}")
        lines.append(f"  {draft['name']}: {', '.join(figures)}; TAR at 5 {draft['tar']:.2f}")
    return "\n".join(lines)


def wide_beats_deep(folder: Path, limit: int) -> str:
    """Test claim 4 by a study with live runs."""
    drafts = [f"zoo:{name}" for name in EQUAL]
    args = ["study", "--target", "zoo:target", "--drafts", *drafts, "--prompts", "zoo", "gsm8k", "hellaswag"]
    args += [
        "--limit",
        str(limit),
        "--lookaheads",
        "1:8",
        "--live",
        str(len(EQUAL)),
        "--out",
        str(folder / "run"),
        "--json",
    ]
    rows: dict[str, dict[str, Any]] = {row["draft"]: row for row in json.loads(shallowdraft(*args))["rows"]}
    lines = []
    for name in drafts:
        row = rows[name]
        low, high = row["live"]["interval"]
        draft_ms = 1e3 * row["prediction"]["iteration"]["draft_s"]
        lines.append(
            f"  {name} at lookahead {row['lookahead']}: TAR {row['live']['tar']:.2f}, drafting "
            f"{draft_ms:.2f} ms, {row['live']['speed_up']:.2f}x ({low:.2f} to {high:.2f})"
        )
    speeds = {name: rows[name]["live"] for name in drafts}
    fastest = max(speeds, key=lambda name: speeds[name]["speed_up"])
    wide, deep = speeds[drafts[0]], speeds[drafts[-1]]
    holds = "holds" if wide["interval"][0] > deep["interval"][1] else "does not hold here"
    head = f"the widest is {wide['speed_up'] / deep['speed_up']:.2f} times as fast as the deepest, {fastest} is fastest"
    return f"4. {holds}: {head}\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the records; an interrupted benchmark continues from them"
    )
    parser.add_argument(
        "--limit",
        type=int,
        help="at most this many prompts and questions of each set; default: 40 prompts, all questions",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    fourth = wide_beats_deep(args.out, args.limit or 40)
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {processor()}; greedy, batch 1, drafts in 8 bits")
    print(depth_sets_latency(args.out), accuracy_tells_nothing(args.out, args.limit), fourth, sep="\n")


if __name__ == "__main__":
    main()
