"""shallowdraft distill: train a draft on what its target says."""

from dataclasses import dataclass, replace

from shallowdraft.commands.training import TrainingCommand


@dataclass(frozen=True, kw_only=True)
class Distill(TrainingCommand):
    """Train a draft to agree with its target: the share of tokens that the target accepts is what rises.

    Example: shallowdraft distill --draft DIR --target DIR --corpus text --tokens 5000000 --out better-draft
    """

    draft: str
    """Checkpoint folder or hub id to start from."""
    target: str
    """Checkpoint folder or hub id of the model to agree with."""
    objective: str = "forward-kl"
    """forward-kl, reverse-kl, jensen-shannon, total-variation, hybrid or cross-entropy."""

    def run(self) -> int:
        from shallowdraft.building.training import Distil
        from shallowdraft.models.model import check_vocabulary, load

        self.check()
        target = load(self.target, self.dtype, self.device, trainable=True)
        draft = load(self.draft, "float32", self.device, trainable=True)
        check_vocabulary(target, draft).require()
        tokenizer = target.require_tokenizer()
        store = self.store(tokenizer)
        self.train(draft.decoder, Distil(target.decoder, self.objective), store, self.recipe(), "distill")
        measured = self.validate(draft.decoder, target.decoder, store)
        return self.finish(replace(draft, name=self.out), measured)
