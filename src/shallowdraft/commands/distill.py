"""shallowdraft distill: train a draft on its target's distributions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import RequiredDraft, Target
from shallowdraft.commands.training import DistillingCommand

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult


@dataclass(frozen=True, kw_only=True)
class DistillCommand(DistillingCommand):
    """Train a draft to agree with its target: the share of tokens that the target accepts is what rises.

    Example: shallowdraft distill --draft DIR --target DIR --corpus text --tokens 5000000 --out better-draft
    """

    draft: RequiredDraft
    target: Target

    def build(self) -> "BuildResult":
        from shallowdraft.api.building import distill

        return distill(**self.arguments(distill))
