"""Helpers of benchmarks/pruning.py and objectives.py: text, the judgement of drafts, and trials in several processes.

Every finished trial is a line in a file of records; a benchmark that is started again skips recorded trials.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import DOMAIN, continuations, write_continuations
from shallowdraft.building.losses import acceptance, tar_from_runs
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.token_store import TokenStore, open_store, write_store
from shallowdraft.building.trainer import Trainer
from shallowdraft.errors import TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import load
from shallowdraft.records import commit

LOOKAHEAD = 5
PROMPT, LENGTH = 32, 96  # tokens of a held-out prompt, and of the target's continuation

SETTING = ("parent", "batch_tokens", "sequence", "prompts", "generated")  # options that are part of a record's key

Trial = dict[str, Any]


def new_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of both benchmarks."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", default="zoo:target", help="the target; drafts are pruned from it")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of text")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens and records")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1, help="trials that run at once")
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts to judge on")
    parser.add_argument("--generated", type=int, default=2_000_000, help="tokens that the target writes for training")
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Write the corpus and the target's continuations of it as token stores, if they are missing."""
    corpus, generated = options.work / "tokens", options.work / "generated"
    model = load(options.parent, "float32", trainable=True)
    if not (corpus / "store.json").exists():
        write_store(options.corpus, model.require_tokenizer(), corpus)
    if not (generated / "store.json").exists():
        store, rows = open_store(corpus), min(2048, max(8, options.generated // (8 * options.sequence)))
        size = {"tokens": options.generated, "prompt": PROMPT, "length": options.sequence - PROMPT, "rows": rows}
        for _ in write_continuations(store, model.decoder, generated, **size, seed=1):
            pass
        torch.cuda.empty_cache()  # trials run in other processes, which need the memory


@cache
def load_parent(name: str) -> Decoder:
    """Load the target, once per process."""
    return load(name, "float32", trainable=True).decoder


@cache
def held_out_text(name: str, work: Path, prompts: int) -> tuple[Tensor, Tensor]:
    """Return held-out prompts, each with the target's continuation: greedy, and sampled at temperature 1."""
    target = load_parent(name)
    reader = Batches(open_store(work / "tokens"), part="val", rows=prompts, sequence=PROMPT, seed=0)
    starts = torch.from_numpy(reader.next()[:, :PROMPT]).to(target.device)
    return continuations(target, starts, LENGTH, temperature=0.0), continuations(target, starts, LENGTH, seed=5)


@torch.no_grad()
def judge(draft: Decoder, options: argparse.Namespace) -> dict[str, float]:
    """Measure the acceptance rate on the target's sampled text, and greedy match and TAR on its greedy text."""
    target = load_parent(options.parent)
    greedy, sampled = held_out_text(options.parent, options.work, options.prompts)
    rates, matches = [], []
    for rows in sampled.split(32):
        p, q = (model.logits(rows[:, :-1])[:, PROMPT - 1 :] for model in (target, draft))
        rates.append(acceptance(p, q))
    for rows in greedy.split(32):
        q = draft.logits(rows[:, :-1])[:, PROMPT - 1 :]
        matches.append(rows[:, PROMPT:] == q.argmax(-1))
    hits = torch.cat(matches)
    return {
        "acceptance": float(torch.cat(rates).mean()),
        "greedy_match": float(hits.float().mean()),
        "tar": tar_from_runs(hits, LOOKAHEAD),
    }


def new_trainer(options: argparse.Namespace, folder: str, domains: tuple[str, ...] | None = None) -> Trainer:
    """Return a trainer on some domains, or on all: the corpus and the target's own text."""
    return Trainer(open_store(options.work / "generated"), Path(folder), domains=domains)


def corpus_domains(store: TokenStore) -> tuple[str, ...]:
    """Return all domains except the target's own text."""
    return tuple(domain for domain in store.domains if domain != DOMAIN)


def recipe(options: argparse.Namespace, tokens: int, rate: float, seed: int) -> Recipe:
    """Return the recipe of a trial; its state is never saved."""
    return Recipe(
        tokens=tokens,
        batch_tokens=options.batch_tokens,
        sequence=options.sequence,
        micro_rows=32,
        learning_rate=rate,
        seed=seed,
        save_every=10**6,
    )


def run_all(
    run_trial: Callable[[argparse.Namespace, Trial, str], dict[str, Any]],
    options: argparse.Namespace,
    trials: Iterable[Trial],
    file: Path,
) -> list[dict[str, Any]]:
    """Run the trials that are not recorded, and return the records of all trials."""
    setting = {name: str(getattr(options, name)) for name in SETTING}
    all_trials = [trial | setting for trial in trials]
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    recorded = {_key(record["trial"]) for record in done}
    missing = [trial for trial in all_trials if _key(trial) not in recorded]
    failed: BaseException | None = None
    threads = max(1, torch.get_num_threads() // options.workers)
    with ProcessPoolExecutor(options.workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        futures = {pool.submit(_run, run_trial, options, trial): trial for trial in missing}
        for count, future in enumerate(as_completed(futures), 1):
            if error := future.exception():
                failed = error
                continue
            record = {"trial": futures[future], **future.result()}
            done.append(record)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            print(f"{count}/{len(missing)}", _key(record["trial"]), record.get("tar", record.get("failed")), flush=True)
    if failed:
        raise failed
    keys = {_key(trial) for trial in all_trials}
    return [record for record in done if _key(record["trial"]) in keys]


def _run(
    run_trial: Callable[[argparse.Namespace, Trial, str], dict[str, Any]], options: argparse.Namespace, trial: Trial
) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_trial(options, trial, folder)
        except TrainingError as error:  # masks that do not converge or a rate that diverges count as a result
            return {"failed": str(error)}


def _key(trial: Trial) -> str:
    return json.dumps(trial, sort_keys=True)


def spread(records: list[dict[str, Any]], name: str) -> str:
    """Return the mean and standard deviation over seeds."""
    values = [record[name] for record in records if "failed" not in record]
    if len(values) < len(records):
        return f"{len(records) - len(values)} of {len(records)} failed"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def provenance(options: argparse.Namespace) -> str:
    """Return date, commit, device, versions and options, in two lines."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    settings = {name: value for name, value in vars(options).items() if name not in ("corpus", "work")}
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {device}, torch {torch.__version__}\n"
        f"parent {load_parent(options.parent).shape}; {settings}"
    )
