"""An encoder–decoder with and without a draft: a synthetic T5 pair on a CPU, in one interleaved run.

T5 1.1 in float32, its draft with the precision that `load_draft` chooses, batch 1; they agree on 80 % of tokens. Random
sources of 64 tokens, 256 new tokens, lookahead 5, two threads. Each round decodes once plainly and once speculatively,
each time from a new source. Medians and quartiles of whole calls, with the encoders' passes, are over rounds; the ratio
is taken within a round. All outputs must be the text that the pair is built to write.

    python benchmarks/t5.py [--rounds 15] [--threads 2] [--target 6+12x640/10h/1728] [--draft 2+2x256/4h/688]
"""

import argparse
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from cpu_engine import measure, spread

import shallowdraft as sd
from shallowdraft.models.synthetic import make_pair
from shallowdraft.records import commit, processor
from shallowdraft.shapes.notation import parse_shape

VOCABULARY, AGREEMENT, SOURCE, NEW_TOKENS, LOOKAHEAD = 4096, 0.8, 64, 256, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", default="6+12x640/10h/1728")
    parser.add_argument("--draft", default="2+2x256/4h/688")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pair = make_pair(*(parse_shape(shape, vocab=VOCABULARY) for shape in (args.target, args.draft)), AGREEMENT)
    with tempfile.TemporaryDirectory() as folder:
        folders = pair.save(Path(folder))
        target, draft = sd.load(folders[0], device="cpu"), sd.load_draft(folders[1], device="cpu")
    random = torch.Generator().manual_seed(0)

    def decode(draft: sd.Model | None) -> list[int]:
        source = torch.randint(0, VOCABULARY, (SOURCE,), generator=random)
        out = sd.generate(target, source, draft=draft, lookahead=LOOKAHEAD, max_new_tokens=NEW_TOKENS)
        return out.token_ids

    candidates = {"plain": lambda: decode(None), "speculative": lambda: decode(draft)}
    speeds = measure(candidates, pair.walk(target.start_token, NEW_TOKENS), args.rounds)
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}, torch {torch.__version__}")
    sizes = ", ".join(
        f"{name} {model.shape} ({model.shape.parameters / 1e6:.1f} M)"
        for name, model in (("target", target), ("draft", draft))
    )
    print(f"{sizes}; TAR {pair.tar(LOOKAHEAD):.2f} by construction; {args.threads} threads, {args.rounds} rounds")
    print(f"{'tokens/s':<24} median (quartiles)")
    for name, values in speeds.items():
        print(f"  {name:<22} {spread(values)}")
    ratios = [fast / slow for slow, fast in zip(*speeds.values(), strict=True)]
    print(f"  {'speculative / plain':<22} {spread(ratios, 'x')}")


if __name__ == "__main__":
    main()
