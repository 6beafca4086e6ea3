"""The training loop: pre-training, pruning by learned masks and distillation, one loop in plain torch.

`train` yields a record a step; its caller shows progress. Everything that the rest of a run depends on (weights,
optimiser, data position) is in one file that is replaced as a whole, so a run that was killed at any moment continues
from there to the very same weights.

Shapes: B batch rows, T tokens.
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
from shallowdraft.building.domain_weights import DomainBalance
from shallowdraft.building.losses import acceptance, tar_from_runs
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.run_state import RunState
from shallowdraft.building.tasks import Trainable, TrainingTask, cross_entropy
from shallowdraft.distributed import processes
from shallowdraft.errors import TrainingError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

SAVE_EVERY_S = 30.0
SAVING_SHARE = 0.05  # largest share of the time that goes into the saves that SAVE_EVERY_S asks for
DIVERGED = 2.0  # a loss above this multiple of the best one is too high
PATIENCE = 20  # steps in a row with a loss that is too high, after which training has diverged
VALIDATION_LOOKAHEAD = 5


@dataclass(frozen=True)
class TrainingStep:
    """Figures of a step; a line of metrics.jsonl."""

    step: int
    """Number of the step, from 1."""
    steps: int
    loss: float
    gradient_norm: float
    """Norm of the gradient before it was clipped."""
    learning_rate: float
    tokens: int
    """Tokens read since the run began."""
    tokens_per_s: float
    details: dict[str, float]
    """Figures that the task adds."""


def train(
    model: Trainable,
    task: TrainingTask[Trainable],
    batches: Batches,
    recipe: Recipe,
    folder: Path,
    *,
    balance: DomainBalance | None = None,
    compiled: bool = False,
    recompute: bool = False,
) -> Generator[TrainingStep, None, None]:
    """Train a model in place and yield a record a step; an unfinished run of the same kind in `folder` is continued.

    The state is saved after every `save_every`-th step, after the first step that ends `SAVE_EVERY_S` seconds after
    the last save, and, in a single process, when this iterator is closed. In several processes the first one's clock
    decides, and closing saves nothing, because they may be closed after different steps.

    `compiled` puts the loss through torch.compile; `recompute` saves memory by computing each block's activations
    again in the backward pass.
    """
    model.requires_grad_(True).train()
    if isinstance(model, Decoder):
        model.recompute = recompute
        data_parallel.shard(model)
    optimiser = _new_optimiser(model, task, recipe)
    description = {"shape": model.shape.to_config(), **task.description, "recipe": asdict(recipe)}
    run = RunState(folder, model, task.learned, optimiser, batches, description)
    loss_of = torch.compile(task.loss) if compiled else task.loss
    first, best = run.resume()
    watch = _LossWatch(best, may_rise=task.may_rise)
    for step in range(first, recipe.steps):
        begin_s = time.perf_counter()
        task.begin(step, recipe.steps)
        optimiser.param_groups[0]["lr"] = recipe.rate(step)
        loss, norm = _compute_gradients(model, task, loss_of, batches, recipe)
        watch.add(loss)
        # Checked before the optimiser's step, so that no weight is ever changed by a gradient that is not finite.
        if watch.diverged or not math.isfinite(loss + norm):
            raise TrainingError(
                f"the loss is {loss:.3g} after {step} steps, the best was {watch.best:.3g}: training diverged; "
                f"start again with a learning rate below {recipe.learning_rate:g} (last good state: {run.path})"
            )
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        details = task.end()
        if balance is not None and isinstance(model, Decoder) and (step + 1) % balance.every == 0:
            details |= _rebalance(balance, model, task, batches)
        record = _record(step, recipe, loss, norm, time.perf_counter() - begin_s, details)
        run.log(asdict(record))
        # No state is saved while the loss is too high: if training has diverged, the last saved one is still good.
        last = step + 1 == recipe.steps
        if saved := last or (_is_due(run, step, recipe, model.device) and not watch.too_high):
            run.save(step + 1, watch.best)
        try:
            yield record
        except GeneratorExit:
            if not saved and not watch.too_high and processes() == 1:
                run.save(step + 1, watch.best)
            raise
    model.requires_grad_(False).eval()


class _LossWatch:
    """The best loss of a run, and for how many steps in a row the loss has been far above it."""

    def __init__(self, best: float, *, may_rise: bool) -> None:
        self.best, self._may_rise = best, may_rise
        self._high_steps = 0

    def add(self, loss: float) -> None:
        """Take note of a step's loss."""
        self._high_steps = self._high_steps + 1 if loss > DIVERGED * self.best and not self._may_rise else 0
        self.best = min(self.best, loss)

    @property
    def too_high(self) -> bool:
        """Whether the last loss was far above the best."""
        return self._high_steps > 0

    @property
    def diverged(self) -> bool:
        """Whether the loss has been too high for longer than a bad batch explains."""
        return self._high_steps >= PATIENCE


def _new_optimiser(model: Trainable, task: TrainingTask[Trainable], recipe: Recipe) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if task.learned is not None:
        # Only group 0 follows the recipe's rate; this one's is constant, and decay would pull log a of masks to 0.
        rate = task.learned_rate(recipe.steps)
        groups.append({"params": list(task.learned.parameters()), "lr": rate, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)


def _compute_gradients(
    model: Trainable,
    task: TrainingTask[Trainable],
    loss_of: Callable[[Trainable, Tensor], Tensor],
    batches: Batches,
    recipe: Recipe,
) -> tuple[float, float]:
    """Compute the clipped gradient of the next batch; return its mean loss and the norm before clipping."""
    tokens = torch.from_numpy(data_parallel.rows_of_this_process(batches.next())).to(model.device)
    loss = _accumulate(model, task, loss_of, tokens, recipe)
    if (penalty := task.penalty()) is not None:
        penalty.backward()  # once a batch, whatever the number of micro-batches
    data_parallel.average_gradients(task.learned)
    norm = data_parallel.unshard(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)).item()
    return loss, norm


def _accumulate(
    model: Trainable,
    task: TrainingTask[Trainable],
    loss_of: Callable[[Trainable, Tensor], Tensor],
    tokens: Tensor,
    recipe: Recipe,
) -> float:
    """Add up the gradients of this process's rows [B, T + 1], a micro-batch at a time; return the batch's mean loss."""
    total = torch.zeros((), device=tokens.device)
    for rows in tokens.split(recipe.micro_rows):
        with task.active(model):
            # Weights stay in float32; on CUDA products are in bfloat16, which needs no scaling of the loss.
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
                losses = loss_of(model, rows)
            # FSDP averages gradients over N processes, so each counts its own rows N times.
            share = losses.float().sum() * processes() / (recipe.rows * recipe.sequence)
            share.backward()
        total += share.detach()
    return data_parallel.mean_over_processes(total)


def _rebalance(balance: DomainBalance, model: Decoder, task: TrainingTask[Any], batches: Batches) -> dict[str, float]:
    """Measure how far each domain lags and move the batches' weights; return the figures for the metrics."""
    with task.active(model):
        losses = balance.losses(model)
    batches.weights = balance.update(batches.weights, losses)
    figures = {"loss": losses, "reference": balance.reference, "weight": batches.weights}
    return {f"{name}_{domain}": value for name, values in figures.items() for domain, value in values.items()}


def _record(
    step: int, recipe: Recipe, loss: float, norm: float, seconds: float, details: dict[str, float]
) -> TrainingStep:
    batch = recipe.rows * recipe.sequence
    rate, done = recipe.rate(step), (step + 1) * batch
    return TrainingStep(step + 1, recipe.steps, loss, norm, rate, done, batch / seconds, details)


def _is_due(run: RunState, step: int, recipe: Recipe, device: torch.device) -> bool:
    """Return whether to save after this step, the same in all processes."""
    if (step + 1) % recipe.save_every == 0:
        return True
    return data_parallel.decision_of_the_first(run.is_due(SAVE_EVERY_S, SAVING_SHARE), device)


@torch.no_grad()
def validate(model: Decoder, target: Decoder | None, batches: Batches, count: int) -> dict[str, float]:
    """Return means over `count` held-out batches.

    They are the loss, in nats per token, and with a target: the acceptance rate under sampling, the share of tokens
    on which the two agree greedily, and greedy TAR at lookahead `VALIDATION_LOOKAHEAD`.
    """
    sums: dict[str, float] = {}
    for _ in range(count):
        tokens = torch.from_numpy(batches.next()).to(model.device)
        draft_logits = model.logits(tokens[:, :-1])
        # Tokens that the draft's vocabulary does not have count no loss, so they are not counted in the mean either.
        counted = int((tokens[:, 1:] < draft_logits.shape[-1]).sum())
        figures = {"loss": float(cross_entropy(draft_logits, tokens).sum()) / max(1, counted)}
        if target is not None:
            target_logits = target.logits(tokens[:, :-1])
            matches = target_logits.argmax(-1) == draft_logits.argmax(-1)
            figures["acceptance"] = float(acceptance(target_logits, draft_logits).mean())
            figures["greedy_match"] = float(matches.float().mean())
            figures["greedy_tar"] = tar_from_runs(matches, VALIDATION_LOOKAHEAD)
        sums = {name: sums.get(name, 0.0) + value for name, value in figures.items()}
    return {name: value / count for name, value in sums.items()}


def fresh_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Make a decoder to pre-train.

    Weights are normal with a standard deviation of sqrt(2 / 5 / inputs), 0.02 for embeddings and head. What a block
    adds to the residual stream is smaller by sqrt(2 layers), so that its variance does not grow with depth.
    """
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, parts in shape.layout().items():
        size = (sum(part.size[0] for part in parts), *parts[0].size[1:])
        if len(size) == 1:
            state[name] = torch.ones(size) if name.endswith("norm.weight") else torch.zeros(size)
            continue
        module = name.split(".")[-2]
        deviation = 0.02 if module in ("embed", "positions", "head") else math.sqrt(0.4 / size[1])
        deviation /= math.sqrt(2 * shape.layers) if module in ("out", "down") else 1
        state[name] = torch.randn(size, generator=random) * deviation
    return assemble(shape, state)
