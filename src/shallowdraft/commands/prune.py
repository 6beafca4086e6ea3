"""shallowdraft prune: carve a draft of an exact shape out of a parent, then distil it."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from shallowdraft.commands.training import DistillingCommand, is_first

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult


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
        from shallowdraft.building.following import following_training, saying_once
        from shallowdraft.building.pruning_stage import estimate_pruning
        from shallowdraft.building.recipe import DistillationOptions

        self.require_float32()
        if not self.dry_run:
            return super().run()
        self.set_threads()
        estimate = estimate_pruning(
            **self.arguments(estimate_pruning)
            | {
                "options": DistillationOptions(**self.arguments(DistillationOptions)),
                "follow": following_training(True),
                "say": saying_once(True),
            }
        )
        if self.json_output and is_first():
            print(json.dumps(asdict(estimate)))
        return 0

    def build(self) -> "BuildResult":
        from shallowdraft.api.building import prune

        return prune(**self.arguments(prune))
