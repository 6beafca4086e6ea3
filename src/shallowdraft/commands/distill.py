"""shallowdraft distill: train a draft on its target's distributions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.training import DistillingCommand

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult


@dataclass(frozen=True, kw_only=True)
class DistillCommand(DistillingCommand):
    """Train a draft to agree with its target: the share of tokens that the target accepts is what rises.

    Example: shallowdraft distill --draft DIR --target DIR --corpus text --tokens 5000000 --out better-draft
    """

    draft: str
    """Checkpoint folder, hub id or zoo name to start from."""
    target: str
    """Checkpoint folder, hub id or zoo name of the model to agree with."""

    def build(self) -> "BuildResult":
        from shallowdraft.building.recipe import DistillationOptions
        from shallowdraft.building.stages import distill

        return distill(
            draft=self.draft,
            target=self.target,
            options=self.options(DistillationOptions),
            dtype=self.dtype,
            **self.shared_arguments(),
        )
