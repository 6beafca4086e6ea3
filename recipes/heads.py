"""Train heads on the zoo's target: `python recipes/heads.py --corpus DIR`.

The text is the target's own continuations of the corpus. Written for one GPU, where it takes minutes; a run that was
stopped continues.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from shallowdraft.building.generated_text import DOMAIN, write_continuations
from shallowdraft.building.medusa import fit_heads
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.token_store import open_store, write_store
from shallowdraft.building.trainer import Trainer
from shallowdraft.models.heads import save_heads
from shallowdraft.models.model import load, resolve_device

COUNT = 4
GENERATED = {"tokens": 6_291_456, "prompt": 32, "length": 224, "rows": 2048, "seed": 2}
RECIPE = Recipe(tokens=24_000_000, batch_tokens=16_384, sequence=256, learning_rate=2e-3, seed=0, save_every=500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of domain.jsonl files")
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--work", type=Path, default=Path("runs/heads/work"), help="folder for unfinished work")
    parser.add_argument("--out", type=Path, default=Path("runs/heads/heads"), help="folder for the heads")
    options = parser.parse_args()
    begin_s, device = time.perf_counter(), resolve_device(None)
    target = load(options.target, "float32", device, trainable=True)
    corpus, generated = options.work / "tokens", options.work / "generated"
    if not (corpus / "store.json").exists():
        write_store(options.corpus, target.require_tokenizer(), corpus)
    if not (generated / "store.json").exists():
        for _ in write_continuations(open_store(corpus), target.decoder, generated, **GENERATED):
            pass
    trainer = Trainer(open_store(generated), options.work, domains=(DOMAIN,), follow=follow)
    torch.set_float32_matmul_precision("high")
    heads, measured = fit_heads(trainer, target.decoder, COUNT, RECIPE)
    figures = {name: round(value, 4) for name, value in measured.items()}
    save_heads(heads, options.out, target=options.target, tokens=RECIPE.tokens, held_out=figures)
    print(f"{figures} in {time.perf_counter() - begin_s:.0f} s")


def follow(name: str, steps: Iterator[int], total: int) -> None:
    """Print a line every hundred steps."""
    for done in steps:
        if done % 100 == 0:
            print(f"{name}: {done} of {total}, {getattr(done, 'detail', '')}")


if __name__ == "__main__":
    main()
