"""Medusa heads (Cai et al. 2024): small networks that predict later tokens from a target's last hidden state.

Head k predicts the token k positions after the next one, without knowing the other heads' predictions. All of them end
in the target's own output layer, which keeps them small; instead of a separate output layer each has a wide inner one.
Shapes: K heads, C width of the hidden state, M inner width.
"""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shallowdraft.errors import CheckpointError, OptionError, first_line
from shallowdraft.files import require_regular
from shallowdraft.identity import folder_digest
from shallowdraft.limits import MOST_HEADS
from shallowdraft.models.checkpoint import find_folder, read_json, use_default_mode, write_config
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.models.tree import MOST_RANKS

KIND = "medusa-heads"
WIDER = 4  # M / C
FOLDER = "heads"  # default folder, beside a target's weights


@dataclass(frozen=True)
class HeadsShape:
    """Number of heads, and sizes of the target that they belong to."""

    count: int
    width: int
    vocab: int

    def to_config(self) -> dict[str, Any]:
        return {"model_type": KIND, "heads": self.count, "hidden_size": self.width, "vocab_size": self.vocab}


class Heads(nn.Module):
    """Medusa heads of a target: hidden states [..., C] to K others [..., K, C], for the target's output layer."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = nn.Linear(shape.width, shape.count * WIDER * shape.width)
        self.outer = nn.Parameter(torch.zeros(shape.count, WIDER * shape.width, shape.width))
        self.chances: list[list[float]] = []
        """Acceptance rate by head and rank if earlier heads were right (`tree.chances`), measured after training."""
        self.digest = ""
        """Digest of the folder that they were loaded from; empty if they were made in memory."""

    @property
    def device(self) -> torch.device:
        return self.inner.weight.device

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.silu(self.inner(hidden.to(self.inner.weight.dtype)))  # float32 in training, on a 16-bit target
        change = torch.einsum("...km,kmc->...kc", inner.unflatten(-1, self.outer.shape[:2]), self.outer)
        predicted: Tensor = hidden[..., None, :] + change.to(hidden.dtype)
        return predicted


def fresh_heads(target: Decoder, count: int) -> Heads:
    """Make untrained heads: all of them predict the target's next token."""
    heads = Heads(HeadsShape(count, target.shape.embed_dim, target.shape.vocab))
    nn.init.normal_(heads.inner.weight, std=heads.shape.width**-0.5, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(heads.inner.bias)
    return heads.to(target.device)


def save_heads(heads: Heads, folder: Path, **about: Any) -> None:
    """Write the weights, then the config, which marks the folder as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    try:
        save_file({name: tensor.bfloat16().cpu() for name, tensor in heads.state_dict().items()}, partial)
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the heads cannot be written ({error}); is the disk full?") from None
    use_default_mode(partial)
    partial.replace(folder / "model.safetensors")
    write_config(folder, heads.shape.to_config() | {"chances": heads.chances} | about)


def load_heads(target: Model, path: str | Path | None = None) -> Heads:
    """Load a target's heads, by default from the folder `heads` beside its weights."""
    folder = Path(path) if path is not None else find_folder(target.name) / FOLDER
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: there are no heads; train some for {target.name} with shallowdraft heads, and name their folder"
        )
    config = read_json(folder / "config.json")
    count = config.get("heads")
    if config.get("model_type") != KIND or type(count) is not int or not 1 <= count <= MOST_HEADS:
        raise CheckpointError(f"{folder}: config.json describes no heads; give a folder that shallowdraft heads wrote")
    shape = HeadsShape(count, target.decoder.shape.embed_dim, target.shape.vocab)
    if {**config, **shape.to_config()} != config:
        raise OptionError(
            f"{folder}: these heads are for a hidden state of {shortened(config.get('hidden_size'))} and "
            f"{shortened(config.get('vocab_size'))} tokens, {target.name} has {shape.width} and {shape.vocab}"
        )
    heads = Heads(shape)
    require_regular(folder / "model.safetensors", CheckpointError)
    try:
        heads.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: the heads cannot be read ({first_line(error)}); train or copy them again"
        ) from None
    heads.chances = _chances(folder, config.get("chances", []), count)
    heads.digest = folder_digest(folder) or ""
    return heads.to(target.device, target.decoder.dtype).requires_grad_(False).eval()


def _chances(folder: Path, stored: Any, heads: int) -> list[list[float]]:
    """Return the chances of a config after checking that they are probabilities by head and rank."""
    try:
        chances = [[float(chance) for chance in ranks] for ranks in stored]
    except (TypeError, ValueError, OverflowError):
        chances = [[-1.0]]
    fits = len(chances) <= heads and all(len(ranks) <= MOST_RANKS for ranks in chances)
    if not fits or not all(isfinite(chance) and 0 <= chance <= 1 for ranks in chances for chance in ranks):
        raise CheckpointError(f"{folder}: the chances in config.json are not probabilities; copy the folder again")
    return chances
