"""How much each part of a model matters, from its activations on some text (after Minitron, and ShortGPT for layers).

Shapes: L layers, C d_model, H heads, D head width, F ffn.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.models.decoder import Decoder


@dataclass(frozen=True)
class Importance:
    """Scores; larger matters more."""

    layers: Tensor  # [L] 1 - cos(what enters a block, what leaves it)
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]
    hidden: Tensor  # [C], summed over all norms


@torch.no_grad()
def measure_importance(decoder: Decoder, batches: Iterable[Tensor]) -> Importance:
    """One pass over batches of tokens [B, T]; a channel scores the root of its summed squared mean |activation|."""
    shape = decoder.shape
    layers = torch.zeros(shape.layers)
    heads, ffn = torch.zeros(shape.layers, shape.heads * shape.head_dim), torch.zeros(shape.layers, shape.ffn)
    hidden = torch.zeros(shape.d_model)
    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            stack.callback(_watch(block, layers[index], _change))
            stack.callback(_watch(block.get_submodule("out"), heads[index], _entering))
            stack.callback(_watch(block.get_submodule("down"), ffn[index], _entering))
            stack.callback(_watch(block.get_submodule("attn_norm"), hidden, _leaving))
            stack.callback(_watch(block.get_submodule("ffn_norm"), hidden, _leaving))
        if decoder.norm is not None:
            stack.callback(_watch(decoder.norm, hidden, _leaving))
        for tokens in batches:
            decoder.read(tokens)
    by_head = heads.view(shape.layers, shape.heads, shape.head_dim).sum(-1)
    return Importance(layers, by_head.sqrt(), ffn.sqrt(), hidden.sqrt())


def _watch(module: nn.Module, total: Tensor, value: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """Add value(input, output) to `total` whenever the module runs; returns how to stop."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        total.add_(value(args[0], output).float().cpu())

    return module.register_forward_hook(hook).remove


def _change(entering: Tensor, leaving: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(entering, leaving, dim=-1).mean()


def _entering(entering: Tensor, _: Tensor) -> Tensor:
    return _energy(entering)


def _leaving(_: Tensor, leaving: Tensor) -> Tensor:
    return _energy(leaving)


def _energy(activation: Tensor) -> Tensor:
    """[B, T, N] -> [N]: the squared mean magnitude of each channel."""
    return activation.abs().mean((0, 1)).square()
