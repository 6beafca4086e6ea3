"""Steps that the stages of a build share."""

import copy
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shallowdraft.building import data_parallel
from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import write_continuations
from shallowdraft.building.output_folder import BuildResult, OutputFolder
from shallowdraft.building.pruning_methods import trial_tokens
from shallowdraft.building.recipe import DistillationOptions, Recipe, TrainingOptions
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.token_store import TokenStore, open_store, write_store
from shallowdraft.building.trainer import Trainer
from shallowdraft.distributed import is_first, join, leave
from shallowdraft.errors import TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, resolve_device
from shallowdraft.progress import Follow, Say

RATE_FACTORS = (0.5, 1.0, 2.0)  # learning rates that are tried, over the one that the width suggests
RATE_TRIAL = 0.1  # share of the tokens that each learning rate is tried on
MANY_PASSES = 4  # over the same text; up to here repeated text is as good as new text


def output_folder(
    out: str | Path, corpus: str | Path, options: TrainingOptions, own: Mapping[str, Any]
) -> OutputFolder:
    """Return the folder of a build with all options that change its result; `own` are those of one stage only."""
    return OutputFolder(Path(out), {**asdict(options), "corpus": str(corpus), **own})


def finished_earlier(folder: OutputFolder, say: Say) -> BuildResult | None:
    """Return the result of a run that was finished before."""
    result = folder.earlier_result()
    if result:
        say(f"{folder.path} is done")
    return result


def join_processes(folder: OutputFolder, device: str | None) -> torch.device:
    """Join the other processes of a torchrun; an unfinished run must have been started with the same options."""
    torch_device = join(resolve_device(device))
    folder.require_same_options()
    return torch_device


def new_trainer(
    folder: OutputFolder, corpus: str | Path, tokenizer: Any, options: TrainingOptions, follow: Follow, say: Say
) -> Trainer:
    """Return a trainer on the corpus, which has enough text for at least one sequence."""
    store = _token_store(folder, Path(corpus), tokenizer, say)
    Batches(store, rows=1, sequence=options.sequence, seed=0)  # raises if there is too little text
    measured = Batches(store, part="val", rows=1, sequence=options.sequence, seed=0).weights
    if unmeasured := [domain for domain in store.domains if domain not in measured]:
        domains = ", ".join(unmeasured)
        say(f"{domains}: too little held-out text for sequences of {options.sequence}, not in the figures")
    return Trainer(store, folder.work, follow=follow, say=say, compiled=options.compile, recompute=options.recompute)


def _token_store(folder: OutputFolder, corpus: Path, tokenizer: Any, say: Say) -> TokenStore:
    """Open the corpus as tokens, which the first process makes before training starts."""
    tokens = folder.work / "tokens"
    if is_first() and not folder.started:
        say(f"reading {corpus}")
        shutil.rmtree(tokens, ignore_errors=True)  # of a call that failed before training
        write_store(corpus, tokenizer, tokens)
    data_parallel.wait_for_all()
    store = open_store(tokens)
    store.require_tokenizer(tokenizer)
    return store


def distil(
    trainer: Trainer, folder: OutputFolder, draft: Decoder, target: Model, options: DistillationOptions, tokens: int
) -> tuple[Decoder, dict[str, float]]:
    """Distil on `tokens` tokens, at the best of three learning rates unless one is given; unshard the draft."""
    trainer = with_generated_text(trainer, folder, target, options)
    task = Distillation(target.decoder, options.objective, rollout=options.rollout, seed=options.seed)
    recipe = replace(options.recipe(draft.shape), tokens=max(1, tokens))
    if options.learning_rate is None and tokens:
        rates = tuple(factor * recipe.learning_rate for factor in RATE_FACTORS)
        accepted = sweep_learning_rates(trainer, draft, task, recipe, rates=rates, share=RATE_TRIAL)
        trainer.say(", ".join(f"learning rate {rate:.2g}: acceptance {share:.3f}" for rate, share in accepted.items()))
        recipe = replace(recipe, learning_rate=max(accepted, key=lambda rate: accepted[rate]))
    if tokens:
        trainer.train("distill", draft, task, recipe)
    held_out = trainer.validate(draft, target.decoder, options.sequence)
    return data_parallel.gather_model(draft), held_out


def with_generated_text(trainer: Trainer, folder: OutputFolder, target: Model, options: DistillationOptions) -> Trainer:
    """Let the target write text, if that is asked for, and return a trainer on the store with it."""
    if not options.generated:
        return trainer
    if (passes := options.generated_share * options.tokens / options.generated) > MANY_PASSES:
        trainer.say(
            f"the target's own text will be read {passes:.0f} times over; "
            "with a larger --generated or a smaller --generated-share there is less to learn by heart"
        )
    generated = folder.work / "generated"
    if is_first() and not (generated / "store.json").exists():
        prompt = max(1, options.sequence // 8)
        steps = write_continuations(
            trainer.store,
            target.decoder,
            generated,
            tokens=options.generated,
            prompt=prompt,
            length=options.sequence - prompt,
            rows=options.rows,
            seed=options.seed,
        )
        trainer.follow("the target writes", steps, options.generated)
    data_parallel.wait_for_all()
    return replace(trainer, store=open_store(generated), generated_share=options.generated_share)


def finish_model(folder: OutputFolder, model: Model, held_out: dict[str, float], begin_s: float) -> BuildResult:
    """Save a model with its result, and leave the other processes."""
    shape, seconds = model.shape, time.perf_counter() - begin_s
    about = {"shape": str(shape), "parameters": shape.parameters}
    description = f"{shape}, {shape.parameters:,} parameters"
    result = BuildResult(folder.path, description, about, shape.parameters, held_out, seconds)
    folder.finish(result, lambda: model.save(folder.path))
    leave()
    return result


def sweep_learning_rates(
    trainer: Trainer, model: Decoder, task: Distillation, recipe: Recipe, *, rates: tuple[float, ...], share: float
) -> dict[float, float]:
    """Train a copy of the model at each rate on a share of the tokens; return the acceptance rate that each gives.

    Rates at which training diverges are left out; if it does at all of them, that is raised.
    """
    accepted: dict[float, float] = {}
    failure: TrainingError | None = None
    for rate in rates:
        trial = copy.deepcopy(model)
        short = replace(recipe, tokens=trial_tokens(recipe, share), learning_rate=rate)
        try:
            trainer.train(f"rate-{rate:g}", trial, task, short)
        except TrainingError as error:
            failure = error
            continue
        accepted[rate] = trainer.validate(trial, task.target, recipe.sequence)["acceptance"]
    if failure and not accepted:
        raise failure
    return accepted
