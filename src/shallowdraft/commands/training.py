"""What the commands that train share: options, the token store, a progress line, the end."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import ModelCommand
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.building.corpus import Batches, TokenStore
    from shallowdraft.building.training import Job, Recipe
    from shallowdraft.models.decoder import Decoder
    from shallowdraft.models.model import Model

VALIDATION_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ModelCommand):
    """What every command takes that trains. Killed or interrupted, the same command goes on where it stopped."""

    corpus: str
    """Folder of text: domain.jsonl (lines with a "text" field) or domain.txt, also .xz, .gz; domain-val is held out."""
    out: str
    """Folder for the model; OUT/training holds tokens, the state of the run and metrics.jsonl."""
    tokens: int
    """Tokens to train on."""
    batch_tokens: int = 16384
    """Tokens in a batch."""
    sequence: int = 256
    """Tokens in a sequence."""
    learning_rate: float = 1e-3
    """Peak of the learning rate."""
    seed: int = 0
    """Seed of the order of the text, and of fresh weights."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the result as one JSON object and nothing else on stdout."""

    @property
    def work(self) -> Path:
        return Path(self.out) / "training"

    def recipe(self, tokens: int | None = None) -> "Recipe":
        from shallowdraft.building.training import Recipe

        return Recipe(
            tokens=tokens or self.tokens,
            batch_tokens=self.batch_tokens,
            sequence=self.sequence,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )

    def check(self) -> None:
        """Find what is wrong before any work."""
        self.recipe()
        self.set_threads()
        if (Path(self.out) / "config.json").exists():
            raise OptionError(f"{self.out} already holds a model; name another folder")

    def store(self, tokenizer: Any) -> "TokenStore":
        """The corpus in tokens: made once, kept in the work folder."""
        from shallowdraft.building.corpus import open_store, write_store

        folder = self.work / "tokens"
        if not (folder / "store.json").exists():
            say(f"reading {self.corpus}")
            store = write_store(Path(self.corpus), tokenizer, folder)
        else:
            store = open_store(folder)
        store.require_tokenizer(tokenizer)
        return store

    def batches(self, store: "TokenStore") -> "Batches":
        from shallowdraft.building.corpus import Batches

        return Batches(store, rows=self.recipe().rows, sequence=self.sequence, seed=self.seed)

    def train(self, model: "Decoder", job: "Job", store: "TokenStore", recipe: "Recipe", name: str) -> None:
        """Train with a line of progress on stderr."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from shallowdraft.building.training import train

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(name, total=recipe.steps)
            for step in train(model, job, self.batches(store), recipe, self.work / name):
                progress.update(
                    task,
                    completed=step.step,
                    description=f"{name}: loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s",
                )

    def validate(self, model: "Decoder", target: "Decoder | None", store: "TokenStore") -> dict[str, float]:
        from shallowdraft.building.corpus import Batches
        from shallowdraft.building.training import validate

        held_out = Batches(store, part="val", rows=16, sequence=self.sequence, seed=0)
        return validate(model, target, held_out, VALIDATION_BATCHES)

    def finish(self, model: "Model", measured: dict[str, float]) -> int:
        """Save the model and say what came of it."""
        model.save(self.out)
        if self.json_output:
            parameters = model.shape.parameters
            print(json.dumps({"out": self.out, "shape": str(model.shape), "parameters": parameters, **measured}))
        else:
            values = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items())
            print(f"{self.out}: {model.shape}, {model.shape.parameters:,} parameters; held out: {values}")
        return 0


def say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style="dim", soft_wrap=True)
