"""What benchmarks/pruning.py and benchmarks/objectives.py share: text, a judge, and trials over several processes.

Every trial is a line of a file of records; a benchmark that was stopped skips those that are there.
"""

import argparse
import json
import statistics
import subprocess
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

LOOKAHEAD = 5
PROMPT, LENGTH = 32, 96  # tokens of a held-out prompt, and of what the target writes after it

SETTING = ("parent", "batch_tokens", "sequence", "prompts", "generated")  # what a record depends on beside its trial

Trial = dict[str, Any]


def options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", default="zoo:target", help="the target; drafts are pruned from it")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of text")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens and records")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1, help="trials at a time")
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts to judge on")
    parser.add_argument("--generated", type=int, default=2_000_000, help="tokens that the target writes for training")
    return parser


def prepare(given: argparse.Namespace) -> None:
    """The corpus in tokens, with the target's own text as a domain; made once."""
    plain, more = given.work / "tokens", given.work / "generated"
    model = load(given.parent, "float32", trainable=True)
    if not (plain / "store.json").exists():
        write_store(given.corpus, model.require_tokenizer(), plain)
    if not (more / "store.json").exists():
        store, rows = open_store(plain), min(2048, max(8, given.generated // (8 * given.sequence)))
        size = {"tokens": given.generated, "prompt": PROMPT, "length": given.sequence - PROMPT, "rows": rows}
        texts = write_continuations(store, model.decoder, more, **size, seed=1)
        for _ in texts:
            pass
        torch.cuda.empty_cache()  # other processes do the rest


@cache
def parent(name: str) -> Decoder:
    return load(name, "float32", trainable=True).decoder


@cache
def exam(name: str, work: Path, prompts: int) -> tuple[Tensor, Tensor]:
    """Held-out prompts with what the target writes after them: greedily, and drawn at temperature 1."""
    target = parent(name)
    reader = Batches(open_store(work / "tokens"), part="val", rows=prompts, sequence=PROMPT, seed=0)
    given = torch.from_numpy(reader.next()[:, :PROMPT]).to(target.device)
    return continuations(target, given, LENGTH, temperature=0.0), continuations(target, given, LENGTH, seed=5)


@torch.no_grad()
def judge(draft: Decoder, given: argparse.Namespace) -> dict[str, float]:
    """Acceptance on drawn text; match and TAR on greedy text: what speculative decoding would meet."""
    target = parent(given.parent)
    greedy, drawn = exam(given.parent, given.work, given.prompts)
    rates, matches = [], []
    for text, found in ((drawn, rates), (greedy, matches)):
        for rows in text.split(32):
            p, q = (model.logits(rows[:, :-1])[:, PROMPT - 1 :] for model in (target, draft))
            found.append(acceptance(p, q) if text is drawn else rows[:, PROMPT:] == q.argmax(-1))
    hits = torch.cat(matches)
    return {
        "acceptance": float(torch.cat(rates).mean()),
        "greedy_match": float(hits.float().mean()),
        "tar": tar_from_runs(hits, LOOKAHEAD),
    }


def workshop(given: argparse.Namespace, folder: str, domains: tuple[str, ...] | None = None) -> Trainer:
    """On the corpus, on the target's text, or on both."""
    return Trainer(open_store(given.work / "generated"), Path(folder), domains=domains)


def corpus_domains(store: TokenStore) -> tuple[str, ...]:
    return tuple(domain for domain in store.domains if domain != DOMAIN)


def recipe(given: argparse.Namespace, tokens: int, rate: float, seed: int) -> Recipe:
    return Recipe(
        tokens=tokens,
        batch_tokens=given.batch_tokens,
        sequence=given.sequence,
        micro_rows=32,
        learning_rate=rate,
        seed=seed,
        save_every=10**6,
    )


def run_all(
    one: Callable[[argparse.Namespace, Trial, str], dict[str, Any]],
    given: argparse.Namespace,
    trials: Iterable[Trial],
    file: Path,
) -> list[dict[str, Any]]:
    """The records of all trials, each run once."""
    setting = {name: str(getattr(given, name)) for name in SETTING}
    wanted = [trial | setting for trial in trials]
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {_key(record["trial"]) for record in done}
    left = [trial for trial in wanted if _key(trial) not in known]
    failed: BaseException | None = None
    threads = max(1, torch.get_num_threads() // given.workers)
    with ProcessPoolExecutor(given.workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        futures = {pool.submit(_run, one, given, trial): trial for trial in left}
        for count, future in enumerate(as_completed(futures), 1):
            if error := future.exception():
                failed = error
                continue
            record = {"trial": futures[future], **future.result()}
            done.append(record)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            print(f"{count}/{len(left)}", _key(record["trial"]), record.get("tar", record.get("failed")), flush=True)
    if failed:
        raise failed
    keys = {_key(trial) for trial in wanted}
    return [record for record in done if _key(record["trial"]) in keys]


def _run(
    one: Callable[[argparse.Namespace, Trial, str], dict[str, Any]], given: argparse.Namespace, trial: Trial
) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return one(given, trial, folder)
        except TrainingError as error:  # masks that did not converge, a rate that diverged: a result too
            return {"failed": str(error)}


def _key(trial: Trial) -> str:
    return json.dumps(trial, sort_keys=True)


def spread(records: list[dict[str, Any]], name: str) -> str:
    """Mean and standard deviation over seeds."""
    values = [record[name] for record in records if "failed" not in record]
    if len(values) < len(records):
        return f"{len(records) - len(values)} of {len(records)} failed"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def provenance(given: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shown = {name: value for name, value in vars(given).items() if name not in ("corpus", "work")}
    known = commit.stdout.strip() or "unknown"
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {known}, {device}, torch {torch.__version__}\n"
        f"parent {parent(given.parent).shape}; {shown}"
    )
