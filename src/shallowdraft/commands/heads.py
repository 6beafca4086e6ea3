"""shallowdraft heads: train Medusa heads on a target."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import Target
from shallowdraft.commands.training import DistillingCommand
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult


@dataclass(frozen=True, kw_only=True)
class HeadsCommand(DistillingCommand):
    """Train Medusa heads: small layers on the target that guess tokens ahead, instead of a draft model.

    The target stays as it is. In OUT there are the weights and how often each guess is right, from which the tree is
    chosen that --drafter medusa proposes. In the folder `heads` of the target they are found without being named.
    Example: shallowdraft heads --target DIR --corpus text --tokens 2000000 --generated 2000000 --out heads
    """

    target: Target
    count: int = 4
    """How many heads: how far they guess beyond the next token."""

    def build(self) -> "BuildResult":
        from shallowdraft.api.building import train_heads

        if self.rollout:
            raise OptionError("--rollout is for drafts; heads learn from the target's text")
        return train_heads(**self.arguments(train_heads))

    def show(self, result: "BuildResult") -> None:
        super().show(result)
        from shallowdraft.building.following import saying_once

        if not result.finished_before:
            saying_once(True)(
                f"shallowdraft generate --target {self.target} --drafter medusa --heads {self.out} uses them"
            )
