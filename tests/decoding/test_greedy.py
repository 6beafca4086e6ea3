"""Greedy losslessness in float32: speculation emits what plain decoding emits.

The models are random and undamped, so that each token depends on the whole context: a wrong rollback, position or mask
changes the output. Shown able to fail by the mutants at the end.
"""

import pytest
import torch
from conftest import CONFIGS, noisy, random_heads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shallowdraft as sd
from shallowdraft.decoding.state import State
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.shape import ModelShape

SMALLEST_GAP = 1e-5  # of the two largest logits; below it rounding may choose


def smallest_top_gap(model: sd.Model, prompt: list[int], continuation: list[int]) -> float:
    """The smallest distance between the two largest logits over a continuation."""
    tokens = torch.tensor([prompt + continuation])
    length = tokens.shape[1]
    with torch.inference_mode():
        hidden = model.decoder(tokens, torch.arange(length)[None], model.decoder.new_cache(1, length), length)
        top = model.decoder.head(hidden[0, len(prompt) - 1 : -1]).topk(2, -1).values
    return float((top[:, 0] - top[:, 1]).min())


def assert_lossless(
    target: sd.Model, draft: sd.Model | None, prompts: list[list[int]], lookahead: int, strategy=None, **options
) -> float:
    plain = sd.generate(target, prompts, **options)
    speculative = sd.generate(target, prompts, draft=draft, lookahead=lookahead, **(strategy or {}), **options)
    for prompt, one, two in zip(prompts, plain, speculative, strict=True):
        assert smallest_top_gap(target, prompt, one.token_ids) > SMALLEST_GAP
        assert two.token_ids == one.token_ids
        assert two.finish_reason == one.finish_reason
    return sum(out.stats.accepted for out in speculative) / max(1, sum(out.stats.drafted for out in speculative))


PROMPTS = [[5, 17, 3, 88, 41, 9], [60], [8] * 30, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [96, 0, 96]]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("lookahead", [1, 2, 3, 5, 8, 16])
def test_every_family(kind: str, lookahead: int, pair):
    target, draft = pair(kind)
    rate = assert_lossless(target, draft, PROMPTS[: 1 + lookahead % 5], lookahead, max_new_tokens=48)
    assert 0.02 < rate < 0.98  # both acceptance and rejection took place


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("lookahead", "nodes"), [(1, 3), (3, 3), (4, 12), (6, 40)])
def test_trees_of_every_family(kind: str, lookahead: int, nodes: int, pair):
    target, draft = pair(kind)
    strategy = {"drafter": "tree", "nodes": nodes}
    prompts = PROMPTS[: 1 + lookahead % 5]
    assert_lossless(target, draft, prompts, lookahead, strategy, max_new_tokens=48)
    chain, tree = (
        sd.generate(target, prompts, draft=draft, lookahead=lookahead, max_new_tokens=48, stop_tokens=(), **one)
        for one in ({}, strategy)
    )
    if nodes > lookahead:  # the first choices are in the tree, and more
        tars = [sum(out.stats.iterations for out in outs) for outs in (chain, tree)]
        assert tars[1] < tars[0]


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "opt-350m"])
@pytest.mark.parametrize("drafter", ["model", "skip"])
def test_a_draft_that_stops_where_it_is_unsure(kind: str, drafter: str, pair):
    target, draft = pair(kind)
    proposing = draft if drafter == "model" else None
    assert_lossless(target, proposing, PROMPTS, 8, {"drafter": drafter, "min_confidence": 0.2}, max_new_tokens=48)
    options = {"draft": proposing, "drafter": drafter, "lookahead": 8, "max_new_tokens": 48, "stop_tokens": ()}
    eager, careful = (sd.generate(target, PROMPTS[0], min_confidence=least, **options).stats for least in (None, 0.95))
    assert careful.drafted < eager.drafted


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("skips", [None, (), (0,), (3, 2, 1)], ids=str)
def test_a_target_that_drafts_for_itself(kind: str, skips: tuple[int, ...] | None, pair):
    target, _ = pair(kind)
    rate = assert_lossless(target, None, PROMPTS[:3], 3, {"drafter": "skip", "skips": skips}, max_new_tokens=48)
    assert rate > 0.9 if skips == () else rate < 1


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("nodes", [3, 60])
def test_heads_on_every_family(kind: str, nodes: int, pair):
    target, _ = pair(kind)
    strategy = {"drafter": "medusa", "heads": random_heads(target, 3), "nodes": nodes}
    rate = assert_lossless(target, None, PROMPTS, 3, strategy, max_new_tokens=48)
    assert rate > 0 or nodes == 3  # of many guesses some are right


@pytest.mark.parametrize("lookahead", [1, 4, 16])
@pytest.mark.parametrize("kind", ["llama-gqa-tied-head_dim", "mistral-window", "opt-350m"])
def test_the_same_model_as_draft_accepts_everything(kind: str, lookahead: int, folder):
    target = sd.load(folder(kind))
    assert_lossless(target, target, PROMPTS, lookahead, max_new_tokens=40)
    for out in sd.generate(target, PROMPTS, draft=target, lookahead=lookahead, max_new_tokens=40):
        assert set(out.accepted_by_iteration[:-1]) == {lookahead}


@pytest.mark.parametrize(("noise", "lowest", "highest"), [(0.0, 0.9, 1.0), (0.01, 0.3, 1.0), (3.0, 0.0, 0.15)])
def test_agreement_from_none_to_all(noise: float, lowest: float, highest: float, pair):
    target, draft = pair("llama", noise)
    assert lowest <= assert_lossless(target, draft, PROMPTS, 4, max_new_tokens=60) <= highest


SHAPES = st.builds(
    ModelShape,
    layers=st.integers(1, 3),
    d_model=st.sampled_from([16, 24, 40]),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 16]),
    ffn=st.integers(8, 48),
    vocab=st.integers(11, 40),
    context=st.integers(24, 90),
    tied=st.booleans(),
    qk_norm=st.just(True),
    family=st.just("qwen3"),
    window=st.sampled_from([None, 3, 9]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(shape=SHAPES, noise=st.sampled_from([0.0, 0.1, 0.4, 3.0]), lookahead=st.integers(1, 16), data=st.data())
def test_any_shape_prompt_and_stop(shape: ModelShape, noise: float, lookahead: int, data: st.DataObject):
    decoder = random_decoder(shape, seed=data.draw(st.integers(0, 99)), scale=2.0)
    pack = data.draw(st.booleans())
    target = sd.Model("target", decoder.pack() if pack else decoder)
    token = st.integers(0, shape.vocab - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=shape.context - 1), min_size=1, max_size=5))
    stops = data.draw(st.lists(token, max_size=2))
    new_tokens = data.draw(st.integers(1, 50))
    assert_lossless(
        target, noisy(target, noise, pack=pack), prompts, lookahead, max_new_tokens=new_tokens, stop_tokens=stops
    )


class StaleCache(KVCache):
    """Wrong: a slot, once written, keeps its first content, so that rejected tokens stay."""

    def write(self, layer, addresses, keys, values):
        fresh = [(slots.view(-1, slots.shape[-1])[addresses] == 0).all(-1) for slots in self.layers[layer]]
        for slots, new, empty in zip(self.layers[layer], (keys, values), fresh, strict=True):
            width = slots.shape[-1]
            flat = new.transpose(1, 2).reshape(-1, width)
            slots.view(-1, width).index_copy_(0, addresses[empty], flat[empty])


def test_a_wrong_rollback_is_caught(pair, monkeypatch):
    target, draft = (noisy(model, 0.0, pack=False) for model in pair("llama"))
    assert_lossless(target, draft, PROMPTS, 4, max_new_tokens=48)
    monkeypatch.setattr("shallowdraft.models.decoder.KVCache", StaleCache)
    with pytest.raises(AssertionError):
        assert_lossless(target, draft, PROMPTS, 4, max_new_tokens=48)


def test_a_tree_left_scattered_is_caught(pair, monkeypatch):
    target, draft = pair("llama")
    monkeypatch.setattr(KVCache, "keep", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_lossless(target, draft, PROMPTS, 4, {"drafter": "tree", "nodes": 12}, max_new_tokens=48)


@pytest.mark.parametrize("pack", [False, True])
def test_a_wrong_position_is_caught(pair, monkeypatch, pack: bool):
    """Wrong: verification starts one position late after a full acceptance, as if the bonus token were in the cache."""
    target, draft = (noisy(model, 0.0, pack=pack) for model in pair("llama"))
    commit, commit_greedy = State.commit, Decoder.commit_greedy

    def late_commit(self, verdict):
        commit(self, verdict)
        late = (verdict.accepted == self.lookahead) & (self.lookahead > 0)
        self.length = torch.minimum(self.length + late, self.limit)

    def late_commit_greedy(self, proposed, drafted, tokens, length, limit, *rest):
        packed = commit_greedy(self, proposed, drafted, tokens, length, limit, *rest)
        if packed is not None:
            late = (packed[:, 0] == proposed.shape[1]) & (proposed.shape[1] > 0)
            length.copy_(torch.minimum(length + late, limit))
        return packed

    monkeypatch.setattr(State, "commit", late_commit)
    monkeypatch.setattr(Decoder, "commit_greedy", late_commit_greedy)
    with pytest.raises(AssertionError):
        assert_lossless(target, draft, PROMPTS, 4, max_new_tokens=48)


def test_a_draft_that_forgets_the_owed_token_is_still_lossless(pair, monkeypatch):
    """What a drafter does can cost speed only: feeding it one token instead of two leaves the output unchanged."""
    target, draft = pair("llama", 0.0)
    good = sd.generate(target, PROMPTS[0], draft=draft, lookahead=4, max_new_tokens=48)
    real = State.tail
    monkeypatch.setattr(State, "tail", lambda self, _count, *more: real(self, 1, *more))
    bad = sd.generate(target, PROMPTS[0], draft=draft, lookahead=4, max_new_tokens=48)
    assert bad.token_ids == good.token_ids
    assert bad.stats.accepted < good.stats.accepted
