"""Options and output that the commands that train share."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from shallowdraft.building.recipe import TrainingOptions
from shallowdraft.commands.options import ModelCommand, Rate
from shallowdraft.display.interruption import noted, obey
from shallowdraft.display.progress import shown
from shallowdraft.errors import OptionError
from shallowdraft.progress import run_silently

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult

StageOptions = TypeVar("StageOptions", bound=TrainingOptions)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ModelCommand):
    """Options of every command that trains. Killed or interrupted, the same command goes on where it stopped; where it
    is done it says so again.

    Under `torchrun --nproc-per-node N -m shallowdraft …` the work is shared by N processes.
    """

    corpus: str
    """Folder of text: domain.jsonl (lines with a "text" field) or domain.txt, also .xz, .gz; domain-val is held out.
    Or a folder that `datasets` saved."""
    out: str
    """Folder for the model; OUT/training holds tokens, the state of the run and metrics.jsonl."""
    tokens: int
    """Tokens to train on."""
    batch_tokens: int = 16384
    """Tokens in a batch."""
    sequence: int = 256
    """Tokens in a sequence."""
    learning_rate: Rate = None
    """Peak of the learning rate. Default: what the model's width suggests; prune and distill try three around it."""
    seed: int = 0
    """Seed of the order of the text, and of fresh weights."""
    compile: bool = False
    """Train through torch.compile: a minute to start, then faster on a GPU."""
    recompute: bool = False
    """Compute activations again on the way back instead of keeping them: slower, for large models."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the result as one JSON object and nothing else on stdout."""

    def run(self) -> int:
        self.set_threads()
        result = self.build()
        if is_first():
            self.show(result)
        return 0

    @abstractmethod
    def build(self) -> "BuildResult":
        """Train, measure and save."""

    def show(self, result: "BuildResult") -> None:
        """Print what was written and how good it is."""
        if self.json_output:
            print(json.dumps({"out": self.out, **result.about, **result.held_out}))
            return
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in result.held_out.items())
        print(f"{self.out}: {result.description}; held out: {figures}")

    def options(self, kind: type[StageOptions]) -> StageOptions:
        """Return the options of a stage, each the field of the same name of this command."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def require_float32(self) -> None:
        """Refuse other types of weights."""
        if self.dtype not in (None, "float32"):
            raise OptionError(f"--dtype is {self.dtype}; weights are trained in float32, on CUDA with bf16 arithmetic")

    def shared_arguments(self) -> dict[str, Any]:
        """Return the arguments that every stage takes, except its options."""
        return {"corpus": self.corpus, "out": self.out, "device": self.device, "follow": follow, "say": say}


@dataclass(frozen=True, kw_only=True)
class DistillingCommand(TrainingCommand):
    """Options of every command that ends in distillation."""

    objective: str = "forward-kl"
    """forward-kl, reverse-kl, jensen-shannon, total-variation, hybrid or cross-entropy."""
    generated: int = 0
    """Tokens that the target writes itself after prompts from the corpus; best the same number as --tokens."""
    generated_share: float = 1.0
    """Share of every batch that comes from the target's own text; the rest is from the corpus."""
    rollout: float = 0.0
    """Share of the rows in which the draft writes the second half, which the target scores."""


def follow(name: str, steps: Iterator[int], total: int) -> None:
    """Show progress in the first process; Ctrl-C and SIGTERM wait for the end of a step, and its state is saved."""
    from shallowdraft.distributed import processes

    if not is_first():
        run_silently(name, steps, total)
        return
    # Several processes must stop after the same step, and none knows which signals the others got.
    waiting: AbstractContextManager[list[int]] = noted() if processes() == 1 else nullcontext([])
    try:
        with waiting as signals, closing(shown(name, steps, total)) as showing:
            for _ in showing:
                if signals:
                    showing.close()
                    obey(signals[0])
    except (KeyboardInterrupt, SystemExit):
        say("the same command goes on from the last saved state")
        raise


def say(text: str) -> None:
    """Print a line for the user on stderr, in the first process."""
    from shallowdraft.display.progress import notes

    if is_first():
        notes([text])


def is_first() -> bool:
    """Return whether this process prints."""
    from shallowdraft import distributed

    return distributed.is_first()
