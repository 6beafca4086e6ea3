"""Predicted beside measured: studies of a synthetic pair, whose acceptance is known, on a GPU.

Each row has a draft and a lookahead: the time of a plain token in the profile and in the live runs; the speed-up
predicted with the profile's plain decoding, and with that of the live runs; the speed-up measured live.

    python benchmarks/gpu/predictions.py [--lookaheads 1 2 4 8] [--new-tokens 64 192] [--prompts 12]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from floor import provenance

import shallowdraft as sd
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import Prompt
from shallowdraft.shapes.notation import parse_shape

TARGET, DRAFTS = "12x768/12h/2048", ("2x256/4h/688", "8x256/4h/688")
VOCAB, AGREEMENT = 8192, 0.8
TEXT = "It was a quiet day until the rain began, and then the river rose. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--prompts", type=int, default=12, help="a study runs at most 40 of them live")
    args = parser.parse_args()
    print(provenance())
    columns = ("plain us", "live us", "predicted", "live", "measured", "error")
    print(f"{'draft':<14}{'new':>5}{'d':>3}" + "".join(map("{:>{}}".format, columns, (10, 8, 11, 7, 20, 8))))
    prompts = [("made", Prompt(str(n), "made", TEXT * (1 + n % 3) + str(n))) for n in range(args.prompts)]
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, shape in enumerate(DRAFTS):
            pair = make_pair(parse_shape(TARGET, vocab=VOCAB), parse_shape(shape, vocab=VOCAB), AGREEMENT)
            target_folder, draft_folder = pair.save(Path(scratch) / str(number))
            target = sd.load(target_folder)
            for new_tokens in args.new_tokens:
                for d in args.lookaheads:
                    run = Path(scratch) / f"{number}-{new_tokens}-{d}"
                    study = sd.study(
                        target, [str(draft_folder)], prompts=prompts, out=run, lookaheads=[d],
                        max_new_tokens=new_tokens, live=1, progress=False,
                    )  # fmt: skip
                    (row,), profile = study.rows, sd.open_run(run).profile
                    live, (profiled,) = row.live, row.curve
                    assert live is not None, row.disturbed or f"stalled on {study.stalled}"
                    assert live.lossless
                    errors.append(row.prediction.speed_up / live.speed_up - 1)
                    low, high = live.interval
                    print(
                        f"{shape:<14}{new_tokens:>5}{d:>3}"
                        f"{1e6 * profile.plain_s(128):>10.1f}{1e6 / live.plain_tokens_per_s:>8.1f}"
                        f"{profiled.speed_up:>11.3f}{row.prediction.speed_up:>7.3f}"
                        f"{live.speed_up:>7.3f} ({low:.3f}-{high:.3f}){errors[-1]:>+8.1%}",
                        flush=True,
                    )
    magnitudes = np.abs(errors)
    print(
        f"relative error of the prediction for the live runs' plain speed: median {np.median(magnitudes):.1%}, "
        f"at most {magnitudes.max():.1%}, signed median {np.median(errors):+.1%}"
    )


if __name__ == "__main__":
    main()
