"""Build the zoo from a folder of text: `python recipes/zoo.py --corpus DIR`, or `make zoo CORPUS=DIR`.

recipes/zoo.toml describes one target and its drafts. Stages are kept under --work; a run that was stopped continues.
Written for one GPU; on a CPU it takes days.
"""

import argparse
import hashlib
import json
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft.building.corpus import find_corpus_files, read_corpus, read_rows
from shallowdraft.building.generated_text import DOMAIN, continuations, write_continuations
from shallowdraft.building.pruning_methods import prune_by_importance, prune_by_masks
from shallowdraft.building.recipe import Recipe, usual_rate
from shallowdraft.building.tasks import Distillation, Pretraining
from shallowdraft.building.token_store import TokenStore, open_store, write_store
from shallowdraft.building.tokenizer import train_tokenizer
from shallowdraft.building.trainer import Trainer
from shallowdraft.building.training import fresh_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, load, resolve_device
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

LOG_EVERY_S = 20
PROBE = 0.03  # share of the tokens with which each candidate set of layers is tried


def main() -> None:
    options = parse()
    config = tomllib.loads(options.recipe.read_text())
    zoo = Builder(options.corpus, options.work, options.out, config, compiled=options.compile)
    tokenizer, store = zoo.text()
    target = zoo.target(tokenizer, store)
    if options.only != "target":
        zoo.drafts(target, zoo.written(target, store))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of domain.jsonl files")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).with_suffix(".toml"), help="what to build")
    parser.add_argument("--work", type=Path, default=Path("runs/zoo/work"), help="folder for unfinished work")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo/models"), help="folder for the models")
    parser.add_argument("--only", choices=["target"], help="stop after the target")
    parser.add_argument("--compile", action="store_true", help="pre-train through torch.compile")
    return parser.parse_args()


@dataclass(frozen=True)
class Builder:
    """Builds the zoo from a corpus, in a folder for unfinished work and one for the models."""

    corpus: Path
    work: Path
    out: Path
    config: dict[str, Any]
    """Content of the recipe's file."""
    compiled: bool

    def text(self) -> tuple[Any, TokenStore]:
        """Make the tokenizer and the token store, or open those of an earlier start."""
        folder = self.work / "tokenizer"
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            documents = (text for _, _, text in read_corpus(self.corpus))
            tokenizer = train_tokenizer(documents, self.config["tokenizer"]["vocab"])
            tokenizer.save_pretrained(folder)
        store = self.work / "tokens"
        if (store / "store.json").exists():
            return tokenizer, open_store(store)
        return tokenizer, write_store(self.corpus, tokenizer, store)

    def target(self, tokenizer: Any, store: TokenStore) -> Model:
        """Pre-train the target, cure it of loops, and load it as it ships: drafts learn from what users run."""
        folder, config = self.out / "target", self.config["target"]
        if not (folder / "card.json").exists():
            begin_s = time.perf_counter()
            shape = parse_shape(config["shape"], vocab=len(tokenizer), context=config["context"])
            decoder = fresh_decoder(replace(shape, tied=True), seed=0).to(resolve_device(None))
            trainer = Trainer(store, self.work, follow=follow, compiled=self.compiled)
            pretrain = Recipe(**config["pretrain"])
            trainer.train("target", decoder, Pretraining(), pretrain)
            unloop = Recipe(**config["unloop"])
            replace(trainer, compiled=False).train("unloop", decoder, Unloop(**config["unlikelihood"]), unloop)
            model = Model("target", decoder, tokenizer, (tokenizer.eos_token_id,))
            tokens = pretrain.tokens + unloop.tokens
            origin = {"method": "pre-trained", "tokens": tokens, "recipe": self.digest("tokenizer", "target")}
            self.ship(model, folder, trainer, None, origin, begin_s)
        return load(folder, "float32", trainable=True)

    def written(self, target: Model, store: TokenStore) -> TokenStore:
        """Make the store with the target's own text, or open that of an earlier start."""
        folder = self.work / "generated"
        if not (folder / "store.json").exists():
            begin_s = time.perf_counter()
            for done in write_continuations(store, target.decoder, folder, seed=1, **self.config["generated"]):
                print(f"generated: {done} {time.perf_counter() - begin_s:.0f} s")
        return open_store(folder)

    def drafts(self, target: Model, store: TokenStore) -> None:
        """Build all drafts that are not there yet."""
        for config in self.config["drafts"]:
            folder = self.out / config["name"]
            if (folder / "card.json").exists():
                continue
            begin_s = time.perf_counter()
            trainer = Trainer(store, self.work / config["name"], follow=follow)
            shape = parse_shape(config["shape"], vocab=target.shape.vocab, context=target.shape.context)
            rate = self.config["learning_rates"]["factor"] * usual_rate(shape)
            recipe = Recipe(**self.config["distil"], learning_rate=rate)
            decoder, tokens = self.draft(trainer, target.decoder, shape, recipe, config["method"])
            model = replace(target, name=config["name"], decoder=decoder)
            parts = ("tokenizer", "target", "generated", "objective", "learning_rates", "distil")
            origin = {"method": config["method"], "tokens": tokens, "recipe": self.digest(*parts, draft=config)}
            self.ship(model, folder, trainer, target, origin, begin_s)

    def draft(
        self, trainer: Trainer, target: Decoder, shape: ModelShape, recipe: Recipe, method: str
    ) -> tuple[Decoder, int]:
        """Build a draft by one of the methods; return it and the tokens that it was trained on."""
        objective = self.config["objective"]["name"]
        if method.startswith("learned masks"):
            wider = usual_rate(target.shape) / usual_rate(shape)  # it is the target that is trained
            masks = replace(recipe, learning_rate=wider * recipe.learning_rate)
            return prune_by_masks(trainer, target, shape, masks, objective=objective), recipe.tokens
        if method == "from scratch":
            decoder = fresh_decoder(child_shape(target.shape, shape), seed=1).to(target.device)
        else:
            probe = 0.0 if "no distillation" in method else PROBE
            decoder = prune_by_importance(trainer, target, shape, recipe, objective=objective, probe=probe)
        if "no distillation" in method:
            return decoder, 0
        trainer.train("distil", decoder, Distillation(target, objective), recipe)
        tried = 0 if method == "from scratch" else round(PROBE * recipe.tokens)
        return decoder, recipe.tokens + tried

    def digest(self, *parts: str, **more: Any) -> str:
        """Return the hash of the parts of the recipe that a model depends on."""
        content = {part: self.config[part] for part in parts} | more
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def ship(
        self, model: Model, folder: Path, trainer: Trainer, target: Model | None, origin: dict[str, Any], begin_s: float
    ) -> None:
        """Save a model with 8-bit weights, measure what was saved, and write its card."""
        model.save(folder, int8=True)
        rounded = load(folder, "float32", trainable=True).decoder
        teacher = target.decoder if target else None
        domains = [domain for domain in trainer.store.domains if domain != DOMAIN]
        held_out, unrounded = (
            trainer.validate(decoder, teacher, 1024, domains) for decoder in (rounded, model.decoder)
        )
        card = {
            "shape": str(model.shape),
            "parameters": model.shape.parameters,
            **origin,
            "time_s": round(time.perf_counter() - begin_s),
            "held_out": held_out,
            "held_out_before_rounding": unrounded,
            "on_the_targets_text": trainer.validate(rounded, teacher, 1024, [DOMAIN]) if teacher else None,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "data": licences(self.corpus),
        }
        (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        print(folder.name, card["shape"], card["parameters"], card["time_s"], held_out, unrounded, flush=True)


def licences(corpus: Path) -> list[dict[str, Any]]:
    """Count the corpus's documents by domain, source and licence."""
    documents: Counter[tuple[str, str, str]] = Counter()
    for file in find_corpus_files(corpus):
        for row in read_rows(file.path):
            source = str(row.get("source", "")).partition("@")[0]
            documents[file.domain, source, str(row.get("license", "not given"))] += 1
    names = ("domain", "source", "license", "documents")
    return [dict(zip(names, (*key, count), strict=True)) for key, count in sorted(documents.items())]


class Unloop(Pretraining):
    """Pre-training in which the model unlearns to repeat itself (sequence-level unlikelihood, Welleck et al. 2019).

    It continues the first tokens of some rows of each batch greedily; tokens that complete a run of `run` tokens seen
    before in the same text are made less likely.
    """

    def __init__(
        self, *, rows: int = 16, prompt: int = 32, length: int = 96, run: int = 4, weight: float = 1.0
    ) -> None:
        self.rows, self.prompt, self.length, self.run, self.weight = rows, prompt, length, run, weight

    @property
    def description(self) -> dict[str, Any]:
        return {"job": "unloop", **vars(self)}

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        loss = super().loss(model, tokens)
        text = continuations(model, tokens[: self.rows, : self.prompt], self.length, temperature=0.0)
        likely = model.logits(text[:, :-1]).float().log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0].exp()
        unlikely = -torch.log1p(-likely.clamp(max=1 - 1e-5)) * repeats(text, self.run)[:, 1:]
        return loss + self.weight * unlikely[:, self.prompt - 1 :].mean()


def repeats(text: Tensor, run: int) -> Tensor:
    """Return which tokens [B, T] end a run of tokens that occurs earlier in their row."""
    runs = text.unfold(1, run, 1)
    same = (runs[:, :, None] == runs[:, None]).all(-1).tril(-1).any(-1)
    return torch.nn.functional.pad(same, (run - 1, 0))


def follow(name: str, steps: Iterator[int], total: int) -> None:
    """Print a line every 20 seconds, and one at the end."""
    printed_s = time.perf_counter()
    for done in steps:
        if time.perf_counter() - printed_s > LOG_EVERY_S or done == total:
            printed_s = time.perf_counter()
            print(f"{name} {done}/{total}: {getattr(done, 'detail', '')}", flush=True)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
