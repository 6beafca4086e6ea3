"""The training loop: pre-training and distillation, one loop in plain torch.

`train` yields a record a step; whoever calls it shows progress. Everything that the rest of a run depends on (weights,
optimiser, data position) is written to one file that is replaced whole, so a run killed at any moment goes on from
there to the very same weights.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shallowdraft.building.corpus import Batches
from shallowdraft.building.losses import OBJECTIVES, acceptance, tar_from_runs
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes import ModelShape

DIVERGED = 2.0  # times the best loss so far
PATIENCE = 20  # steps in a row before that counts
VALIDATION_LOOKAHEAD = 5


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    tokens: int
    batch_tokens: int = 16384
    sequence: int = 256
    micro_rows: int = 64
    """Sequences that are held in memory at once; a batch is accumulated from as many as it takes."""
    learning_rate: float = 1e-3
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    final_rate: float = 0.1
    """What it decays to, as a share, along a cosine."""
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    save_every: int = 50

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch_tokens, self.sequence, self.micro_rows, self.save_every) < 1:
            raise OptionError(f"tokens, batch, sequence, rows and save_every must be at least 1, got {self}")
        if self.batch_tokens < self.sequence:
            raise OptionError(f"a batch of {self.batch_tokens:,} tokens holds no sequence of {self.sequence:,}")
        if not 0 < self.learning_rate < 1:
            raise OptionError(f"learning_rate is {self.learning_rate}; it must be between 0 and 1")

    @property
    def rows(self) -> int:
        return self.batch_tokens // self.sequence

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.rows * self.sequence))

    def rate(self, step: int) -> float:
        """Learning rate: a linear rise, then half a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)


class Job(Protocol):
    """What is being learned."""

    description: dict[str, Any]
    """What makes two runs the same run."""

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        """The loss [B, T] of predicting tokens [B, T + 1] from those before them."""


class Pretrain:
    """Next-token cross-entropy on a corpus."""

    def __init__(self) -> None:
        self.description: dict[str, Any] = {"job": "pretrain"}

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        return _cross_entropy(model.head(model.read(tokens[:, :-1])), tokens)


class Distil:
    """The target's distributions, by one of the objectives, or the corpus's own tokens with `cross-entropy`."""

    def __init__(self, target: Decoder, objective: str = "forward-kl") -> None:
        if objective != "cross-entropy" and objective not in OBJECTIVES:
            raise OptionError(f"objective {objective!r} is unknown; use {', '.join([*OBJECTIVES, 'cross-entropy'])}")
        self.target, self.objective = target, objective
        self.description: dict[str, Any] = {"job": "distil", "objective": objective, "target": str(target.shape)}

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        draft = model.head(model.read(tokens[:, :-1]))
        if self.objective == "cross-entropy":
            return _cross_entropy(draft, tokens)
        with torch.no_grad():
            target = self.target.head(self.target.read(tokens[:, :-1]))
        return OBJECTIVES[self.objective](target[..., : draft.shape[-1]], draft)


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl."""

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_s: float


def train(model: Decoder, job: Job, batches: Batches, recipe: Recipe, folder: Path) -> Iterator[Step]:
    """Train in place, going on from `folder` if it holds an unfinished run of the same kind; one record a step."""
    model.requires_grad_(True).train()
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
    run = _Checkpoint(folder, model, optimiser, batches, _description(model.shape, job, recipe))
    first, best, worse = run.resume(), math.inf, 0
    for step in range(first, recipe.steps):
        begin_s = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(step)
        loss = _accumulate(model, job, torch.from_numpy(batches.next()).to(model.device), recipe.micro_rows)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip))
        best, worse = min(best, loss), worse + 1 if loss > DIVERGED * best else 0
        if not math.isfinite(loss + norm) or worse >= PATIENCE:
            raise TrainingError(
                f"the loss is {loss:.3g} after {step} steps, the best was {best:.3g}: training diverged; "
                f"start again with a learning rate below {recipe.learning_rate:g} (last good state: {run.path})"
            )
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        tokens = (step + 1) * recipe.rows * recipe.sequence
        speed = recipe.rows * recipe.sequence / (time.perf_counter() - begin_s)
        record = Step(step + 1, recipe.steps, loss, norm, recipe.rate(step), tokens, speed)
        run.log(record)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            run.save(step + 1)
        yield record
    model.requires_grad_(False).eval()


def _accumulate(model: Decoder, job: Job, tokens: Tensor, micro_rows: int) -> float:
    """Gradients of the mean loss of a batch [B, T + 1], some rows at a time; that mean."""
    total = torch.zeros((), device=tokens.device)
    for rows in tokens.split(micro_rows):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            losses = job.loss(model, rows)
        share = losses.float().sum() / (tokens.shape[0] * (tokens.shape[1] - 1))
        share.backward()
        total += share.detach()
    return float(total)


@torch.no_grad()
def validate(model: Decoder, target: Decoder | None, batches: Batches, count: int) -> dict[str, float]:
    """Loss on held-out text and, with a target, how it would accept: sampled, greedily, and tokens an iteration."""
    sums: dict[str, float] = {}
    for _ in range(count):
        tokens = torch.from_numpy(batches.next()).to(model.device)
        draft = model.head(model.read(tokens[:, :-1]))
        found = {"loss": float(_cross_entropy(draft, tokens).mean())}
        if target is not None:
            logits = target.head(target.read(tokens[:, :-1]))[..., : draft.shape[-1]]
            matches = logits.argmax(-1) == draft.argmax(-1)
            found["acceptance"] = float(acceptance(logits, draft).mean())
            found["greedy_match"] = float(matches.float().mean())
            found["greedy_tar"] = tar_from_runs(matches, VALIDATION_LOOKAHEAD)
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    return {name: value / count for name, value in sums.items()}


def fresh_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Weights to start pre-training from: normal, 0.02 wide, narrower where a block writes to the residual stream."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, parts in shape.layout().items():
        size = (sum(part.size[0] for part in parts), *parts[0].size[1:])
        if len(size) == 1:
            state[name] = torch.ones(size) if name.endswith("norm.weight") else torch.zeros(size)
            continue
        writes = name.split(".")[-2] in ("out", "down")
        state[name] = torch.randn(size, generator=random) * (0.02 / math.sqrt(2 * shape.layers) if writes else 0.02)
    return assemble(shape, state)


class _Checkpoint:
    """The state of a run on disk: `state.pt`, replaced whole, and the metrics up to it."""

    def __init__(
        self,
        folder: Path,
        model: Decoder,
        optimiser: torch.optim.Optimizer,
        batches: Batches,
        description: Mapping[str, Any],
    ) -> None:
        self.path, self._metrics = folder / "state.pt", folder / "metrics.jsonl"
        self._model, self._optimiser, self._batches = model, optimiser, batches
        self._description = dict(description)
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        state = {
            "description": self._description,
            "step": step,
            "model": self._model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "batches": self._batches.state,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def resume(self) -> int:
        """Load what was saved, if anything; the step to go on with."""
        if not self.path.exists():
            self._metrics.unlink(missing_ok=True)
            return 0
        state = torch.load(self.path, map_location=self._model.device, weights_only=True)
        if state["description"] != self._description:
            raise TrainingError(f"{self.path} belongs to another run; name another folder, or remove it to start anew")
        self._model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._batches.restore(state["batches"])
        self._forget_after(state["step"])
        return int(state["step"])

    def log(self, record: Step) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def _forget_after(self, step: int) -> None:
        """Steps after the saved one are done again; their records would stand there twice."""
        lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True) if self._metrics.exists() else []
        kept = self._metrics.with_suffix(".partial")
        kept.write_text("".join(lines[:step]), encoding="utf-8")
        kept.replace(self._metrics)


def _description(shape: ModelShape, job: Job, recipe: Recipe) -> dict[str, Any]:
    return {"shape": shape.to_config(), **job.description, "recipe": asdict(recipe)}


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        tokens.shape[0], -1
    )
