"""shallowdraft pretrain: a model from scratch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import Name
from shallowdraft.commands.training import TrainingCommand

if TYPE_CHECKING:
    from shallowdraft.building.output_folder import BuildResult


@dataclass(frozen=True, kw_only=True)
class PretrainCommand(TrainingCommand):
    """Train a model from scratch on a folder of text.

    Example: shallowdraft pretrain --corpus text --shape 4x256/4h/688 --vocab 4096 --tokens 5000000 --out model
    """

    shape: str
    """layers x d_model / heads / ffn like 4x256/4h/688, with /2kv and /64hd where needed."""
    tokenizer: Name = None
    """Folder with a tokenizer to use. Default: a byte-level BPE tokenizer trained on the corpus."""
    vocab: int = 8192
    """Tokens in the vocabulary. It is that of the tokenizer that is trained here."""
    context: int = 2048
    """Longest text that the model is made for."""

    def build(self) -> "BuildResult":
        from shallowdraft.api.building import pretrain

        self.require_float32()
        return pretrain(**self.arguments(pretrain))
