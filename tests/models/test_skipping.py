"""Decoders that skip some of their parts, and copies of decoders."""

import pytest
import torch
from conftest import CONFIGS, PACKINGS
from test_parity import KERNEL_KINDS, TOLERANCE, load_packed

from shallowdraft.errors import OptionError

WAYS = [
    (kind, way) for kind in CONFIGS for way in PACKINGS if way != "none" and (way != "panels" or kind in KERNEL_KINDS)
]


def hidden(decoder, tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    with torch.inference_mode():
        return decoder(tokens, torch.arange(length).expand(rows, -1), decoder.new_cache(rows, length), length)


@pytest.mark.parametrize(("kind", "packing"), WAYS)
@pytest.mark.parametrize("skips", [(), (0,), (1,), (0, 3)], ids=str)
def test_what_is_skipped_adds_nothing(kind: str, packing: str, skips: tuple[int, ...], folder):
    """Every packing agrees with PyTorch's operations; the output without skips is that of the whole decoder."""
    tokens = torch.randint(0, 97, (2, 15), generator=torch.Generator().manual_seed(0))
    whole, plain = (load_packed(folder(kind), way).decoder for way in (packing, "none"))
    actual, expected = hidden(whole.skipping(skips), tokens), hidden(plain.skipping(skips), tokens)
    assert (actual - expected).abs().max() < TOLERANCE
    different = (actual - hidden(whole, tokens)).abs().max()
    assert different > 0.01 if skips else different == 0


def test_parts_that_are_not_there(folder):
    decoder = load_packed(folder("llama"), "none").decoder
    with pytest.raises(OptionError, match="cannot be skipped"):
        decoder.skipping([2 * decoder.shape.layers])
