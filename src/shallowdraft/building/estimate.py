"""Estimates of what a build takes, made before it starts: seconds, bytes of memory, bytes of disk."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from shallowdraft.building.recipe import LOGITS_COPIES, Recipe
from shallowdraft.building.tasks import TrainingTask
from shallowdraft.errors import TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.memory import require_memory
from shallowdraft.shapes.shape import ModelShape

TRAINED_BYTES = 16  # per parameter: a float32 weight, its gradient and AdamW's two moments
STATE_BYTES = 12  # per parameter of a saved state: the weight and the moments
TIMED_TOKENS = 4096


@dataclass(frozen=True)
class BuildEstimate:
    """Expected cost of a build; the seconds follow from a few rows that were timed."""

    seconds: float
    memory_bytes: int
    disk_bytes: int

    def require_room(self, folder: Path, device: torch.device, work: str) -> None:
        """Raise unless memory and disk suffice; `work` names what needs them."""
        require_memory(self.memory_bytes, device, work)
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if self.disk_bytes > free:
            raise TrainingError(
                f"{work} needs {self.disk_bytes / 2**30:.2f} GiB in {folder}, {free / 2**30:.2f} GiB are free; "
                "make room or name another folder"
            )


def estimate_training(
    model: Decoder,
    task: TrainingTask[Decoder],
    recipe: Recipe,
    target: ModelShape | None,
    *,
    runs: float,
    states: int,
    corpus_tokens: int,
) -> BuildEstimate:
    """Estimate training on the recipe's tokens `runs` times over, in `states` stages; the model is left unchanged."""
    micro_tokens = min(recipe.rows, recipe.micro_rows) * recipe.sequence
    shape = model.shape
    # Per token, in float32 numbers: what a block keeps for the backward pass, and the logits.
    activations = shape.layers * (14 * shape.d_model + 4 * shape.ffn) + shape.vocab * LOGITS_COPIES
    target_bytes = 4 * target.parameters if target else 0
    memory = TRAINED_BYTES * shape.parameters + target_bytes + 4 * micro_tokens * activations
    # A saved state of each stage and one that is being written, the model itself, and tokens of 2 bytes.
    disk = STATE_BYTES * shape.parameters * (states + 1) + 4 * shape.parameters + 2 * corpus_tokens
    speed = measure_tokens_per_s(model, task, recipe)
    return BuildEstimate(runs * recipe.tokens / speed, memory, disk)


def measure_tokens_per_s(model: Decoder, task: TrainingTask[Decoder], recipe: Recipe) -> float:
    """Time a forward and a backward pass over a few rows, after one pass to warm up."""
    model.requires_grad_(True)
    length = min(recipe.sequence, TIMED_TOKENS)
    rows = max(1, min(recipe.rows, recipe.micro_rows, TIMED_TOKENS // length))
    tokens = torch.zeros((rows, length + 1), dtype=torch.int64, device=model.device)
    task.begin(0, recipe.steps)
    for _ in range(2):
        begin_s = time.perf_counter()
        with task.active(model):
            task.loss(model, tokens).sum().backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin_s
    model.zero_grad(set_to_none=True)
    if task.learned is not None:
        task.learned.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return rows * length / seconds
