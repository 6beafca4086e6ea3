"""Ways to a draft of a given shape, on equal tokens: pruning by importance, by learned masks, at random, from scratch.

For each shape and way the learning rate is chosen first, of four, with one seed and the smaller budget. All tokens
count: those with which candidate layers are tried, and those on which masks are trained. Judged on held-out prompts:
acceptance on text that the target drew, greedy match and TAR at lookahead 5 on its greedy text, loss on the corpus.

    python benchmarks/pruning.py --corpus DIR --work DIR [--parent zoo:target] [--workers 4]
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import trials
from trials import Trial, corpus_domains, judge, parent, recipe, run_all, spread, workshop

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

WAYS = (
    "importance + distillation",
    "learned masks",
    "learned masks + distillation",
    "random sub-network + distillation",
    "from scratch + distillation",
)
FACTORS = (0.5, 1.0, 2.0, 4.0)  # learning rates that are tried, over what the width suggests
PROBE = 0.05  # of the tokens, for each of up to five candidate sets of layers


def one(given: argparse.Namespace, trial: Trial, folder: str) -> dict[str, Any]:
    """Build a draft and judge it."""
    target = parent(given.parent)
    wanted = parse_shape(trial["shape"], vocab=target.shape.vocab, context=target.shape.context)
    trainer = workshop(given, folder)
    draft = build(given, trial, trainer, target, wanted)
    held_out = trainer.validate(draft, None, given.sequence, corpus_domains(trainer.store))
    return judge(draft, given) | held_out


def build(given: argparse.Namespace, trial: Trial, trainer: Trainer, target: Decoder, wanted: ModelShape) -> Decoder:
    candidate, tokens = trial["way"], trial["tokens"]
    rate = trial["factor"] * usual_rate(wanted)
    whole = recipe(given, tokens, rate, trial["seed"])
    if candidate.startswith("learned masks"):
        share = 0.5 if "distillation" in candidate else 1.0
        of_parent = trial["factor"] * usual_rate(target.shape)
        masks = recipe(given, round(share * tokens), of_parent, trial["seed"])
        draft = prune_by_masks(trainer, target, wanted, masks, objective="forward-kl")
        left = tokens - round(share * tokens)
    elif candidate.startswith("importance"):
        draft = prune_by_importance(trainer, target, wanted, whole, objective="forward-kl", probe=PROBE)
        left = tokens - sum(trained_on(file) for file in trainer.folder.glob("layers-*/metrics.jsonl"))
    elif candidate.startswith("random"):
        draft, left = at_random(target, wanted, trial["seed"]), tokens
    else:
        draft, left = fresh_decoder(child_shape(target.shape, wanted), trial["seed"]).to(target.device), tokens
    if left:
        trainer.train("distil", draft, Distillation(target), recipe(given, left, rate, trial["seed"]))
    return draft


def trained_on(metrics: Path) -> int:
    """Tokens of a stage."""
    return int(json.loads(metrics.read_text().splitlines()[-1])["tokens"])


def at_random(target: Decoder, wanted: ModelShape, seed: int) -> Decoder:
    """Any layers, heads, neurons and dimensions."""
    shape, draws = target.shape, torch.Generator().manual_seed(seed)
    scores = Importance(
        torch.rand(shape.layers, generator=draws),
        torch.rand(shape.layers, shape.heads, generator=draws),
        torch.rand(shape.layers, shape.ffn, generator=draws),
        torch.rand(shape.d_model, generator=draws),
    )
    layers = tuple(sorted(random.Random(seed).sample(range(shape.layers), wanted.layers)))
    return carve(target, wanted, choose_parts(shape, wanted, scores, layers))


def best_factors(given: argparse.Namespace, file: Path) -> dict[tuple[str, str], float]:
    """The learning rate of each way and shape that the target accepts most of."""
    pilots = run_all(
        one,
        given,
        (
            {"shape": shape, "way": candidate, "tokens": given.budgets[0], "factor": factor, "seed": 100}
            for shape in given.shapes
            for candidate in WAYS
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


def main() -> None:
    parser = trials.options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["2x256/4h/688", "2x192/3h/432"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[2_000_000, 8_000_000])
    given = parser.parse_args()
    trials.prepare(given)
    file = given.work / "pruning.jsonl"
    factors = best_factors(given, file)
    records = run_all(
        one,
        given,
        (
            {"shape": shape, "way": candidate, "tokens": tokens, "factor": factors[shape, candidate], "seed": seed}
            for tokens in given.budgets
            for shape in given.shapes
            for candidate in WAYS
            for seed in range(given.seeds)
        ),
        file,
    )
    print(trials.provenance(given))
    print("mean ± standard deviation over seeds; rate: what the learning rate is multiplied with, the best of four")
    for shape in given.shapes:
        for tokens in given.budgets:
            print(f"\n{shape}, {tokens:,} tokens")
            print(f"  {'':<36} {'acceptance':>15} {'greedy match':>15} {'TAR at 5':>15} {'loss':>15}  rate")
            for candidate in WAYS:
                mine = [
                    r
                    for r in records
                    if (r["trial"]["shape"], r["trial"]["tokens"], r["trial"]["way"]) == (shape, tokens, candidate)
                ]
                cells = [spread(mine, name) for name in ("acceptance", "greedy_match", "tar", "loss")]
                print(
                    f"  {candidate:<36} "
                    + " ".join(f"{cell:>15}" for cell in cells)
                    + f"  {factors[shape, candidate]:g}"
                )


if __name__ == "__main__":
    main()
