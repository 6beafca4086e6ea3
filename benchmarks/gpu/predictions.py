"""Predicted beside measured: studies of a synthetic pair, whose acceptance is known, on a GPU.

Of every draft and lookahead: plain decoding a token in the profile and in the live runs, and the speed-up that the
profile predicts (as it was while profiling, and for the machine as the live runs met it) beside the one measured.

    python benchmarks/gpu/predictions.py [--lookaheads 1 2 4 8] [--new-tokens 64 192] [--prompts 12]
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from floor import provenance

import shallowdraft as sd
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import Prompt
from shallowdraft.runs.profile import read_profile
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying.proposers import model_proposer
from shallowdraft.studying.study import Plan, study

TARGET, DRAFTS = "12x768/12h/2048", ("2x256/4h/688", "8x256/4h/688")
VOCAB, AGREEMENT = 8192, 0.8


def follow(_name: str, steps: Iterator[int], _count: int) -> None:
    for _ in steps:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--prompts", type=int, default=12)
    given = parser.parse_args()
    print(provenance())
    columns = ("plain us", "live", "predicted", "here", "measured", "error")
    print(f"{'draft':<14}{'new':>5}{'d':>3}" + "".join(map("{:>{}}".format, columns, (10, 8, 11, 7, 20, 8))))
    text = "It was a quiet day until the rain began, and then the river rose. "
    prompts = [("made", Prompt(str(n), "made", text * (1 + n % 3) + str(n))) for n in range(given.prompts)]
    errors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, shape in enumerate(DRAFTS):
            make_pair(parse_shape(TARGET, vocab=VOCAB), parse_shape(shape, vocab=VOCAB), AGREEMENT).save(
                folder / str(number)
            )
            target, draft = sd.load(folder / str(number) / "target"), sd.load_draft(folder / str(number) / "draft")
            for new_tokens in given.new_tokens:
                for d in given.lookaheads:
                    plan = Plan(prompts, [d], new_tokens, live=1, live_prompts=given.prompts)
                    run = folder / f"{number}-{new_tokens}-{d}"
                    (row,) = study(target, [model_proposer(draft)], plan, run, follow).rows
                    profile, live, usual = read_profile(run / "profile.jsonl"), row.live, row.curve[d]
                    assert live is not None
                    assert live.lossless
                    errors.append(row.prediction.speed_up / live.speed_up - 1)
                    low, high = live.interval
                    print(
                        f"{shape:<14}{new_tokens:>5}{d:>3}{1e6 * profile.plain_s(128):>10.1f}"
                        f"{1e6 / live.plain_tokens_per_s:>8.1f}{usual.speed_up:>11.3f}{row.prediction.speed_up:>7.3f}"
                        f"{live.speed_up:>7.3f} ({low:.3f}-{high:.3f}){errors[-1]:>+8.1%}",
                        flush=True,
                    )
    sizes = np.abs(errors)
    print(
        f"error of the prediction for the machine as it was met: median {np.median(sizes):.1%}, "
        f"most {sizes.max():.1%}, median with sign {np.median(errors):+.1%}"
    )


if __name__ == "__main__":
    main()
