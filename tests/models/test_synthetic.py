from dataclasses import replace

import pytest
import torch

import shallowdraft as sd
from shallowdraft.errors import OptionError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.shape import ModelShape

TARGET, DRAFT = ModelShape(3, 48, 4, 96, 512), ModelShape(1, 16, 2, 32, 512)


@pytest.mark.parametrize("agreement", [0.0, 0.35, 0.8, 1.0])
def test_the_output_and_the_tar_are_known(agreement: float, tmp_path):
    pair = make_pair(TARGET, DRAFT, agreement, seed=7)
    assert pair.agrees.sum() == round(agreement * 512)
    target, draft = (sd.load(folder) for folder in pair.save(tmp_path))
    out = sd.generate(target, [9], draft=draft, lookahead=3, max_new_tokens=500)
    assert out.token_ids == pair.walk(9, 500)
    assert out.stats.tar == pytest.approx(pair.tar(3), rel=0.05)


def test_the_permutation_is_one_cycle():
    pair = make_pair(TARGET, DRAFT, 0.5)
    assert sorted(pair.walk(0, 512)) == list(range(512))


def test_any_text_can_be_a_prompt():
    pair = make_pair(TARGET, DRAFT, 0.5)
    assert pair.target.decode(pair.target.encode("Ünïcode, 漢字 & 😀\n")) == "Ünïcode, 漢字 & 😀\n"


def test_half_precision_follows_the_same_walk(tmp_path):
    folder, _ = make_pair(TARGET, DRAFT, 0.5).save(tmp_path)
    assert sd.generate(sd.load(folder, dtype="bfloat16"), [9], max_new_tokens=100).token_ids == make_pair(
        TARGET, DRAFT, 0.5
    ).walk(9, 100)


@pytest.mark.parametrize(
    ("target", "draft", "agreement", "said"),
    [
        (TARGET, ModelShape(1, 16, 2, 32, 400), 0.5, "vocabularies are 512 and 400"),
        (ModelShape(1, 16, 2, 32, 64), ModelShape(1, 16, 2, 32, 64), 0.5, "at least 320"),
        (TARGET, DRAFT, 1.5, "agreement is 1.5"),
        (ModelShape(1, 4, 2, 8, 4096), ModelShape(1, 64, 2, 32, 4096), 0.5, "too narrow"),
    ],
)
def test_impossible_pairs_are_refused(target, draft, agreement: float, said: str):
    with pytest.raises(OptionError, match=said):
        make_pair(target, draft, agreement)


@pytest.mark.parametrize("name", ["opt-350m", "opt-125m", "tiny-llama-1.1b"])
def test_any_family_can_be_a_target(name: str):
    """Tied, post-norm, with a projected embedding, grouped: shrunk versions of known shapes."""
    small = {"layers": 2, "d_model": 64, "heads": 4, "ffn": 96, "vocab": 512, "head_dim": 16, "context": 300}
    known = NAMED[name]
    embed_dim = 32 if known.embed_dim != known.d_model else 64
    shape = replace(known, **small, kv_heads=2 if known.kv_heads != known.heads else 4, embed_dim=embed_dim)
    pair = make_pair(shape, DRAFT, 0.7)
    out = sd.generate(pair.target, [9], draft=pair.draft, max_new_tokens=200)
    assert out.token_ids == pair.walk(9, 200)


def test_seeds_give_different_weights():
    one, two = (make_pair(TARGET, DRAFT, 0.5, seed=seed).target.decoder.embed.weight for seed in (1, 2))
    assert not torch.equal(one, two)
