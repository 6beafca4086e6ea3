"""The training loop: pre-training, pruning by learned masks and distillation, one loop in plain torch.

`train` yields a record a step; whoever calls it shows progress. Everything that the rest of a run depends on (weights,
optimiser, data position) is written to one file that is replaced whole, so a run killed at any moment goes on from
there to the very same weights.
"""

import math
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft.building import data_parallel
from shallowdraft.building.batches import Batches
from shallowdraft.building.domain_weights import Balance
from shallowdraft.building.jobs import Job, Trained, cross_entropy
from shallowdraft.building.losses import acceptance, tar_from_runs
from shallowdraft.building.run_state import RunState
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

SAVE_EVERY_S = 30.0
SAVING_SHARE = 0.05  # of the time at most, where it is saved because time has passed
DIVERGED = 2.0  # times the best loss so far
PATIENCE = 20  # steps in a row before that counts
VALIDATION_LOOKAHEAD = 5
LOGITS_AT_ONCE = 6  # float32 copies of a micro-batch's logits: both models', their log-softmax, gradients
LOGITS_BYTES = 2**32


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
        for name in ("tokens", "batch_tokens", "sequence", "micro_rows", "save_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be at least 1")
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
        """Learning rate of a step: a linear rise, then half a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)


def rows_at_once(shape: ModelShape, sequence: int, copies: int = LOGITS_AT_ONCE) -> int:
    """Sequences whose logits, so many float32 copies of them, take no more than `LOGITS_BYTES`."""
    return max(1, min(64, LOGITS_BYTES // (4 * copies * sequence * shape.vocab)))


def usual_rate(shape: ModelShape) -> float:
    """A learning rate to start from: wider models need smaller ones."""
    return min(4e-3, max(1e-4, 0.4 / shape.d_model))


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
    details: dict[str, float]
    """What the job says of it."""


def train(
    model: Trained,
    job: Job[Trained],
    batches: Batches,
    recipe: Recipe,
    folder: Path,
    *,
    balance: Balance | None = None,
    compiled: bool = False,
    recompute: bool = False,
) -> Generator[Step, None, None]:
    """Train in place, going on from `folder` if it holds an unfinished run of the same kind; one record a step.

    Saved are every `save_every`-th step, the first one after `SAVE_EVERY_S` seconds, and the last one taken before this
    iterator is closed; of several processes the first one's clock counts, and closing saves nothing.

    `compiled` puts the loss through torch.compile; `recompute` saves memory by computing each block's activations
    again on the way back.
    """
    model.requires_grad_(True).train()
    if isinstance(model, Decoder):
        model.recompute = recompute
        data_parallel.shard(model)
    optimiser = _optimiser(model, job, recipe)
    description = {"shape": model.shape.to_config(), **job.description, "recipe": asdict(recipe)}
    run = RunState(folder, model, job.learned, optimiser, batches, description)
    loss_of = torch.compile(job.loss) if compiled else job.loss
    (first, best), worse = run.resume(), 0
    for step in range(first, recipe.steps):
        begin_s = time.perf_counter()
        job.begin(step, recipe.steps)
        optimiser.param_groups[0]["lr"] = recipe.rate(step)
        tokens = torch.from_numpy(data_parallel.own_rows(batches.next())).to(model.device)
        loss = _accumulate(job, loss_of, model, tokens, recipe)
        if (penalty := job.penalty()) is not None:
            penalty.backward()
        data_parallel.average_gradients(job.learned)
        norm = data_parallel.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)).item()
        best, worse = min(best, loss), worse + 1 if loss > DIVERGED * best and not job.may_rise else 0
        if not math.isfinite(loss + norm) or worse >= PATIENCE:
            raise TrainingError(
                f"the loss is {loss:.3g} after {step} steps, the best was {best:.3g}: training diverged; "
                f"start again with a learning rate below {recipe.learning_rate:g} (last good state: {run.path})"
            )
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        details = job.end()
        if balance is not None and isinstance(model, Decoder) and (step + 1) % balance.every == 0:
            with job.active(model):
                losses = balance.losses(model)
            batches.weights = balance.update(batches.weights, losses)
            moved = {"loss": losses, "reference": balance.reference, "weight": batches.weights}
            details |= {f"{name}_{domain}": value for name, values in moved.items() for domain, value in values.items()}
        done = (step + 1) * recipe.rows * recipe.sequence
        speed = recipe.rows * recipe.sequence / (time.perf_counter() - begin_s)
        record = Step(step + 1, recipe.steps, loss, norm, recipe.rate(step), done, speed, details)
        run.log(asdict(record))
        due = (step + 1) % recipe.save_every == 0 or data_parallel.agreed(
            run.due(SAVE_EVERY_S, SAVING_SHARE), model.device
        )
        if saved := step + 1 == recipe.steps or (due and not worse):
            run.save(step + 1, best)
        try:
            yield record
        except GeneratorExit:
            if not saved and not worse and data_parallel.processes() == 1:
                run.save(step + 1, best)
            raise
    model.requires_grad_(False).eval()


def _optimiser(model: Trained, job: Job[Trained], recipe: Recipe) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if job.learned is not None:
        rate = job.learned_rate(recipe.steps)
        groups.append({"params": list(job.learned.parameters()), "lr": rate, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)


def _accumulate(
    job: Job[Trained], loss_of: Callable[[Trained, Tensor], Tensor], model: Trained, tokens: Tensor, recipe: Recipe
) -> float:
    """Gradients of the mean loss of a batch, some rows [B, T + 1] of this process at a time; that mean."""
    total = torch.zeros((), device=tokens.device)
    for rows in tokens.split(recipe.micro_rows):
        with job.active(model):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
                losses = loss_of(model, rows)
            # Gradients are averaged over processes, so each counts its own rows that many times.
            share = losses.float().sum() * data_parallel.processes() / (recipe.rows * recipe.sequence)
            share.backward()
        total += share.detach()
    return data_parallel.mean(total)


@torch.no_grad()
def validate(model: Decoder, target: Decoder | None, batches: Batches, count: int) -> dict[str, float]:
    """Loss on held-out text and, with a target, how it would accept: sampled, greedily, and tokens an iteration."""
    sums: dict[str, float] = {}
    for _ in range(count):
        tokens = torch.from_numpy(batches.next()).to(model.device)
        draft = model.logits(tokens[:, :-1])
        known = int((tokens[:, 1:] < draft.shape[-1]).sum())
        found = {"loss": float(cross_entropy(draft, tokens).sum()) / max(1, known)}
        if target is not None:
            logits = target.logits(tokens[:, :-1])
            matches = logits.argmax(-1) == draft.argmax(-1)
            found["acceptance"] = float(acceptance(logits, draft).mean())
            found["greedy_match"] = float(matches.float().mean())
            found["greedy_tar"] = tar_from_runs(matches, VALIDATION_LOOKAHEAD)
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    return {name: value / count for name, value in sums.items()}


def fresh_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Weights to start pre-training from: normal, sqrt(2 / 5 / inputs) wide, narrower where a block writes back."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, parts in shape.layout().items():
        size = (sum(part.size[0] for part in parts), *parts[0].size[1:])
        if len(size) == 1:
            state[name] = torch.ones(size) if name.endswith("norm.weight") else torch.zeros(size)
            continue
        module = name.split(".")[-2]
        width = 0.02 if module in ("embed", "positions", "head") else math.sqrt(0.4 / size[1])
        width /= math.sqrt(2 * shape.layers) if module in ("out", "down") else 1
        state[name] = torch.randn(size, generator=random) * width
    return assemble(shape, state)
