"""Engines that are kept for the next prompts: as on a GPU, where each holds captured iterations."""

import copy
import gc
import weakref

import pytest
import torch
from conftest import noisy, random_heads

import shallowdraft as sd
from shallowdraft.decoding import engine_cache
from shallowdraft.decoding.engine_cache import MAX_KEPT, EngineCache
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape

PROMPTS = [[5, 17, 3, 41], [60], [8] * 9]
OTHERS = [[7, 7, 1], [2, 3], [9] * 9]
DRAFTERS = ["plain", "model", "itself", "tree", "several", "skip", "ngram", "medusa"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> EngineCache:
    """A cache that keeps engines of a CPU too."""
    cache = EngineCache()
    monkeypatch.setattr(engine_cache, "ENGINES", cache)
    monkeypatch.setattr(engine_cache, "KEPT_ON", ("cpu",))
    return cache


def new_target(shape: str = "3x64/4h/96", *, pack: bool = False) -> sd.Model:
    decoder = random_decoder(parse_shape(shape, vocab=97), seed=1, scale=2.0)
    return sd.Model("target", decoder.pack() if pack else decoder)


def options_of(drafter: str, target: sd.Model) -> dict[str, object]:
    options: dict[str, object] = {"max_new_tokens": 30, "stop_tokens": (), "lookahead": 3}
    if drafter in ("model", "tree", "several"):
        options["draft"] = noisy(target, 0.05, pack=False)
    if drafter == "itself":
        options["draft"] = target
    if drafter == "medusa":
        options["heads"] = random_heads(target, 3)
    if drafter == "several":
        options["temperature"] = 1.0
    if drafter not in ("plain", "model", "itself"):
        options |= {"drafter": drafter, "nodes": 9}
    return options


def test_nothing_is_kept_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_cache, "ENGINES", EngineCache())
    sd.generate(new_target(), PROMPTS, max_new_tokens=5)
    assert not len(engine_cache.ENGINES)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_kept_engine_does_not_keep_its_model(engines: EngineCache, drafter: str, pack: bool):
    target = new_target(pack=pack)
    options = options_of(drafter, target)
    sd.generate(target, PROMPTS, **options)
    sd.generate(target, PROMPTS, **options)
    assert len(engines) == 1
    (engine,) = (engine for shelf in engines._shelves.values() for engine in shelf.engines.values())
    decoder, kept = weakref.ref(target.decoder), weakref.ref(engine)
    del target, options, engine
    gc.collect()
    assert decoder() is None
    assert kept() is None
    assert not len(engines)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_kept_engine_gives_what_a_new_one_gives(engines: EngineCache, drafter: str, temperature: float):
    target = new_target()
    options = options_of(drafter, target) | {"temperature": temperature or float(drafter == "several")}
    sd.generate(target, PROMPTS, seed=1, **options)
    (shelf,) = engines._shelves.values()
    (engine,) = shelf.engines.values()
    again = sd.generate(target, OTHERS, seed=2, **options)
    assert list(shelf.engines.values()) == [engine]
    engines.drop(target.decoder)
    new = sd.generate(target, OTHERS, seed=2, **options)
    assert list(engines._shelves[target.decoder].engines.values()) != [engine]
    assert [out.token_ids for out in again] == [out.token_ids for out in new]
    assert [out.accepted_by_iteration for out in again] == [out.accepted_by_iteration for out in new]


def test_an_encoder_decoder(engines: EngineCache):
    target = new_target("2+3x64/4h/96")
    before = [sd.generate(target, PROMPTS, max_new_tokens=20).copy() for _ in range(2)]
    assert len(engines) == 1
    assert [out.token_ids for out in before[0]] == [out.token_ids for out in before[1]]
    decoder = weakref.ref(target.decoder)
    del target
    gc.collect()
    assert decoder() is None


def test_no_more_than_a_few_are_kept(engines: EngineCache):
    target = new_target()
    for count in range(1, MAX_KEPT + 3):
        sd.generate(target, [[1]] * count, max_new_tokens=3)
    assert len(engines) == MAX_KEPT


def test_engines_of_weights_that_were_moved_are_dropped(engines: EngineCache):
    """What was captured would read the old memory; on a CPU the tokens show whether weights were looked at again."""
    target = new_target()
    sd.generate(target, PROMPTS, max_new_tokens=5)
    (shelf,) = engines._shelves.values()
    (engine,) = shelf.engines.values()
    target.decoder.to(torch.float64).to(torch.float32)
    sd.generate(target, PROMPTS, max_new_tokens=5)
    (shelf,) = engines._shelves.values()
    assert list(shelf.engines.values()) != [engine]


def test_copies_find_no_engine(engines: EngineCache):
    """What was captured reads the original's weights."""
    target = new_target()
    sd.generate(target, PROMPTS, max_new_tokens=5)
    (key,) = engines._shelves[target.decoder].engines
    assert engines.take(copy.deepcopy(target.decoder), key) is None
    assert engines.take(target.decoder.skipping([0]), key) is None
    assert engines.take(target.decoder, key) is not None
