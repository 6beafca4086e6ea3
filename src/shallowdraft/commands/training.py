"""Options and output that the commands that train share."""

import json
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shallowdraft.commands.options import Json, ModelCommand, Rate, Seed
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult

Objective = Literal["forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "hybrid", "cross-entropy"]


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
    seed: Seed = 0
    compile: bool = False
    """Train through torch.compile: a minute to start, then faster on a GPU."""
    recompute: bool = False
    """Compute activations again on the way back instead of keeping them: slower, for large models."""
    json_output: Json = False
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
            print(json.dumps(result.to_json()))
            return
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in result.held_out.items())
        print(f"{self.out}: {result.description}; held out: {figures}")

    def require_float32(self) -> None:
        """Refuse other types of weights."""
        if self.dtype not in (None, "float32"):
            raise OptionError(f"--dtype is {self.dtype}; weights are trained in float32, on CUDA with bf16 arithmetic")


@dataclass(frozen=True, kw_only=True)
class DistillingCommand(TrainingCommand):
    """Options of every command that ends in distillation."""

    objective: Objective = "forward-kl"
    """Loss between the target's distribution and the draft's."""
    generated: int = 0
    """Tokens that the target writes itself, to learn from; best the same number as --tokens."""
    generated_share: float = 1.0
    """Share of every batch that comes from the target's own text; the rest is from the corpus."""
    rollout: float = 0.0
    """Share of the rows in which the draft writes the second half, which the target scores."""


def is_first() -> bool:
    """Return whether this process prints."""
    from shallowdraft import distributed

    return distributed.is_first()
