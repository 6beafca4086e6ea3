"""shallowdraft prune: carve a draft of an exact shape out of a parent, then distil it."""

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from shallowdraft.commands.distill import DistillingCommand
from shallowdraft.commands.options import require_decoder_only
from shallowdraft.commands.training import SWEEP_SHARE, SWEPT, say, say_plan
from shallowdraft.errors import OptionError
from shallowdraft.portable import require_portable
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

if TYPE_CHECKING:
    from shallowdraft.building.stages import Workshop
    from shallowdraft.building.training import Recipe
    from shallowdraft.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class PruneCommand(DistillingCommand):
    """Carve a draft of exactly the shape you ask for out of a parent, and distil it on the parent.

    By importance, several sets of layers are tried and trained a little; the best is trained on. Learned masks
    (Sheared-LLaMA) are trained together with the parent's weights instead.
    Example: shallowdraft prune --parent DIR --shape 2x256/4h/688 --corpus text --tokens 5000000 --out draft
    """

    parent: str
    """Checkpoint folder, hub id or zoo name to prune; for a draft, the target itself or a model of its family."""
    shape: str
    """layers x d_model / heads / ffn like 2x256/4h/688; no larger than the parent, heads of the parent's width,
    and a d_model that their number divides (in OPT and Qwen2 one as wide as all heads together)."""
    method: Literal["importance", "learned"] = "importance"
    """How to choose what stays."""
    probe: float = 0.1
    """Importance: share of the tokens that each candidate set of layers is tried with."""
    mask_tokens: float = 0.5
    """Learned: share of the tokens that masks are trained on; the rest distils what they keep. 1: no distillation."""
    dry_run: bool = False
    """Say what it costs and takes, and stop."""

    def run(self) -> int:
        if not self.dry_run:
            return super().run()
        with tempfile.TemporaryDirectory() as folder:
            return replace(self, out=folder).build()

    def build(self) -> int:
        from shallowdraft.building.masks import require_enough_steps
        from shallowdraft.models.checkpoint import find_folder, read_shape
        from shallowdraft.models.model import load

        if not (0 <= self.probe <= 1 and 0 < self.mask_tokens <= 1):
            raise OptionError("--probe is a share from 0 to 1, --mask-tokens one above 0 and up to 1")
        self.require_float32()
        require_decoder_only(self.parent)
        wanted, child = self._shapes()
        if self.method == "learned":
            require_enough_steps(self._recipe_for_masks(read_shape(find_folder(self.parent))).steps)
        device = self.start()
        parent = load(self.parent, "float32", device, trainable=True)
        self._say_costs(parent.shape, child)
        shop = self.workshop(parent.require_tokenizer())
        if not self._plan(shop, parent.decoder, child):
            return 0
        self.begin()
        carved = self._carve(shop, parent.decoder, wanted)
        decoder, measured = self.distil(shop, carved, parent, self.tokens - self._tokens_for_masks)
        return self.finish(replace(parent, name=self.out, decoder=decoder), measured)

    def _shapes(self) -> tuple[ModelShape, ModelShape]:
        """The shape that was asked for, and the same as the parent's child; refused before weights are read."""
        from shallowdraft.building.pruning import require_reachable
        from shallowdraft.models.checkpoint import find_folder, read_shape

        parent = read_shape(find_folder(self.parent))
        wanted = parse_shape(self.shape, vocab=parent.vocab, context=parent.context)
        wanted = replace(wanted, head_dim=parent.head_dim) if "hd" not in self.shape else wanted
        require_reachable(parent, wanted)
        child = child_shape(parent, wanted)
        require_portable(child, parent)
        return wanted, child

    @property
    def _tokens_for_masks(self) -> int:
        return round(self.tokens * self.mask_tokens) if self.method == "learned" else 0

    def _recipe_for_masks(self, parent: ModelShape) -> "Recipe":
        return replace(self.recipe(parent), tokens=self._tokens_for_masks)  # it is the parent that is trained

    def _say_costs(self, parent: ModelShape, child: ModelShape) -> None:
        say(
            f"{parent} ({parent.parameters:,} parameters) -> {child} ({child.parameters:,}): reachable; a pass reads "
            f"{child.pass_bytes() / 1e6:,.1f} MB of float32 weights, {child.pass_bytes() / parent.pass_bytes():.0%} of "
            f"the parent's, through {child.layers} of {parent.layers} layers"
        )

    def _plan(self, shop: "Workshop", parent: "Decoder", child: ModelShape) -> bool:
        """Say what it will take; whether to go on."""
        import copy

        from shallowdraft.building.estimate import make_plan
        from shallowdraft.building.jobs import Distil
        from shallowdraft.building.masks import Shear
        from shallowdraft.building.pruning import MOST_CANDIDATES
        from shallowdraft.building.training import fresh_decoder

        recipe, corpus = self.recipe(child), shop.store.tokens_in_all
        draft = fresh_decoder(child, 0).to(parent.device)
        rates = len(SWEPT) if self.learning_rate is None else 0
        distilling = 1.0 + rates * SWEEP_SHARE
        if self.method == "importance":
            runs, states = distilling + MOST_CANDIDATES * self.probe, MOST_CANDIDATES + rates + 1
            plan = make_plan(
                draft, Distil(parent), recipe, parent.shape, runs=runs, states=states, corpus_tokens=corpus
            )
        else:
            runs, states = self.mask_tokens, 1
            sheared, job = copy.deepcopy(parent), Shear(parent, child)
            plan = make_plan(sheared, job, recipe, parent.shape, runs=runs, states=states, corpus_tokens=corpus)
            runs, states = distilling * (1 - self.mask_tokens), rates + 1
            rest = make_plan(draft, Distil(parent), recipe, parent.shape, runs=runs, states=states, corpus_tokens=0)
            disk = plan.disk_bytes + rest.disk_bytes
            plan = replace(plan, seconds=plan.seconds + rest.seconds, disk_bytes=disk)
        say_plan(plan)
        plan.require_room(self.work, parent.device, f"pruning to {child}")
        if self.dry_run and self.json_output:
            print(json.dumps({"shape": str(child), "parameters": child.parameters, **asdict(plan)}))
        return not self.dry_run

    def _carve(self, shop: "Workshop", parent: "Decoder", wanted: ModelShape) -> "Decoder":
        from shallowdraft.building.stages import prune_by_importance, prune_by_masks

        if self.method == "importance":
            recipe = self.recipe(wanted)
            return prune_by_importance(shop, parent, wanted, recipe, objective=self.objective, probe=self.probe)
        return prune_by_masks(shop, parent, wanted, self._recipe_for_masks(parent.shape), objective=self.objective)
