"""A draft that learns while it serves: does it recover after a shift of domain?

A carved draft is distilled on stories alone. It then serves prompts from documentation, and learns from the target's
corrections. Its acceptance rate (greedy, one draft token at a time) and its TAR at lookahead 4 are measured on held-out
prompts of both domains.

    python benchmarks/online.py --corpus DIR --work DIR [--tokens 200000]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

import shallowdraft as sd
from shallowdraft.building.batches import Batches
from shallowdraft.building.online import OnlineDraft, OnlineOptions
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.token_store import TokenStore, open_store, write_store
from shallowdraft.building.trainer import Trainer
from shallowdraft.records import commit, processor

OLD, NEW = "stories", "docs"
PROMPT, LENGTH, BATCH = 32, 64, 8
HELD_OUT = 48  # prompts of each domain


def store_of(corpus: Path, work: Path, target: sd.Model) -> TokenStore:
    """Return the token store of the two domains; write it if it is missing."""
    if not (work / "tokens" / "store.json").exists():
        with tempfile.TemporaryDirectory() as folder:
            for file in corpus.iterdir():
                if file.name.startswith((OLD, NEW)):
                    (Path(folder) / file.name).symlink_to(file.resolve())
            write_store(Path(folder), target.require_tokenizer(), work / "tokens")
    return open_store(work / "tokens")


def stale_draft(name: str, target: sd.Model, store: TokenStore, work: Path, tokens: int) -> sd.Model:
    """Return a draft that is distilled on the old domain only; train it if it is missing."""
    stage = f"stale-{name.replace(':', '-').replace('/', '-')}-{tokens}"
    folder = work / stage
    if not (folder / "config.json").exists():
        draft = sd.load(name, "float32", "cpu", trainable=True)
        recipe = Recipe(tokens=tokens, batch_tokens=4096, sequence=128, micro_rows=16, learning_rate=3e-3)
        trainer = Trainer(store, work / "training", domains=(OLD,), follow=follow)
        trainer.train(stage, draft.decoder, Distillation(target.decoder), recipe)
        draft.save(folder)
    return sd.load(folder, "float32", "cpu", trainable=True)


def follow(name: str, steps: Iterator[int], total: int) -> None:
    """Print a line every fifty steps of training."""
    for done in steps:
        if done % 50 == 0:
            print(f"{name}: {done} of {total}, {getattr(done, 'detail', '')}", flush=True)


def openings(store: TokenStore, domain: str, part: str, rows: int) -> Iterator[list[list[int]]]:
    """Yield batches of prompts from a domain, without end."""
    reader = Batches(store, part=part, rows=rows, sequence=PROMPT, seed=3, domains=[domain])
    while True:
        yield reader.next()[:, :PROMPT].tolist()


def measure(target: sd.Model, draft: sd.Model, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the acceptance rate of a single draft token, and TAR at lookahead 4."""

    def statistics(lookahead: int) -> sd.Statistics:
        options = {"draft": draft, "lookahead": lookahead, "max_new_tokens": LENGTH, "stop_tokens": ()}
        return sd.total([result.stats for result in sd.generate(target, prompts, **options)], one_batch=True)

    return statistics(1).acceptance_rate, statistics(4).tar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with stories and docs")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--draft", default="zoo:2x192-carved")
    parser.add_argument("--stale-tokens", type=int, default=500_000, help="tokens of stories to distil the draft on")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens to serve")
    parser.add_argument("--every", type=int, default=16, help="prompts between updates")
    parser.add_argument("--budget", type=int, default=8192, help="training tokens of an update")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    trained = sd.load("zoo:target", device="cpu", trainable=True)
    target = sd.load("zoo:target", device="cpu")
    store = store_of(options.corpus, options.work, target)
    draft = stale_draft(options.draft, trained, store, options.work, options.stale_tokens)
    old, new = (next(openings(store, domain, "val", HELD_OUT)) for domain in (OLD, NEW))
    with tempfile.TemporaryDirectory() as folder:
        online = OnlineDraft(target, draft, Path(folder), OnlineOptions(learning_rate=options.learning_rate))
        print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}, torch {torch.__version__}")
        print(f"{options.draft}, distilled on {options.stale_tokens:,} tokens of {OLD}, serves {NEW};")
        print(
            f"every {options.every} prompts it learns from {options.budget:,} tokens, "
            f"at a learning rate of {options.learning_rate}"
        )
        print(
            f"{'tokens served':>14} {NEW + ' accepted':>14} {'TAR':>6} {OLD + ' accepted':>18} {'TAR':>6}  learning s"
        )
        figures, learning_s, serving = [], 0.0, openings(store, NEW, "train", BATCH)
        marks = iter(range(0, options.tokens + 1, options.tokens // 8))
        mark, prompts = next(marks), 0
        while True:
            if online.tokens_seen >= mark:
                figures.append((*measure(target, online.draft, new), *measure(target, online.draft, old)))
                line = "{:>14.3f} {:>6.2f} {:>18.3f} {:>6.2f}".format(*figures[-1])
                print(f"{online.tokens_seen:>14,} {line} {learning_s:>10.0f}", flush=True)
                if (following := next(marks, None)) is None:
                    break
                mark = following
            batch = next(serving)
            settings = {"draft": online.draft, "lookahead": 4, "max_new_tokens": LENGTH, "stop_tokens": ()}
            for prompt, result in zip(batch, sd.generate(target, batch, **settings), strict=True):
                online.remember(prompt, result, 4)
            prompts += BATCH
            if prompts % options.every == 0:
                begin_s = time.perf_counter()
                online.learn(options.budget)
                learning_s += time.perf_counter() - begin_s
    gap = figures[0][2] - figures[0][0]  # between the old domain's acceptance rate and the new domain's
    print(f"the gap in acceptance rate was {gap:.3f}; {(figures[-1][0] - figures[0][0]) / gap:.0%} of it was closed")


if __name__ == "__main__":
    main()
