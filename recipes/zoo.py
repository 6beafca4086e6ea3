"""Build the zoo from a folder of text: `python recipes/zoo.py --corpus DIR`, or `make zoo CORPUS=DIR`.

Stages are kept under --work; a run that was stopped goes on where it was. Written for one GPU, works on a CPU too.
"""

import argparse
import hashlib
import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft import shapes
from shallowdraft.building.continuations import continuations
from shallowdraft.building.corpus import TokenStore, open_store, read_corpus, train_tokenizer, write_store
from shallowdraft.building.jobs import Pretrain
from shallowdraft.building.training import Recipe, Step, fresh_decoder
from shallowdraft.building.workshop import Workshop
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, resolve_device
from shallowdraft.models.vocabulary import load_tokenizer

RECIPE = Path(__file__).with_suffix(".toml")


def main() -> None:
    options = parse()
    config = tomllib.loads(RECIPE.read_text())
    tokenizer, store = text(options.corpus, options.work, config["tokenizer"]["vocab"])
    shop = Workshop(store, options.work, follow, compiled=options.compile)
    target(shop, tokenizer, config["target"], options.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of domain.jsonl files")
    parser.add_argument("--work", type=Path, default=Path("runs/zoo"), help="folder for unfinished work")
    parser.add_argument("--out", type=Path, default=Path("src/shallowdraft/zoo"), help="folder for the models")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    return parser.parse_args()


def text(corpus: Path, work: Path, vocab: int) -> tuple[Any, TokenStore]:
    """The tokenizer and the corpus in its tokens, made once."""
    folder = work / "tokenizer"
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        tokenizer = train_tokenizer((text for _, _, text in read_corpus(corpus)), vocab)
        tokenizer.save_pretrained(folder)
    made = (work / "tokens" / "store.json").exists()
    return tokenizer, open_store(work / "tokens") if made else write_store(corpus, tokenizer, work / "tokens")


def target(shop: Workshop, tokenizer: Any, config: dict[str, Any], out: Path) -> None:
    shape = replace(shapes.parse(config["shape"], vocab=len(tokenizer), context=config["context"]), tied=True)
    recipe = Recipe(**{name: value for name, value in config.items() if name not in ("shape", "context")})
    decoder = fresh_decoder(shape, recipe.seed).to(resolve_device(None))
    begin_s = time.perf_counter()
    shop.train("target", decoder, Pretrain(), recipe)
    measured = shop.validate(decoder, None, recipe.sequence)
    ship(Model("target", decoder, tokenizer, (tokenizer.eos_token_id,)), out / "target", begin_s, measured)


class Unloop(Pretrain):
    """Pre-training goes on, and the model unlearns to repeat itself (sequence-level unlikelihood, Welleck et al. 2019).

    Of some rows of each batch it continues the beginning greedily; tokens that complete a run of `run` tokens seen
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
    """Which tokens [B, T] end a run that stands earlier in their row."""
    runs = text.unfold(1, run, 1)
    same = (runs[:, :, None] == runs[:, None]).all(-1).tril(-1).any(-1)
    return torch.nn.functional.pad(same, (run - 1, 0))


def ship(model: Model, folder: Path, begin_s: float, measured: dict[str, float]) -> None:
    model.save(folder, int8=True)
    card = {
        "shape": str(model.shape),
        "parameters": model.shape.parameters,
        "recipe": hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:16],
        "time_s": round(time.perf_counter() - begin_s),
        "held_out": measured,
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(folder.name, card, flush=True)


def follow(name: str, steps: Iterator[Step]) -> None:
    """A line now and then."""
    said = time.perf_counter()
    for step in steps:
        if time.perf_counter() - said > 10 or step.step == step.steps:
            said = time.perf_counter()
            print(
                f"{name} {step.step}/{step.steps}: loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s", flush=True
            )


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
