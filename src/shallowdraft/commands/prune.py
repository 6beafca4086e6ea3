"""shallowdraft prune: carve a draft of an exact shape out of a parent, then distil it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shallowdraft import shapes
from shallowdraft.commands.training import TrainingCommand, say

if TYPE_CHECKING:
    from shallowdraft.building.corpus import TokenStore
    from shallowdraft.models.decoder import Decoder

IMPORTANCE_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Prune(TrainingCommand):
    """Carve a draft of exactly the shape you ask for out of a parent, and distil it on the parent.

    What stays is chosen by importance. Several sets of layers are tried and trained a little; the best is trained on.
    Example: shallowdraft prune --parent DIR --shape 2x256/4h/688 --corpus text --tokens 5000000 --out draft
    """

    parent: str
    """Checkpoint folder or hub id to prune; for a draft, the target itself or a model of its family."""
    shape: str
    """layers x d_model / heads / ffn like 2x256/4h/688; no larger than the parent, heads of the parent's width."""
    objective: str = "forward-kl"
    """forward-kl, reverse-kl, jensen-shannon, total-variation, hybrid or cross-entropy."""
    probe: float = 0.1
    """Share of the tokens that each candidate set of layers is tried with."""

    def run(self) -> int:
        from shallowdraft.building.pruning import child_shape, require_reachable
        from shallowdraft.building.training import Distil
        from shallowdraft.models.model import load

        self.check()
        parent = load(self.parent, "float32", self.device, trainable=True)
        wanted = shapes.parse(self.shape, vocab=parent.shape.vocab, context=parent.shape.context)
        wanted = replace(wanted, head_dim=parent.shape.head_dim) if "hd" not in self.shape else wanted
        require_reachable(parent.shape, wanted)
        child = child_shape(parent.shape, wanted)
        say(f"{parent.shape} ({parent.shape.parameters:,} parameters) -> {child} ({child.parameters:,})")
        store = self.store(parent.require_tokenizer())
        decoder = self._best(parent.decoder, wanted, store)
        self.train(decoder, Distil(parent.decoder, self.objective), store, self.recipe(), "distill")
        measured = self.validate(decoder, parent.decoder, store)
        return self.finish(replace(parent, name=self.out, decoder=decoder), measured)

    def _best(self, parent: "Decoder", wanted: shapes.ModelShape, store: "TokenStore") -> "Decoder":
        """Carve each candidate, distil it a little, keep the one that the parent accepts most of."""
        import torch

        from shallowdraft.building.importance import measure_importance
        from shallowdraft.building.pruning import carve, choose, layer_candidates
        from shallowdraft.building.training import Distil

        reader = self.batches(store)
        text = (torch.from_numpy(reader.next()[:, :-1]).to(parent.device) for _ in range(IMPORTANCE_BATCHES))
        importance = measure_importance(parent, text)
        recipe = self.recipe(max(1, round(self.tokens * self.probe)))
        tried = {}
        for layers in layer_candidates(importance, wanted.layers):
            cut = choose(parent.shape, wanted, importance, layers)
            name = "layers-" + "-".join(map(str, layers))
            decoder = carve(parent, wanted, cut)
            self.train(decoder, Distil(parent, self.objective), store, recipe, name)
            tried[layers] = self.validate(decoder, parent, store)["acceptance"], decoder
            say(f"layers {', '.join(map(str, layers))}: acceptance {tried[layers][0]:.3f}")
        return max(tried.values(), key=lambda one: one[0])[1]
