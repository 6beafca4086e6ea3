"""What a build will take, before it starts: seconds, bytes of memory, bytes of disk."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from shallowdraft.building.jobs import Job
from shallowdraft.building.training import LOGITS_AT_ONCE, Recipe
from shallowdraft.errors import TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.memory import require_memory
from shallowdraft.shapes.shape import ModelShape

TRAINED_BYTES = 16  # a float32 weight, its gradient and AdamW's two moments
STATE_BYTES = 12  # of these the weight and the moments are saved
TIMED_TOKENS = 4096


@dataclass(frozen=True)
class Plan:
    """Estimates; the seconds follow from a few rows that were timed."""

    seconds: float
    memory_bytes: int
    disk_bytes: int

    def require_room(self, folder: Path, device: torch.device, what: str) -> None:
        """Raise unless memory and disk have it."""
        require_memory(self.memory_bytes, device, what)
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if self.disk_bytes > free:
            raise TrainingError(
                f"{what} needs {self.disk_bytes / 2**30:.2f} GiB in {folder}, {free / 2**30:.2f} GiB are free; "
                "make room or name another folder"
            )


def make_plan(
    model: Decoder,
    job: Job[Decoder],
    recipe: Recipe,
    target: ModelShape | None,
    *,
    runs: float,
    states: int,
    corpus_tokens: int,
) -> Plan:
    """For training on the recipe's tokens `runs` times over, in `states` stages; the model is left as it was."""
    micro = min(recipe.rows, recipe.micro_rows) * recipe.sequence
    shape = model.shape
    activations = shape.layers * (14 * shape.d_model + 4 * shape.ffn) + shape.vocab * LOGITS_AT_ONCE
    memory = TRAINED_BYTES * shape.parameters + 4 * (target.parameters if target else 0) + 4 * micro * activations
    disk = STATE_BYTES * shape.parameters * (states + 1) + 4 * shape.parameters + 2 * corpus_tokens
    speed = tokens_per_s(model, job, recipe)
    return Plan(runs * recipe.tokens / speed, memory, disk)


def tokens_per_s(model: Decoder, job: Job[Decoder], recipe: Recipe) -> float:
    """Of a forward and a backward pass over a few rows, the second time."""
    model.requires_grad_(True)
    length = min(recipe.sequence, TIMED_TOKENS)
    rows = max(1, min(recipe.rows, recipe.micro_rows, TIMED_TOKENS // length))
    tokens = torch.zeros((rows, length + 1), dtype=torch.int64, device=model.device)
    job.begin(0, recipe.steps)
    for _ in range(2):
        begin_s = time.perf_counter()
        with job.active(model):
            job.loss(model, tokens).sum().backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin_s
    model.zero_grad(set_to_none=True)
    if job.learned is not None:
        job.learned.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return rows * length / seconds
