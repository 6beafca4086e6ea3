"""How much each part of a model matters, from its activations on some text (after Minitron, and ShortGPT for layers).

Shapes: B batch rows, T tokens, L layers, C d_model, H query heads, D head width, F ffn, N channels.
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
    """Scores of all parts of a model; larger matters more, and only scores of one kind can be compared."""

    layers: Tensor  # [L] 1 - cos(input of a block, output of it), summed over batches
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]
    hidden: Tensor  # [C], summed over all norms


@torch.no_grad()
def measure_importance(decoder: Decoder, batches: Iterable[Tensor]) -> Importance:
    """Score every part in one pass over batches of tokens [B, T].

    A channel scores sqrt(sum over batches of (mean over B, T of |x|)²); a head the same, summed over its D channels.
    """
    shape = decoder.shape
    layers = torch.zeros(shape.layers)
    heads, ffn = torch.zeros(shape.layers, shape.heads * shape.head_dim), torch.zeros(shape.layers, shape.ffn)
    hidden = torch.zeros(shape.d_model)
    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            # `layers[index]` and the like are views, so hooks add into the tensors that are returned.
            stack.callback(_watch(block, layers[index], _change))
            # The input of the output projection is what a head contributes, that of `down` what an FFN neuron does.
            stack.callback(_watch(block.get_submodule("out"), heads[index], _input_energy))
            stack.callback(_watch(block.get_submodule("down"), ffn[index], _input_energy))
            # Residual channels are scored behind the norms: before them a few channels dominate by scale alone.
            stack.callback(_watch(block.get_submodule("attn_norm"), hidden, _output_energy))
            stack.callback(_watch(block.get_submodule("ffn_norm"), hidden, _output_energy))
        if decoder.norm is not None:
            stack.callback(_watch(decoder.norm, hidden, _output_energy))
        for tokens in batches:
            decoder.read(tokens)
    by_head = heads.view(shape.layers, shape.heads, shape.head_dim).sum(-1)
    return Importance(layers, by_head.sqrt(), ffn.sqrt(), hidden.sqrt())


def _watch(module: nn.Module, total: Tensor, value: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """Add value(input, output) to `total` whenever the module runs; return the function that ends this."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        total.add_(value(args[0], output).float().cpu())

    return module.register_forward_hook(hook).remove


def _change(entering: Tensor, leaving: Tensor) -> Tensor:
    """Return how much a block turns the residual stream: 0 if it leaves its direction as it was."""
    return 1 - F.cosine_similarity(entering, leaving, dim=-1).mean()


def _input_energy(entering: Tensor, _: Tensor) -> Tensor:
    return _energy(entering)


def _output_energy(_: Tensor, leaving: Tensor) -> Tensor:
    return _energy(leaving)


def _energy(activation: Tensor) -> Tensor:
    """Return the squared mean magnitude [N] of each channel of activations [B, T, N]."""
    return activation.abs().mean((0, 1)).square()
