"""shallowdraft heads: train Medusa heads on a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.distill import DistillingCommand
from shallowdraft.commands.options import require_decoder_only
from shallowdraft.commands.training import say
from shallowdraft.errors import OptionError
from shallowdraft.limits import MOST_HEADS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class HeadsCommand(DistillingCommand):
    """Train Medusa heads: small layers on the target that guess tokens ahead, instead of a draft model.

    The target stays as it is. In OUT there are the weights and how often each guess is right, from which the tree is
    chosen that --drafter medusa proposes. In the folder `heads` of the target they are found without being named.
    Example: shallowdraft heads --target DIR --corpus text --tokens 2000000 --generated 2000000 --out heads
    """

    target: str
    """Checkpoint folder, hub id or zoo name of the model to guess ahead of."""
    count: int = 4
    """How many heads: how far they guess beyond the next token."""

    def start(self) -> "torch.device":
        from shallowdraft.building import data_parallel

        if not 1 <= self.count <= MOST_HEADS:
            raise OptionError(f"--count is {self.count}; it must be from 1 to {MOST_HEADS}")
        if self.rollout:
            raise OptionError("--rollout is for drafts; heads learn from the target's text")
        if self.count >= self.sequence:
            raise OptionError(f"--sequence is {self.sequence}; {self.count} heads need longer ones")
        device = super().start()
        if data_parallel.processes() > 1:
            raise OptionError("heads are small and trained by one process; leave torchrun out")
        return device

    def build(self) -> int:
        from shallowdraft.building.medusa import train_heads
        from shallowdraft.models.heads import save_heads
        from shallowdraft.models.model import load

        require_decoder_only(self.target)
        device = self.start()
        target = load(self.target, self.dtype, device, trainable=True)
        shop = self._with_generated(self.workshop(target.require_tokenizer()), target)
        self.begin()
        heads, measured = train_heads(shop, target.decoder, self.count, self.recipe(target.shape), self.objective)
        about = {"target": self.target, "objective": self.objective, "tokens": self.tokens}
        figures = {name: round(value, 4) for name, value in measured.items()}
        self.conclude(
            lambda: save_heads(heads, Path(self.out), **about, held_out=figures),
            {"heads": self.count},
            f"{self.count} heads on {self.target}",
            measured,
        )
        say(f"shallowdraft generate --target {self.target} --drafter medusa --heads {self.out} uses them")
        return 0
