"""Carving gives exactly the wanted shape, and exactly what the parent computes with the rest left out."""

from dataclasses import replace

import pytest
import torch
from conftest import CONFIGS

from shallowdraft.building.importance import measure_importance
from shallowdraft.building.pruning import carve, choose_parts, layer_candidates, require_reachable
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import load_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape

TOKENS = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS)
def parent(request: pytest.FixtureRequest, folder) -> Decoder:
    return load_decoder(folder(request.param), dtype=torch.float32, device=torch.device("cpu"))


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(TOKENS)


def zeroed(parent: Decoder, kept, pruned_shape: ModelShape) -> Decoder:
    """The parent with everything that goes set to zero instead: the reference that carving must equal."""
    shape = parent.shape
    places = dict(zip(kept.layers, range(len(kept.layers)), strict=True))
    for layer, block in enumerate(parent.blocks):
        heads = torch.zeros(shape.heads, shape.head_dim)
        neurons = torch.zeros(shape.ffn)
        if layer in places:
            heads[kept.heads[places[layer]]] = 1
            neurons[kept.ffn[places[layer]]] = 1
        block.out.weight.data *= heads.flatten()
        block.down.weight.data *= neurons
        if layer not in places:
            for projection in (block.out, block.down):
                if projection.bias is not None:
                    projection.bias.data.zero_()
    return parent


def test_depth_heads_and_ffn(parent: Decoder):
    shape = parent.shape
    heads = shape.heads - shape.kv_heads if shape.heads > shape.kv_heads else shape.heads // 2
    kv_heads = shape.kv_heads if shape.heads > shape.kv_heads else heads
    if shape.post_norm:  # a post-norm layer cannot be left out by zeroing: its norms remain
        layers: tuple[int, ...] = tuple(range(shape.layers))
    else:
        layers = (0, 2)
    pruned_shape = replace(
        shape, layers=len(layers), heads=heads, kv_heads=kv_heads, ffn=50, full_layers=min(shape.full_layers, 1)
    )
    kept = choose_parts(shape, pruned_shape, measure_importance(parent, [TOKENS]), layers)
    carved = carve(parent, pruned_shape, kept)
    assert carved.shape == child_shape(shape, pruned_shape)
    assert carved.shape.parameters == sum(p.numel() for p in set(carved.parameters()))
    torch.testing.assert_close(logits(carved), logits(zeroed(parent, kept, pruned_shape)), rtol=0, atol=1e-4)


def test_width(parent: Decoder):
    """Left-out residual dimensions: zero in the parent, its norms taken over the rest."""
    shape, keep = parent.shape, 40
    pruned_shape = replace(shape, d_model=keep, embed_dim=0 if shape.embed_dim == shape.d_model else shape.embed_dim)
    kept = choose_parts(shape, pruned_shape, measure_importance(parent, [TOKENS]), tuple(range(shape.layers)))
    carved = carve(parent, pruned_shape, kept)
    assert carved.shape.d_model == keep
    if shape.layer_norm:
        assert logits(carved).isfinite().all()  # a LayerNorm's mean moves with the dimensions: no zeroed twin exists
        return
    gone = torch.ones(shape.d_model)
    gone[kept.hidden] = 0
    parent.embed.weight.data *= 1 - gone
    if parent.head.weight is not parent.embed.weight:
        parent.head.weight.data *= 1 - gone
    for block in parent.blocks:
        block.out.weight.data *= (1 - gone)[:, None]
        block.down.weight.data *= (1 - gone)[:, None]
        for bias in (block.out.bias, block.down.bias):
            if bias is not None:
                bias.data *= 1 - gone
    for name, module in parent.named_modules():
        if isinstance(module, torch.nn.RMSNorm) and not name.endswith(("q_norm", "k_norm")):
            module.weight.data *= (keep / shape.d_model) ** 0.5
            module.eps *= keep / shape.d_model
    torch.testing.assert_close(logits(carved), logits(parent), rtol=0, atol=1e-4)


def test_importance_finds_what_matters():
    shape = ModelShape(3, 32, 4, 48, 97, kv_heads=2)
    decoder = random_decoder(shape, seed=1)
    with torch.no_grad():
        decoder.blocks[0].qkv.weight[-16:-8] *= 9  # values of the first group: its two heads speak up
        decoder.blocks[1].up.weight[[5, 48 + 5]] *= 9
        decoder.blocks[2].out.weight *= 1e-3
        decoder.blocks[2].down.weight *= 1e-3
    scores = measure_importance(decoder, [TOKENS])
    assert sorted(scores.heads[0].topk(2).indices.tolist()) == [0, 1]
    assert scores.ffn[1].argmax() == 5
    assert scores.layers.argmin() == 2
    assert scores.hidden.shape == (32,)


def test_heads_are_chosen_within_their_group():
    shape = ModelShape(1, 32, 8, 48, 97, kv_heads=2, head_dim=4)
    importance = measure_importance(random_decoder(shape, seed=1), [TOKENS])
    importance.heads[0] = torch.tensor([9.0, 8, 7, 6, 1, 4, 3, 2])
    both = choose_parts(shape, replace(shape, heads=4, kv_heads=2), importance, (0,))
    assert both.heads[0].tolist() == [0, 1, 5, 6]
    single = choose_parts(shape, replace(shape, heads=2, kv_heads=1), importance, (0,))
    assert (single.groups[0].tolist(), single.heads[0].tolist()) == ([0], [0, 1])


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 8, 12])
def test_candidates_are_different_sets_of_layers(keep: int):
    importance = measure_importance(random_decoder(ModelShape(12, 16, 2, 16, 97)), [TOKENS[:1]])
    candidates = layer_candidates(importance, keep)
    assert len(candidates) == len(set(candidates)) >= (1 if keep == 12 else 3)
    assert all(len(set(layers)) == keep and min(layers) >= 0 and max(layers) < 12 for layers in candidates)


@pytest.mark.parametrize(
    ("notation", "said"),
    [
        ("9x64/4h/2kv/112", "layers is 9, the parent has 8"),
        ("2x128/4h/2kv/16hd/112", "d_model is 128"),
        ("2x64/8h/2kv/16hd/112", "heads is 8"),
        ("2x64/4h/2kv/113", "ffn is 113"),
        ("2x64/4h/2kv/8hd/112", "heads are 8 wide"),
        ("2x64/4h/1kv/16hd/112", "4 query heads share"),
    ],
)
def test_unreachable_shapes_are_refused(notation: str, said: str):
    with pytest.raises(OptionError, match=said):
        require_reachable(parse_shape("8x64/4h/2kv/112", vocab=97), parse_shape(notation, vocab=97))
