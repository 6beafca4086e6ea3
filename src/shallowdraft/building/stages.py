"""From a parent to a trained draft: the stages that commands and recipes put together."""

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zlib import crc32

import torch

from shallowdraft.building import data_parallel
from shallowdraft.building.batches import Batches
from shallowdraft.building.domain_weights import Balance
from shallowdraft.building.generated_text import share_generated
from shallowdraft.building.importance import Importance, measure_importance
from shallowdraft.building.jobs import Distil, Job, Trained
from shallowdraft.building.masks import Shear
from shallowdraft.building.pruning import MOST_CANDIDATES, carve, choose, layer_candidates
from shallowdraft.building.token_store import TokenStore
from shallowdraft.building.training import Recipe, Step, rows_at_once, train, validate
from shallowdraft.errors import TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

FEWEST_STEPS = 10  # of a trial
BALANCE_TIMES = 20  # domains are weighted anew so often in a run that balances them


@dataclass(frozen=True)
class Workshop:
    """Text to train on, a folder for unfinished work, and someone who follows it."""

    store: TokenStore
    folder: Path
    follow: Callable[[str, Generator[Step, None, None]], None]
    """Given a stage's name and its steps as they are done; must take them all, or close them and raise."""
    domains: tuple[str, ...] | None = None
    """Domains of the store to train on; None means all."""
    generated_share: float = 0.5
    """Of every batch, the target's own text where the store has some beside the corpus."""
    count: Callable[[str, int], Iterable[int]] = lambda _name, total: range(total)
    """Given what is done and how many times, counts them and may show how far it is."""
    compiled: bool = False
    recompute: bool = False
    validation_tokens: int = 65536
    importance_tokens: int = 262144

    def train(
        self, name: str, model: Trained, job: Job[Trained], recipe: Recipe, balance: Balance | None = None
    ) -> None:
        """Train in place; an unfinished stage of that name is taken up where it stopped.

        Stages read the text in different orders, lest one repeats what the one before it has learned.
        """
        kind = name.partition("-")[0]  # all candidate layers, or rates, are tried on the same text
        seed = crc32(f"{recipe.seed} {kind}".encode())
        batches = Batches(self.store, rows=recipe.rows, sequence=recipe.sequence, seed=seed, domains=self.domains)
        batches.weights = share_generated(batches.weights, self.generated_share)
        steps = train(
            model,
            job,
            batches,
            recipe,
            self.folder / name,
            balance=balance,
            compiled=self.compiled,
            recompute=self.recompute,
        )
        self.follow(name, steps)

    def validate(
        self, model: Decoder, target: Decoder | None, sequence: int, domains: Sequence[str] | None = None
    ) -> dict[str, float]:
        """On held-out text, the same for every model."""
        rows = min(rows_at_once(model.shape, sequence), max(1, self.validation_tokens // sequence))
        held_out = Batches(self.store, part="val", rows=rows, sequence=sequence, seed=0, domains=domains)
        return validate(model, target, held_out, max(1, self.validation_tokens // (rows * sequence)))

    def balance(self, target: Decoder, recipe: Recipe) -> Balance:
        """Weigh domains by how far a model's loss is above the target's, some times in a run."""
        held_out = Batches(self.store, part="val", rows=1, sequence=recipe.sequence, seed=0, domains=self.domains)
        domains = tuple(held_out.weights)
        losses = partial(self._losses, sequence=recipe.sequence, domains=domains)
        return Balance(losses, max(1, recipe.steps // BALANCE_TIMES), reference=losses(target))

    def _losses(self, model: Decoder, sequence: int, domains: tuple[str, ...]) -> dict[str, float]:
        losses = {}
        for domain in domains:
            held_out = Batches(self.store, part="val", rows=4, sequence=sequence, seed=0, domains=[domain])
            losses[domain] = validate(model, None, held_out, 1)["loss"]
        return losses


def prune_by_importance(
    shop: Workshop,
    parent: Decoder,
    wanted: ModelShape,
    recipe: Recipe,
    *,
    objective: str,
    probe: float,
    target: Decoder | None = None,
    sets: int = MOST_CANDIDATES,
) -> Decoder:
    """Carve up to so many sets of layers, distil each on a share of the tokens, keep what the target accepts most of.

    The target is the parent unless another one is given.
    """
    target = target or parent
    importance = _importance(shop, parent, recipe)
    short = replace(recipe, tokens=_share(recipe, probe))
    # Of few sets, those with the first layer: without it a draft learns much more slowly.
    candidates = sorted(layer_candidates(importance, wanted.layers), key=lambda layers: 0 not in layers)[:sets]
    tried: list[tuple[float, Decoder]] = []
    for layers in candidates:
        decoder = carve(parent, wanted, choose(parent.shape, wanted, importance, layers))
        if len(candidates) > 1 and probe:
            shop.train("layers-" + "-".join(map(str, layers)), decoder, Distil(target, objective), short)
        tried.append((shop.validate(decoder, target, recipe.sequence)["acceptance"], decoder))
    return data_parallel.gathered(max(tried, key=lambda one: one[0])[1])


def _share(recipe: Recipe, share: float) -> int:
    """Tokens of a trial: a share of the run's, but enough steps to tell something."""
    return min(recipe.tokens, max(round(share * recipe.tokens), FEWEST_STEPS * recipe.batch_tokens))


def _importance(shop: Workshop, parent: Decoder, recipe: Recipe) -> Importance:
    reader = Batches(shop.store, rows=16, sequence=recipe.sequence, seed=recipe.seed)
    count = max(1, shop.importance_tokens // (16 * recipe.sequence))
    return measure_importance(parent, (torch.from_numpy(reader.next()[:, :-1]).to(parent.device) for _ in range(count)))


def prune_by_masks(shop: Workshop, parent: Decoder, wanted: ModelShape, recipe: Recipe, *, objective: str) -> Decoder:
    """Train weights and masks together, then carve what the masks keep."""
    model, job = copy.deepcopy(parent), Shear(parent, wanted, objective, seed=recipe.seed)
    shop.train("masks", model, job, recipe, shop.balance(parent, recipe))
    return carve(data_parallel.gathered(model), wanted, job.masks.cut())


def sweep(
    shop: Workshop, model: Decoder, job: Distil, recipe: Recipe, *, rates: tuple[float, ...], share: float
) -> dict[float, float]:
    """The acceptance that each learning rate gives after a share of the tokens."""
    found: dict[float, float] = {}
    failed: TrainingError | None = None
    for rate in rates:
        trial = copy.deepcopy(model)
        short = replace(recipe, tokens=_share(recipe, share), learning_rate=rate)
        try:
            shop.train(f"rate-{rate:g}", trial, job, short)
        except TrainingError as error:  # it diverged
            failed = error
            continue
        found[rate] = shop.validate(trial, job.target, recipe.sequence)["acceptance"]
    if failed and not found:
        raise failed
    return found
