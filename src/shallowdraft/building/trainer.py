"""Training and validation on one token store, with unfinished stages kept in one folder."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

from shallowdraft.building.batches import Batches
from shallowdraft.building.domain_weights import DomainBalance
from shallowdraft.building.generated_text import share_generated
from shallowdraft.building.recipe import Recipe, rows_at_once
from shallowdraft.building.tasks import Trainable, TrainingTask
from shallowdraft.building.token_store import TokenStore
from shallowdraft.building.training import train, validate
from shallowdraft.models.decoder import Decoder
from shallowdraft.progress import Follow, Say, StepsDone, run_silently, say_nothing

BALANCES = 20  # how often the domains are weighted anew in a run that balances them


@dataclass(frozen=True)
class Trainer:
    """Trains and validates models on a token store."""

    store: TokenStore
    folder: Path
    """Folder for the states of unfinished stages, a folder each."""
    domains: tuple[str, ...] | None = None
    """Domains of the store to train on; None means all."""
    generated_share: float = 0.5
    """Share of every batch that is the target's own text, where the store has both that and a corpus."""
    follow: Follow = run_silently
    say: Say = say_nothing
    compiled: bool = False
    recompute: bool = False
    validation_tokens: int = 65536
    importance_tokens: int = 262144

    def train(
        self,
        name: str,
        model: Trainable,
        task: TrainingTask[Trainable],
        recipe: Recipe,
        balance: DomainBalance | None = None,
    ) -> None:
        """Train a model in place; an unfinished stage of that name is continued."""
        # Stages read the text in different orders, so that none repeats what the one before it has learned; all
        # trials of a kind (layers-…, rate-…) read the same text.
        kind = name.partition("-")[0]
        seed = crc32(f"{recipe.seed} {kind}".encode())
        batches = Batches(self.store, rows=recipe.rows, sequence=recipe.sequence, seed=seed, domains=self.domains)
        batches.weights = share_generated(batches.weights, self.generated_share)
        folder = self.folder / name

        def steps() -> Iterator[int]:
            run = train(
                model,
                task,
                batches,
                recipe,
                folder,
                balance=balance,
                compiled=self.compiled,
                recompute=self.recompute,
            )
            # Closing this iterator closes the run at once, not when it is collected: that saves the state.
            with closing(run):
                for number, step in enumerate(run, 1):
                    if number == 1 and step.step > 1:
                        self.say(f"{name}: going on after step {step.step - 1}")
                    yield StepsDone(step.step, f"loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s")

        self.follow(name, steps(), recipe.steps)

    def validate(
        self, model: Decoder, target: Decoder | None, sequence: int, domains: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Measure a model on held-out text, the same for every model."""
        rows = min(rows_at_once(model.shape, sequence), max(1, self.validation_tokens // sequence))
        held_out = Batches(self.store, part="val", rows=rows, sequence=sequence, seed=0, domains=domains)
        return validate(model, target, held_out, max(1, self.validation_tokens // (rows * sequence)))

    def domain_balance(self, target: Decoder, recipe: Recipe) -> DomainBalance:
        """Return a balance of the domains by how far a model's loss in each is above the target's."""
        held_out = Batches(self.store, part="val", rows=1, sequence=recipe.sequence, seed=0, domains=self.domains)
        domains = tuple(held_out.weights)
        losses = partial(self._domain_losses, sequence=recipe.sequence, domains=domains)
        return DomainBalance(losses, max(1, recipe.steps // BALANCES), reference=losses(target))

    def _domain_losses(self, model: Decoder, sequence: int, domains: tuple[str, ...]) -> dict[str, float]:
        losses = {}
        for domain in domains:
            held_out = Batches(self.store, part="val", rows=4, sequence=sequence, seed=0, domains=[domain])
            losses[domain] = validate(model, None, held_out, 1)["loss"]
        return losses
