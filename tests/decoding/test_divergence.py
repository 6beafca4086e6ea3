"""A numerical tie is told from a bug, in float32 and in bf16."""

import pytest
import torch
from conftest import noisy

import shallowdraft as sd
from shallowdraft.decoding.divergence import explain, greedy_gaps
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.shape import ModelShape

SHAPE = ModelShape(4, 64, 4, 128, 500, kv_heads=2, context=300)


@pytest.fixture(scope="module")
def target() -> sd.Model:
    return sd.Model("target", random_decoder(SHAPE, seed=5, scale=2.0))


def test_equal_runs_do_not_diverge(target):
    run = sd.generate(target, [1, 2, 3], max_new_tokens=20).token_ids
    assert explain(target, [1, 2, 3], run, run) is None
    assert explain(target, [1, 2, 3], run, run[:7]) is None
    assert greedy_gaps(target, [1, 2, 3], run).max() <= 1


def test_a_wrong_token_is_a_bug(target):
    run = sd.generate(target, [1, 2, 3], max_new_tokens=20).token_ids
    wrong = [*run[:8], (run[8] + 1) % 500, *run[9:]]
    found = explain(target, [1, 2, 3], run, wrong)
    assert found is not None
    assert (found.position, found.gaps[0], found.tie) == (8, 0.0, False)
    assert "BUG" in str(found)
    assert greedy_gaps(target, [1, 2, 3], wrong)[8] > 1


def test_two_tokens_of_equal_logit_are_a_tie(target):
    run = sd.generate(target, [1, 2, 3], max_new_tokens=20).token_ids
    twin = random_decoder(SHAPE, seed=5, scale=2.0)
    other = next(token for token in range(500) if token not in run)
    twin.head.weight.data[other] = twin.head.weight.data[run[8]]
    found = explain(sd.Model("twin", twin), [1, 2, 3], run, [*run[:8], other])
    assert found is not None
    assert found.tie
    assert "tie" in str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_diverges_only_in_ties(dtype):
    """Passes of different sizes round differently: outputs may part, but only where the rule says they may."""
    target = sd.Model("half", random_decoder(SHAPE, seed=6, scale=2.0).to(dtype).pack())
    exact = sd.Model("float", random_decoder(SHAPE, seed=6, scale=2.0))
    draft = sd.Model("draft", noisy(exact, 0.1, pack=False).decoder.to(dtype).pack())
    prompts = [[seed, 7, seed + 3] for seed in range(40)]
    plain = sd.generate(target, prompts, max_new_tokens=60)
    speculative = sd.generate(target, prompts, draft=draft, max_new_tokens=60)
    for prompt, one, two in zip(prompts, plain, speculative, strict=True):
        found = explain(target, prompt, one.token_ids, two.token_ids)
        assert found is None or found.tie, str(found)
        assert greedy_gaps(target, prompt, two.token_ids).max() <= 1
