"""Medusa heads (Cai et al. 2024): from a target's last hidden state, what will follow its next token.

Head k guesses the token k places behind the next one; none knows what the others guess. Each ends in the target's own
output layer, so that all of them together are small; instead of an output layer of its own it has a wide inner one.
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
from shallowdraft.models.checkpoint import find_folder, read_json, set_usual_mode, write_config
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.models.tree import MOST_RANKS

KIND = "medusa-heads"
WIDER = 4  # M / C
FOLDER = "heads"  # beside a target's weights, where they are looked for


@dataclass(frozen=True)
class HeadsShape:
    """How many heads, and on what."""

    count: int
    width: int
    vocab: int

    def to_config(self) -> dict[str, Any]:
        return {"model_type": KIND, "heads": self.count, "hidden_size": self.width, "vocab_size": self.vocab}


class Heads(nn.Module):
    """Hidden states [..., C] -> K further ones [..., K, C], which the target's output layer turns into logits."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = nn.Linear(shape.width, shape.count * WIDER * shape.width)
        self.outer = nn.Parameter(torch.zeros(shape.count, WIDER * shape.width, shape.width))
        self.chances: list[list[float]] = []
        """By head and rank: how often that guess is right where those before it were; measured after training."""
        self.digest = ""
        """Content of the folder they were loaded from; empty where they were made in memory."""

    @property
    def device(self) -> torch.device:
        return self.inner.weight.device

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.silu(self.inner(hidden.to(self.inner.weight.dtype)))  # while trained, in 32 bits on 16
        change = torch.einsum("...km,kmc->...kc", inner.unflatten(-1, self.outer.shape[:2]), self.outer)
        found: Tensor = hidden[..., None, :] + change.to(hidden.dtype)
        return found


def fresh_heads(target: Decoder, count: int) -> Heads:
    """Heads that guess what the target says next, and have yet to learn what comes later."""
    heads = Heads(HeadsShape(count, target.shape.embed_dim, target.shape.vocab))
    nn.init.normal_(heads.inner.weight, std=heads.shape.width**-0.5, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(heads.inner.bias)
    return heads.to(target.device)


def save_heads(heads: Heads, folder: Path, **about: Any) -> None:
    """Write weights, then a config that says the folder is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    try:
        save_file({name: tensor.bfloat16().cpu() for name, tensor in heads.state_dict().items()}, partial)
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the heads cannot be written ({error}); is the disk full?") from None
    set_usual_mode(partial)
    partial.replace(folder / "model.safetensors")
    write_config(folder, heads.shape.to_config() | {"chances": heads.chances} | about)


def load_heads(target: Model, path: str | Path | None = None) -> Heads:
    """Heads of a target, by default those in the folder `heads` beside its weights."""
    folder = Path(path) if path is not None else find_folder(target.name) / FOLDER
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: there are no heads; train some for {target.name} with shallowdraft heads, and name their folder"
        )
    config = read_json(folder / "config.json")
    count = config.get("heads")
    if config.get("model_type") != KIND or type(count) is not int or not 1 <= count <= MOST_HEADS:
        raise CheckpointError(f"{folder}: config.json describes no heads; give a folder that shallowdraft heads wrote")
    wanted = HeadsShape(count, target.decoder.shape.embed_dim, target.shape.vocab)
    if {**config, **wanted.to_config()} != config:
        raise OptionError(
            f"{folder}: these heads are for a hidden state of {shortened(config.get('hidden_size'))} and "
            f"{shortened(config.get('vocab_size'))} tokens, {target.name} has {wanted.width} and {wanted.vocab}"
        )
    heads = Heads(wanted)
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


def _chances(folder: Path, found: Any, heads: int) -> list[list[float]]:
    try:
        chances = [[float(one) for one in row] for row in found]
    except (TypeError, ValueError, OverflowError):
        chances = [[-1.0]]
    fits = len(chances) <= heads and all(len(row) <= MOST_RANKS for row in chances)
    if not fits or not all(isfinite(one) and 0 <= one <= 1 for row in chances for one in row):
        raise CheckpointError(f"{folder}: the chances in config.json are no probabilities; copy the folder again")
    return chances
