"""Two ways from a parent to a draft of a given shape: by importance, and by learned masks."""

import copy
from dataclasses import replace

import torch

from shallowdraft.building import data_parallel
from shallowdraft.building.batches import Batches
from shallowdraft.building.importance import Importance, measure_importance
from shallowdraft.building.masks import MaskTraining
from shallowdraft.building.pruning import MOST_CANDIDATES, carve, choose_parts, layer_candidates
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.trainer import Trainer
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

FEWEST_TRIAL_STEPS = 10
IMPORTANCE_ROWS = 16


def prune_by_importance(
    trainer: Trainer,
    parent: Decoder,
    shape: ModelShape,
    recipe: Recipe,
    *,
    objective: str,
    probe: float,
    target: Decoder | None = None,
    sets: int = MOST_CANDIDATES,
) -> Decoder:
    """Carve up to `sets` sets of layers and distil each on a share `probe` of the tokens; return the best draft.

    The best is the one that the target accepts most of; the target is the parent unless another one is given.
    """
    target = target or parent
    importance = _measure_importance(trainer, parent, recipe)
    trial = replace(recipe, tokens=trial_tokens(recipe, probe))
    # Where few sets are tried, those with the first layer: without it a draft learns much more slowly.
    candidates = sorted(layer_candidates(importance, shape.layers), key=lambda layers: 0 not in layers)[:sets]
    carved: list[tuple[float, Decoder]] = []
    for layers in candidates:
        draft = carve(parent, shape, choose_parts(parent.shape, shape, importance, layers))
        if len(candidates) > 1 and probe:
            trainer.train("layers-" + "-".join(map(str, layers)), draft, Distillation(target, objective), trial)
        carved.append((trainer.validate(draft, target, recipe.sequence)["acceptance"], draft))
    _, best = max(carved, key=lambda candidate: candidate[0])
    return data_parallel.gather_model(best)


def prune_by_masks(trainer: Trainer, parent: Decoder, shape: ModelShape, recipe: Recipe, *, objective: str) -> Decoder:
    """Train weights and masks together, then carve out the parts that the masks keep."""
    model, task = copy.deepcopy(parent), MaskTraining(parent, shape, objective, seed=recipe.seed)
    trainer.train("masks", model, task, recipe, trainer.domain_balance(parent, recipe))
    return carve(data_parallel.gather_model(model), shape, task.masks.kept_parts())


def trial_tokens(recipe: Recipe, share: float) -> int:
    """Return the tokens of a trial: a share of the run's, but enough steps to compare two of them."""
    return min(recipe.tokens, max(round(share * recipe.tokens), FEWEST_TRIAL_STEPS * recipe.batch_tokens))


def _measure_importance(trainer: Trainer, parent: Decoder, recipe: Recipe) -> Importance:
    rows = IMPORTANCE_ROWS
    reader = Batches(trainer.store, rows=rows, sequence=recipe.sequence, seed=recipe.seed)
    count = max(1, trainer.importance_tokens // (rows * recipe.sequence))
    batches = (torch.from_numpy(reader.next()[:, :-1]).to(parent.device) for _ in range(count))
    return measure_importance(parent, batches)
