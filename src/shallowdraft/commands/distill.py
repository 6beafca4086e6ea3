"""shallowdraft distill: train a draft on what its target says."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shallowdraft.commands.options import require_decoder_only
from shallowdraft.commands.training import SWEEP_SHARE, SWEPT, TrainingCommand, say
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    import torch

    from shallowdraft.building.stages import Workshop
    from shallowdraft.models.decoder import Decoder
    from shallowdraft.models.model import Model

MANY_PASSES = 4  # over the same text: as good as new up to here


@dataclass(frozen=True, kw_only=True)
class DistillingCommand(TrainingCommand):
    """What every command takes that ends in distillation."""

    objective: str = "forward-kl"
    """forward-kl, reverse-kl, jensen-shannon, total-variation, hybrid or cross-entropy."""
    generated: int = 0
    """Tokens that the target writes itself after prompts from the corpus; best as many as --tokens."""
    generated_share: float = 1.0
    """Of every batch, what comes from the target's own text; the rest is from the corpus."""
    rollout: float = 0.0
    """Share of the rows whose second half is the draft's own words, scored by the target."""

    def start(self) -> "torch.device":
        from shallowdraft.building.jobs import require_objective

        require_objective(self.objective, self.rollout)
        if self.generated < 0:
            raise OptionError(f"--generated is {self.generated}; it is a number of tokens")
        if not 0 < self.generated_share <= 1:
            raise OptionError(f"--generated-share is {self.generated_share}; it is above 0 and at most 1")
        return super().start()

    def distil(
        self, shop: "Workshop", draft: "Decoder", target: "Model", tokens: int
    ) -> "tuple[Decoder, dict[str, float]]":
        """Find a learning rate unless one is given, train, and measure; the draft in one piece."""
        from shallowdraft.building import data_parallel
        from shallowdraft.building.jobs import Distil
        from shallowdraft.building.stages import sweep

        shop = self._with_generated(shop, target)
        job = Distil(target.decoder, self.objective, rollout=self.rollout, seed=self.seed)
        recipe = replace(self.recipe(draft.shape), tokens=max(1, tokens))
        if self.learning_rate is None and tokens:
            rates = tuple(factor * recipe.learning_rate for factor in SWEPT)
            found = sweep(shop, draft, job, recipe, rates=rates, share=SWEEP_SHARE)
            say(", ".join(f"learning rate {rate:.2g}: acceptance {value:.3f}" for rate, value in found.items()))
            recipe = replace(recipe, learning_rate=max(found, key=lambda rate: found[rate]))
        if tokens:
            shop.train("distill", draft, job, recipe)
        measured = shop.validate(draft, target.decoder, self.sequence)
        return data_parallel.gathered(draft), measured

    def _with_generated(self, shop: "Workshop", target: "Model") -> "Workshop":
        """The workshop with the target's own text beside the corpus."""
        if not self.generated:
            return shop
        from rich.progress import Progress

        from shallowdraft.building import data_parallel
        from shallowdraft.building.generated_text import write_continuations
        from shallowdraft.building.token_store import TokenStore, open_store
        from shallowdraft.commands.console import Console

        if (passes := self.generated_share * self.tokens / self.generated) > MANY_PASSES:
            say(
                f"the target's own text will be read {passes:.0f} times over; "
                "with a larger --generated or a smaller --generated-share there is less to learn by heart"
            )
        folder = self.work / "generated"
        if data_parallel.is_first() and not (folder / "store.json").exists():
            prompt = max(1, self.sequence // 8)
            texts = write_continuations(
                shop.store,
                target.decoder,
                folder,
                tokens=self.generated,
                prompt=prompt,
                length=self.sequence - prompt,
                rows=self.recipe().rows,
                seed=self.seed,
            )
            with Progress(console=Console(stderr=True)) as progress:
                task = progress.add_task("the target writes", total=self.generated)
                for done in texts:
                    if not isinstance(done, TokenStore):
                        progress.update(task, completed=done)
        data_parallel.wait()
        return replace(shop, store=open_store(folder), generated_share=self.generated_share)


@dataclass(frozen=True, kw_only=True)
class DistillCommand(DistillingCommand):
    """Train a draft to agree with its target: the share of tokens that the target accepts is what rises.

    Example: shallowdraft distill --draft DIR --target DIR --corpus text --tokens 5000000 --out better-draft
    """

    draft: str
    """Checkpoint folder, hub id or zoo name to start from."""
    target: str
    """Checkpoint folder, hub id or zoo name of the model to agree with."""

    def build(self) -> int:
        from shallowdraft.models.model import check_vocabulary, load

        require_decoder_only(self.target, self.draft)
        device = self.start()
        target = load(self.target, self.dtype, device, trainable=True)
        draft = load(self.draft, "float32", device, trainable=True)
        check_vocabulary(target, draft).require()
        shop = self.workshop(target.require_tokenizer())
        self.begin()
        decoder, measured = self.distil(shop, draft.decoder, target, self.tokens)
        return self.finish(replace(draft, name=self.out, decoder=decoder), measured)
