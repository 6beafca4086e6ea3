"""Medusa heads: what they are said to guess is what the engine sees."""

import json
from pathlib import Path

import pytest
import torch
from conftest import random_heads

import shallowdraft as sd
from shallowdraft.building import medusa
from shallowdraft.building.tasks import HeadTraining
from shallowdraft.errors import CheckpointError, OptionError
from shallowdraft.models.heads import load_heads, save_heads
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.models.tree import best_tree, chances
from shallowdraft.shapes.shape import ModelShape

SHAPE = ModelShape(2, 32, 2, 48, 12, context=128)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> sd.Model:
    return sd.Model("target", random_decoder(SHAPE, seed=3, scale=1.5))


def test_ranks_say_what_the_engine_keeps(target):
    """Exactly, of every iteration: the heads look at the right state, and the tree is walked as it is verified."""
    heads = random_heads(target, 3)
    text = sd.generate(target, PROMPT, max_new_tokens=60).token_ids
    ranks = medusa._ranks(heads, target.decoder, torch.tensor([PROMPT + text]))[0].tolist()
    heads.chances = chances(torch.tensor([ranks]))
    options = {"drafter": "medusa", "heads": heads, "lookahead": 3, "nodes": 12, "max_new_tokens": 50}
    run = sd.generate(target, PROMPT, **options)
    tree = best_tree(heads.chances, 12)
    at, kept = len(PROMPT) - 1, []
    for _ in run.accepted_by_iteration:
        kept.append(tree.accepted_depth(ranks[at][: tree.depth]))
        at += kept[-1] + 1
    assert run.accepted_by_iteration[:-1] == kept[:-1]
    assert len(set(kept)) > 2


def test_a_target_in_16_bits_takes_heads_in_32():
    target = random_decoder(SHAPE, seed=3, scale=1.5).bfloat16()
    heads = random_heads(sd.Model("target", target), 2)
    tokens = torch.randint(12, (2, 9))
    assert medusa._ranks(heads, target, tokens).shape == (2, 7, 2)
    assert HeadTraining(target).loss(heads, tokens).isfinite().all()


def test_chances_are_those_where_the_heads_before_were_right():
    ranks = torch.tensor([[[0, 1], [0, 0], [1, 0], [99, 0]]])
    first, second = chances(ranks)
    assert first[:3] == [0.5, 0.25, 0.0]
    assert second[:2] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_heads_are_kept_with_their_target(target, tmp_path: Path):
    heads = random_heads(target, 2)
    heads.chances = [[0.5, 0.25], [0.25, 0.125]]
    save_heads(heads, tmp_path / "heads", tokens=7)
    loaded = load_heads(target, tmp_path / "heads")
    assert loaded.chances == heads.chances
    hidden = torch.randn(3, 32)
    assert (loaded(hidden) - heads(hidden)).abs().max() < 0.05  # kept in 16 bits
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["tokens"] == 7


def test_heads_that_cannot_be(target, tmp_path: Path):
    with pytest.raises(CheckpointError, match="there are no heads"):
        load_heads(target, tmp_path)
    with pytest.raises(OptionError, match="needs heads"):
        sd.generate(target, PROMPT, drafter="medusa")
    with pytest.raises(OptionError, match="for the medusa drafter"):
        sd.generate(target, PROMPT, drafter="ngram", heads=random_heads(target, 2))
    other = sd.Model("other", random_decoder(ModelShape(1, 16, 1, 16, 12), seed=0))
    save_heads(random_heads(other, 2), tmp_path / "other")
    with pytest.raises(OptionError, match="hidden state of 16"):
        load_heads(target, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"chances": []', '"chances": [[2.0]]'))
    with pytest.raises(CheckpointError, match="not probabilities"):
        load_heads(other, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_heads(other, tmp_path / "other")
