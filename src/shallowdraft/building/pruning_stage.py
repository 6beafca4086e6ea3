"""Pruning as a stage of building a draft: from a parent to a distilled draft of an exact shape."""

import copy
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shallowdraft.building.estimate import BuildEstimate, estimate_training
from shallowdraft.building.masks import MaskTraining, require_enough_steps
from shallowdraft.building.output_folder import BuildResult
from shallowdraft.building.pruning import MOST_CANDIDATES, require_reachable
from shallowdraft.building.pruning_methods import prune_by_importance, prune_by_masks
from shallowdraft.building.recipe import DistillationOptions, Recipe
from shallowdraft.building.stage_steps import (
    RATE_FACTORS,
    RATE_TRIAL,
    distil,
    finish_model,
    finished_earlier,
    join_processes,
    new_trainer,
    output_folder,
)
from shallowdraft.building.tasks import Distillation, require_objective
from shallowdraft.building.trainer import Trainer
from shallowdraft.building.training import fresh_decoder
from shallowdraft.distributed import leave
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import find_folder, read_shape, require_decoder_only
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import load
from shallowdraft.portable import require_portable
from shallowdraft.progress import Follow, Say, run_silently, say_nothing
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

Method = Literal["importance", "learned"]


def prune(
    *,
    parent: str,
    shape: str,
    corpus: str | Path,
    out: str | Path,
    options: DistillationOptions,
    method: Method = "importance",
    probe: float = 0.1,
    mask_tokens: float = 0.5,
    device: str | None = None,
    follow: Follow = run_silently,
    say: Say = say_nothing,
) -> BuildResult:
    """Carve a draft of exactly this shape out of a parent, and distil it on the parent.

    With `importance`, several sets of layers are distilled on a share `probe` of the tokens each, and the best one is
    trained on. With `learned`, masks are trained together with the parent's weights on a share `mask_tokens`.
    """
    begin_s = time.perf_counter()
    plan = _Pruning(parent, shape, method, probe, mask_tokens, options)
    folder = output_folder(out, corpus, options, plan.own_options | {"dtype": None})
    if result := finished_earlier(folder, say):
        return result
    plan.require_possible()
    torch_device = join_processes(folder, device)
    model = load(parent, "float32", torch_device, trainable=True)
    say(plan.costs)
    trainer = new_trainer(folder, corpus, model.require_tokenizer(), options, follow, say)
    estimate = plan.estimate(trainer, model.decoder)
    say(_sentence(estimate))
    estimate.require_room(folder.work, torch_device, f"pruning to {plan.child}")
    folder.start()
    carved = plan.carve(trainer, model.decoder)
    decoder, held_out = distil(trainer, folder, carved, model, options, options.tokens - plan.tokens_for_masks)
    return finish_model(folder, replace(model, name=str(out), decoder=decoder), held_out, begin_s)


@dataclass(frozen=True)
class PruningEstimate:
    """Shape and expected cost of a pruned draft."""

    shape: str
    parameters: int
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_pruning(
    *,
    parent: str,
    shape: str,
    corpus: str | Path,
    out: str | Path,
    options: DistillationOptions,
    method: Method = "importance",
    probe: float = 0.1,
    mask_tokens: float = 0.5,
    device: str | None = None,
    follow: Follow = run_silently,
    say: Say = say_nothing,
) -> PruningEstimate:
    """Estimate what `prune` with the same arguments takes; raise where it would. Nothing is written to `out`."""
    plan = _Pruning(parent, shape, method, probe, mask_tokens, options)
    plan.require_possible()
    with tempfile.TemporaryDirectory() as temporary:
        folder = output_folder(temporary, corpus, options, plan.own_options)
        torch_device = join_processes(folder, device)
        model = load(parent, "float32", torch_device, trainable=True)
        say(plan.costs)
        trainer = new_trainer(folder, corpus, model.require_tokenizer(), options, follow, say)
        estimate = plan.estimate(trainer, model.decoder)
        say(_sentence(estimate))
        estimate.require_room(Path(out) / "training", torch_device, f"pruning to {plan.child}")
        leave()
    return PruningEstimate(str(plan.child), plan.child.parameters, **asdict(estimate))


@dataclass(frozen=True)
class _Pruning:
    """A pruning job: parent, shape, method and options."""

    parent: str
    shape: str
    method: Method
    probe: float
    mask_tokens: float
    options: DistillationOptions

    @property
    def own_options(self) -> dict[str, Any]:
        """Options beside those of training, for the run's file."""
        return {name: getattr(self, name) for name in ("parent", "shape", "method", "probe", "mask_tokens")}

    @cached_property
    def parent_shape(self) -> ModelShape:
        return read_shape(find_folder(self.parent))

    @property
    def asked(self) -> ModelShape:
        """The shape as it was asked for; heads have the parent's width unless another is named."""
        parent = self.parent_shape
        asked = parse_shape(self.shape, vocab=parent.vocab, context=parent.context)
        return asked if "hd" in self.shape else replace(asked, head_dim=parent.head_dim)

    @property
    def child(self) -> ModelShape:
        """The same shape in the parent's family."""
        return child_shape(self.parent_shape, self.asked)

    @property
    def costs(self) -> str:
        """A sentence on what the draft would cost beside its parent."""
        parent, child = self.parent_shape, self.child
        return (
            f"{parent} ({parent.parameters:,} parameters) -> {child} ({child.parameters:,}): reachable; a pass reads "
            f"{child.pass_bytes() / 1e6:,.1f} MB of float32 weights, {child.pass_bytes() / parent.pass_bytes():.0%} of "
            f"the parent's, through {child.layers} of {parent.layers} layers"
        )

    @property
    def tokens_for_masks(self) -> int:
        return round(self.options.tokens * self.mask_tokens) if self.method == "learned" else 0

    @property
    def mask_recipe(self) -> Recipe:
        """The recipe for masks, which are trained with all of the parent's weights."""
        return replace(self.options.recipe(self.parent_shape), tokens=self.tokens_for_masks)

    def require_possible(self) -> None:
        """Raise if options or shapes are wrong, before any weights are read."""
        if not (0 <= self.probe <= 1 and 0 < self.mask_tokens <= 1):
            raise OptionError("--probe is a share from 0 to 1, --mask-tokens one above 0 and up to 1")
        require_decoder_only(self.parent)
        require_reachable(self.parent_shape, self.asked)
        require_portable(self.child, self.parent_shape)
        if self.method == "learned":
            require_enough_steps(self.mask_recipe.steps)
        require_objective(self.options.objective, self.options.rollout)

    def estimate(self, trainer: Trainer, parent: Decoder) -> BuildEstimate:
        """Estimate all stages together."""
        recipe, corpus_tokens = self.options.recipe(self.child), trainer.store.tokens_in_all
        draft = fresh_decoder(self.child, 0).to(parent.device)
        rates = len(RATE_FACTORS) if self.options.learning_rate is None else 0
        distilling = 1.0 + rates * RATE_TRIAL  # runs over the tokens, trials among them
        if self.method == "importance":
            runs, states = distilling + MOST_CANDIDATES * self.probe, MOST_CANDIDATES + rates + 1
            return estimate_training(
                draft,
                Distillation(parent),
                recipe,
                parent.shape,
                runs=runs,
                states=states,
                corpus_tokens=corpus_tokens,
            )
        masks = estimate_training(
            copy.deepcopy(parent),
            MaskTraining(parent, self.child),
            recipe,
            parent.shape,
            runs=self.mask_tokens,
            states=1,
            corpus_tokens=corpus_tokens,
        )
        runs = distilling * (1 - self.mask_tokens)
        distillation = estimate_training(
            draft, Distillation(parent), recipe, parent.shape, runs=runs, states=rates + 1, corpus_tokens=0
        )
        # One stage after the other: times and files add up, and the parent under masks needs most memory.
        disk = masks.disk_bytes + distillation.disk_bytes
        return replace(masks, seconds=masks.seconds + distillation.seconds, disk_bytes=disk)

    def carve(self, trainer: Trainer, parent: Decoder) -> Decoder:
        """Return the draft, not yet distilled on all tokens."""
        objective = self.options.objective
        if self.method == "importance":
            recipe = self.options.recipe(self.asked)
            return prune_by_importance(trainer, parent, self.asked, recipe, objective=objective, probe=self.probe)
        return prune_by_masks(trainer, parent, self.asked, self.mask_recipe, objective=objective)


def _sentence(estimate: BuildEstimate) -> str:
    duration = f"{estimate.seconds / 60:,.0f} min" if estimate.seconds >= 60 else f"{estimate.seconds:.0f} s"
    sizes = f"{estimate.memory_bytes / 2**30:.2f} GiB of memory, {estimate.disk_bytes / 2**30:.2f} GiB of disk"
    return f"about {duration}, {sizes}"
