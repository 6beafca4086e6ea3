"""Learned masks reach exactly the asked shape, and carving changes nothing."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building.test_training import make_store
from conftest import CONFIGS

from shallowdraft.building import masks as module
from shallowdraft.building.batches import Batches
from shallowdraft.building.domain_weights import DomainBalance
from shallowdraft.building.masks import Masks, MaskTraining, applied
from shallowdraft.building.pruning import carve
from shallowdraft.building.recipe import Recipe
from shallowdraft.building.token_store import TokenStore
from shallowdraft.building.training import train
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.checkpoint import load_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape

RECIPE = Recipe(tokens=80 * 512, batch_tokens=512, sequence=32, learning_rate=1e-3)
LLAMA = parse_shape("12x32/4h/48", vocab=320, context=64)
PARENTS = {
    "llama": LLAMA,
    "llama-gqa": replace(LLAMA, kv_heads=2, tied=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, kv_heads=2),
    "opt": replace(
        LLAMA, family="opt", rope=None, activation="relu", qkv_bias=True, out_bias=True, ffn_bias=True, tied=True
    ),
}
SHAPES = [
    ("llama", "1x32/4h/48"),
    ("llama", "5x32/4h/48"),
    ("llama", "12x16/4h/8hd/48"),
    ("llama", "3x24/2h/8hd/20"),
    ("llama-gqa", "1x32/4h/2kv/48"),
    ("llama-gqa", "2x32/2h/2kv/8hd/48"),
    ("llama-gqa", "8x24/2h/1kv/8hd/32"),
    ("qwen3", "1x16/2h/1kv/8hd/16"),
    ("qwen3", "4x32/4h/2kv/24"),
    ("opt", "1x32/4h/48"),
    ("opt", "6x20/3h/8hd/30"),
    ("opt", "2x32/2h/8hd/12"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("masks"))


def shear(parent: Decoder, pruned_shape: ModelShape, store: TokenStore, folder: Path) -> tuple[Decoder, MaskTraining]:
    model, task = copy.deepcopy(parent), MaskTraining(parent, pruned_shape)
    batches = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=1)
    list(train(model, task, batches, RECIPE, folder))
    return model, task


def largest_difference(masked: Decoder, masks: Masks, carved: Decoder, vocab: int) -> float:
    tokens = torch.randint(0, vocab, (3, 30), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        with applied(masked, masks.hard()):
            expected = masked.logits(tokens)
        return float((carved.logits(tokens) - expected).abs().max())


@pytest.mark.parametrize(("kind", "notation"), SHAPES)
def test_the_asked_shape_is_reached_exactly(kind: str, notation: str, store: TokenStore, tmp_path: Path):
    pruned_shape = parse_shape(notation, vocab=320, context=64)
    parent = random_decoder(PARENTS[kind], seed=3)
    model, task = shear(parent, pruned_shape, store, tmp_path)
    assert min(task.masks.gaps().values()) > 0.5
    carved = carve(model, pruned_shape, task.masks.kept_parts())
    assert str(carved.shape) == str(replace(pruned_shape, family=parent.shape.family))
    assert carved.shape.parameters == sum(p.numel() for p in set(carved.parameters()))
    assert largest_difference(model, task.masks, carved, 320) < 1e-4


def test_recomputed_activations_see_the_gates(store: TokenStore, tmp_path: Path):
    parent, pruned_shape = (
        random_decoder(PARENTS["llama-gqa"], seed=3),
        parse_shape("2x24/2h/1kv/8hd/20", vocab=320, context=64),
    )
    finals = []
    for recompute in (False, True):
        model, task = copy.deepcopy(parent), MaskTraining(parent, pruned_shape)
        batches = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=1)
        steps = train(model, task, batches, RECIPE, tmp_path / str(recompute), recompute=recompute)
        for record in steps:
            if record.step == 4:
                break
        finals.append(model.state_dict())
    assert all(torch.equal(tensor, finals[1][name]) for name, tensor in finals[0].items())


def test_domains_are_weighed_by_the_masked_model(store: TokenStore, tmp_path: Path):
    parent, pruned_shape = random_decoder(PARENTS["llama"], seed=3), parse_shape("1x32/4h/48", vocab=320, context=64)
    model, task = copy.deepcopy(parent), MaskTraining(parent, pruned_shape)
    seen = []

    def lag(decoder: Decoder) -> dict[str, float]:
        seen.append(bool(decoder.blocks[0]._forward_hooks))
        return {"animals": 0.0, "colours": 0.1}

    batches = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=1)
    list(train(model, task, batches, RECIPE, tmp_path, balance=DomainBalance(lag, every=10)))
    assert seen == [True] * 8
    assert not model.blocks[0]._forward_hooks


def test_a_stopped_run_goes_on_to_the_same_masks_and_weights(store: TokenStore, tmp_path: Path):
    parent, pruned_shape = (
        random_decoder(PARENTS["llama-gqa"], seed=3),
        parse_shape("2x24/2h/1kv/8hd/20", vocab=320, context=64),
    )
    recipe = replace(RECIPE, save_every=7)

    def final(folder: str, stops: tuple[int, ...]) -> dict[str, torch.Tensor]:
        for stop in (*stops, 0):
            model, task = copy.deepcopy(parent), MaskTraining(parent, pruned_shape)
            batches = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=1)
            for record in train(model, task, batches, recipe, tmp_path / folder):
                if record.step == stop:
                    break
        return model.state_dict() | {f"mask {name}": tensor for name, tensor in task.masks.state_dict().items()}

    straight, stopped = final("straight", ()), final("stopped", (12, 33, 71))
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in straight.items())


@pytest.mark.parametrize("kind", CONFIGS)
def test_carving_equals_masking_for_every_kind_of_model(kind: str, folder):
    parent = load_decoder(folder(kind), dtype=torch.float32, device=torch.device("cpu"))
    shape, masks = parent.shape, some_masks(parent.shape)
    carved = carve(parent, masks.shape, masks.kept_parts())
    assert carved.shape.layers == shape.layers - 1
    assert largest_difference(parent, masks, carved, shape.vocab) < 1e-4


def some_masks(shape: ModelShape) -> Masks:
    """Masks that keep something less of everything, at random."""
    grouped = shape.heads > shape.kv_heads > 1
    pruned_shape = replace(
        shape,
        layers=2,
        d_model=40,
        embed_dim=0 if shape.embed_dim == shape.d_model else shape.embed_dim,
        heads=shape.heads // 4 if grouped else shape.heads // 2,
        kv_heads=shape.kv_heads // 2 if shape.kv_heads > 1 else 1,
        ffn=50,
    )
    masks, random = Masks(shape, pruned_shape), torch.Generator().manual_seed(2)
    masks.shape = pruned_shape
    with torch.no_grad():
        for name, location in masks.locations.items():
            ranks = torch.rand(location.shape, generator=random).argsort(1).argsort(1)
            location.copy_(torch.where(ranks < masks.keep[name], module.HIGHEST, module.LOWEST))
    return masks


def test_a_norm_over_all_dimensions_would_be_caught(folder, monkeypatch: pytest.MonkeyPatch):
    parent = load_decoder(folder("llama"), dtype=torch.float32, device=torch.device("cpu"))
    masks = some_masks(parent.shape)
    carved = carve(parent, masks.shape, masks.kept_parts())
    monkeypatch.setattr(module, "_norm_of_kept", lambda gate: lambda _, __, output: output * gate)
    assert largest_difference(parent, masks, carved, parent.shape.vocab) > 1e-2


def test_a_part_that_is_gated_but_not_cut_would_be_caught(folder):
    parent = load_decoder(folder("llama"), dtype=torch.float32, device=torch.device("cpu"))
    masks = some_masks(parent.shape)
    kept_parts = masks.kept_parts()
    other = replace(kept_parts, heads=tuple(torch.arange(len(heads)) for heads in kept_parts.heads))
    assert any(not torch.equal(kept, every) for kept, every in zip(kept_parts.heads, other.heads, strict=True))
    assert largest_difference(parent, masks, carve(parent, masks.shape, other), parent.shape.vocab) > 1e-2


def test_masks_that_did_not_converge_are_not_carved():
    masks = Masks(LLAMA, replace(LLAMA, layers=2))
    with pytest.raises(TrainingError, match=r"layers score only 0\.00 apart"):
        masks.kept_parts()


def test_only_what_shrinks_has_masks():
    assert set(Masks(LLAMA, replace(LLAMA, layers=1)).keep) == {"layers"}
    assert set(Masks(replace(LLAMA, kv_heads=2), replace(LLAMA, kv_heads=1, heads=2)).keep) == {"groups"}
    assert set(Masks(replace(LLAMA, kv_heads=2), replace(LLAMA, kv_heads=2, heads=2)).keep) == {"heads"}
    with pytest.raises(OptionError, match="nothing to prune"):
        Masks(LLAMA, LLAMA)


def test_scores_reach_0_and_1():
    """The published score of a closed gate is 0.047: eleven of them alone would be half a layer of twelve."""
    masks = Masks(LLAMA, replace(LLAMA, layers=1))
    with torch.no_grad():
        masks.locations["layers"].fill_(module.LOWEST)
        masks.locations["layers"][0, 3] = module.HIGHEST
    score = masks.scores()["layers"].detach()
    assert score.sum() == pytest.approx(1, abs=1e-5)
    assert masks.excess(1.0)["layers"].detach() == pytest.approx(0, abs=1e-5)
    published = float(torch.sigmoid(masks.locations["layers"].detach() + module.SHIFT).sum())
    assert published > 1.4


def test_gates_follow_the_hard_concrete_distribution():
    """P(z > 0) is what the score says, before it is rescaled; the same step draws the same gates."""
    masks = Masks(LLAMA, replace(LLAMA, ffn=24))
    with torch.no_grad():
        masks.locations["ffn"].fill_(-1.0)
    drawn = torch.stack([masks.sample(5, step)["ffn"] for step in range(200)])
    expected = float(torch.sigmoid(torch.tensor(module.SHIFT - 1.0)))
    assert float((drawn > 0).float().mean()) == pytest.approx(expected, abs=0.01)
    assert torch.equal(masks.sample(5, 7)["ffn"], drawn[7])
    assert not torch.equal(drawn[6], drawn[7])
