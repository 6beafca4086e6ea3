"""Objectives and texts for distilling one draft, on equal tokens.

First one of three learning rates is chosen for each objective, on the corpus with one seed. Texts: the corpus; the
target's own continuations of it; both; the corpus with a quarter of the rows ending in the draft's own continuations.
Drafts are judged on held-out prompts: TAR at lookahead 5 and greedy match on the target's greedy text, acceptance rate
on text that the target sampled.

    python benchmarks/objectives.py --corpus DIR --work DIR [--parent zoo:target] [--workers 4]
"""

import argparse
from pathlib import Path
from typing import Any

import trials
from trials import Trial, corpus_domains, judge, load_parent, new_trainer, recipe, run_all, spread

from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import DOMAIN
from shallowdraft.building.importance import measure_importance
from shallowdraft.building.losses import OBJECTIVES
from shallowdraft.building.pruning import carve, choose_parts, layer_candidates
from shallowdraft.building.recipe import usual_rate
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.token_store import open_store
from shallowdraft.shapes.notation import parse_shape

ALL_OBJECTIVES = (*OBJECTIVES, "cross-entropy")
TEXTS = ("corpus", "target's text", "both", "corpus + rollouts")
FACTORS = (1.0, 2.0, 4.0)  # learning rates to try, as multiples of the usual rate for the width
ROLLOUT = 0.25  # share of rows that end in the draft's own continuations


def run_trial(options: argparse.Namespace, trial: Trial, folder: str) -> dict[str, Any]:
    """Distil the carved draft by a trial's objective and text, and judge it."""
    import torch

    target = load_parent(options.parent)
    shape = parse_shape(options.shape, vocab=target.shape.vocab, context=target.shape.context)
    reader = Batches(open_store(options.work / "tokens"), rows=16, sequence=options.sequence, seed=0)
    text = [torch.from_numpy(reader.next()[:, :-1]).to(target.device) for _ in range(4)]
    importance = measure_importance(target, text)
    layers = layer_candidates(importance, shape.layers)[0]
    draft = carve(target, shape, choose_parts(target.shape, shape, importance, layers))
    store = open_store(options.work / "generated")
    domains = {"target's text": (DOMAIN,), "both": None}.get(trial["text"], corpus_domains(store))
    rollout = ROLLOUT if "rollouts" in trial["text"] else 0.0
    task = Distillation(target, trial["objective"], rollout=rollout, seed=trial["seed"])
    rate = trial["factor"] * usual_rate(shape)
    trainer = new_trainer(options, folder, domains)
    trainer.train("distil", draft, task, recipe(options, options.tokens, rate, trial["seed"]))
    return judge(draft, options)


def best_factors(options: argparse.Namespace, file: Path) -> dict[str, float]:
    """Return the factor of the learning rate with the highest TAR, for each objective."""
    size = {"shape": options.shape, "tokens": options.tokens}
    pilots = run_all(
        run_trial,
        options,
        (
            {"objective": objective, "text": "corpus", "factor": factor, "seed": 100, **size}
            for objective in ALL_OBJECTIVES
            for factor in FACTORS
        ),
        file,
    )
    tars = {(pilot["trial"]["objective"], pilot["trial"]["factor"]): pilot.get("tar", 0.0) for pilot in pilots}
    return {objective: max(FACTORS, key=lambda factor: tars[objective, factor]) for objective in ALL_OBJECTIVES}


def main() -> None:
    parser = trials.new_parser(__doc__)
    parser.add_argument("--shape", default="1x256/4h/688")
    parser.add_argument("--tokens", type=int, default=4_000_000)
    options = parser.parse_args()
    trials.prepare(options)
    file = options.work / "objectives.jsonl"
    factors = best_factors(options, file)
    size = {"shape": options.shape, "tokens": options.tokens}
    records = run_all(
        run_trial,
        options,
        (
            {"objective": objective, "text": text, "factor": factors[objective], "seed": seed, **size}
            for objective in ALL_OBJECTIVES
            for text in TEXTS
            for seed in range(options.seeds)
            if not (objective == "cross-entropy" and "rollouts" in text)
        ),
        file,
    )
    print(trials.provenance(options))
    print(f"draft {options.shape} on {options.tokens:,} tokens; mean ± standard deviation over seeds")
    for name, title in (("tar", "TAR at lookahead 5"), ("greedy_match", "greedy match"), ("acceptance", "acceptance")):
        print(f"\n{title:<20}" + "".join(f"{text:>20}" for text in TEXTS) + "  rate")
        for objective in ALL_OBJECTIVES:
            cells = []
            for text in TEXTS:
                seeds = [
                    record
                    for record in records
                    if (record["trial"]["objective"], record["trial"]["text"]) == (objective, text)
                ]
                cells.append(spread(seeds, name) if seeds else "")
            print(f"  {objective:<18}" + "".join(f"{cell:>20}" for cell in cells) + f"  {factors[objective]:g}")


if __name__ == "__main__":
    main()
