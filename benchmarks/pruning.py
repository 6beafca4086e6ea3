"""Methods that build a draft of a given shape, on equal tokens: importance, learned masks, random parts, from scratch.

First one of four learning rates is chosen for each shape and method, with one seed and the smaller budget. All training
tokens count, including those for trying sets of layers and for training masks. Drafts are judged on held-out prompts:
acceptance rate on text that the target sampled, greedy match and TAR at lookahead 5 on its greedy text, loss on the
corpus.

    python benchmarks/pruning.py --corpus DIR --work DIR [--parent zoo:target] [--workers 4]
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import trials
from trials import Trial, corpus_domains, judge, load_parent, new_trainer, recipe, run_all, spread

from shallowdraft.building.importance import Importance
from shallowdraft.building.pruning import carve, choose_parts
from shallowdraft.building.pruning_methods import prune_by_importance, prune_by_masks
from shallowdraft.building.recipe import usual_rate
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.trainer import Trainer
from shallowdraft.building.training import fresh_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

METHODS = (
    "importance + distillation",
    "learned masks",
    "learned masks + distillation",
    "random sub-network + distillation",
    "from scratch + distillation",
)
FACTORS = (0.5, 1.0, 2.0, 4.0)  # learning rates to try, as multiples of the usual rate for the width
PROBE = 0.05  # share of the tokens for trying each of up to five sets of layers


def run_trial(options: argparse.Namespace, trial: Trial, folder: str) -> dict[str, Any]:
    """Build a draft and judge it."""
    target = load_parent(options.parent)
    shape = parse_shape(trial["shape"], vocab=target.shape.vocab, context=target.shape.context)
    trainer = new_trainer(options, folder)
    draft = build(options, trial, trainer, target, shape)
    held_out = trainer.validate(draft, None, options.sequence, corpus_domains(trainer.store))
    return judge(draft, options) | held_out


def build(options: argparse.Namespace, trial: Trial, trainer: Trainer, target: Decoder, shape: ModelShape) -> Decoder:
    """Build a draft by the trial's method, with all of the trial's tokens."""
    method, tokens = trial["way"], trial["tokens"]
    rate = trial["factor"] * usual_rate(shape)
    full = recipe(options, tokens, rate, trial["seed"])
    if method.startswith("learned masks"):
        share = 0.5 if "distillation" in method else 1.0
        of_parent = trial["factor"] * usual_rate(target.shape)
        masks = recipe(options, round(share * tokens), of_parent, trial["seed"])
        draft = prune_by_masks(trainer, target, shape, masks, objective="forward-kl")
        remaining = tokens - round(share * tokens)
    elif method.startswith("importance"):
        draft = prune_by_importance(trainer, target, shape, full, objective="forward-kl", probe=PROBE)
        remaining = tokens - sum(trained_on(file) for file in trainer.folder.glob("layers-*/metrics.jsonl"))
    elif method.startswith("random"):
        draft, remaining = carve_at_random(target, shape, trial["seed"]), tokens
    else:
        draft, remaining = fresh_decoder(child_shape(target.shape, shape), trial["seed"]).to(target.device), tokens
    if remaining:
        trainer.train("distil", draft, Distillation(target), recipe(options, remaining, rate, trial["seed"]))
    return draft


def trained_on(metrics: Path) -> int:
    """Return the number of tokens of a stage."""
    return int(json.loads(metrics.read_text().splitlines()[-1])["tokens"])


def carve_at_random(target: Decoder, shape: ModelShape, seed: int) -> Decoder:
    """Carve a draft from random layers, heads, neurons and dimensions."""
    parent, draws = target.shape, torch.Generator().manual_seed(seed)
    scores = Importance(
        torch.rand(parent.layers, generator=draws),
        torch.rand(parent.layers, parent.heads, generator=draws),
        torch.rand(parent.layers, parent.ffn, generator=draws),
        torch.rand(parent.d_model, generator=draws),
    )
    layers = tuple(sorted(random.Random(seed).sample(range(parent.layers), shape.layers)))
    return carve(target, shape, choose_parts(parent, shape, scores, layers))


def best_factors(options: argparse.Namespace, file: Path) -> dict[tuple[str, str], float]:
    """Return the factor of the learning rate with the highest acceptance rate, for each shape and method."""
    pilots = run_all(
        run_trial,
        options,
        (
            {"shape": shape, "way": method, "tokens": options.budgets[0], "factor": factor, "seed": 100}
            for shape in options.shapes
            for method in METHODS
            for factor in FACTORS
        ),
        file,
    )
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for record in pilots:
        key = record["trial"]["shape"], record["trial"]["way"]
        if key not in best or record.get("acceptance", 0.0) > best[key].get("acceptance", 0.0):
            best[key] = record
    return {key: record["trial"]["factor"] for key, record in best.items()}


def matches(trial: Trial, shape: str, tokens: int, method: str) -> bool:
    return bool((trial["shape"], trial["tokens"], trial["way"]) == (shape, tokens, method))


def main() -> None:
    parser = trials.new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["2x256/4h/688", "2x192/3h/432"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[2_000_000, 8_000_000])
    options = parser.parse_args()
    trials.prepare(options)
    file = options.work / "pruning.jsonl"
    factors = best_factors(options, file)
    records = run_all(
        run_trial,
        options,
        (
            {"shape": shape, "way": method, "tokens": tokens, "factor": factors[shape, method], "seed": seed}
            for tokens in options.budgets
            for shape in options.shapes
            for method in METHODS
            for seed in range(options.seeds)
        ),
        file,
    )
    print(trials.provenance(options))
    print("mean ± standard deviation over seeds; rate: the best of four factors of the learning rate")
    for shape in options.shapes:
        for tokens in options.budgets:
            print(f"\n{shape}, {tokens:,} tokens")
            print(f"  {'':<36} {'acceptance':>15} {'greedy match':>15} {'TAR at 5':>15} {'loss':>15}  rate")
            for method in METHODS:
                seeds = [record for record in records if matches(record["trial"], shape, tokens, method)]
                cells = [spread(seeds, name) for name in ("acceptance", "greedy_match", "tar", "loss")]
                print(f"  {method:<36} " + " ".join(f"{cell:>15}" for cell in cells) + f"  {factors[shape, method]:g}")


if __name__ == "__main__":
    main()
