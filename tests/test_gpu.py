"""The same engine on a CUDA GPU, under the rules of docs/lossless.md."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from conftest import noisy

import shallowdraft as sd
from shallowdraft.decoding import engine_cache
from shallowdraft.decoding.batch import Batch
from shallowdraft.decoding.divergence import explain, greedy_gaps
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.engine_cache import EngineCache
from shallowdraft.decoding.options import Options, Settings
from shallowdraft.decoding.timing import time_beside_plain
from shallowdraft.kernels import gpu
from shallowdraft.models.synthetic import make_pair, random_decoder
from shallowdraft.prompts import Prompt
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.proposers import model_proposer, ngram_proposer, skip_proposer, tree_proposer
from shallowdraft.studying.study import Plan, study

pytestmark = pytest.mark.gpu

SHAPE = ModelShape(4, 256, 4, 512, 1000, kv_heads=2, context=400)
PROMPTS = [[seed, 7, seed + 3] * (1 + seed % 4) for seed in range(8)]


def on_gpu(dtype: torch.dtype, noise: float = 0.1, *, fused: bool = True) -> tuple[sd.Model, sd.Model]:
    target = sd.Model("target", random_decoder(SHAPE, seed=1, scale=2.0))
    draft = noisy(target, noise, pack=False)
    models = sd.Model("target", target.decoder.to("cuda", dtype)), sd.Model("draft", draft.decoder.to("cuda", dtype))
    for model in models if fused else ():
        assert (model.decoder.pack().fused is None) == (dtype == torch.float32)
    return models


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "pytorch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_greedy_is_lossless_under_the_rule(dtype: torch.dtype, lookahead: int, fused: bool):
    target, draft = on_gpu(dtype, fused=fused)
    plain = sd.generate(target, PROMPTS, max_new_tokens=80)
    speculative = sd.generate(target, PROMPTS, draft=draft, lookahead=lookahead, max_new_tokens=80)
    assert 0 < sum(out.stats.accepted for out in speculative) < sum(out.stats.drafted for out in speculative)
    for prompt, one, two in zip(PROMPTS, plain, speculative, strict=True):
        found = explain(target, prompt, one.token_ids, two.token_ids)
        assert found is None or found.tie, str(found)
        assert greedy_gaps(target, prompt, two.token_ids).max() <= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "beside drawn rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_that_join_a_batch_are_lossless_under_the_rule(dtype: torch.dtype, temperature: float):
    target, draft = on_gpu(dtype)
    batch, rows = Batch(target, draft, 4, 390, 8), []
    for prompt in PROMPTS:
        rows.append(batch.join(prompt, Settings(max_new_tokens=60)))
        drawn = batch.join(prompt, Settings(max_new_tokens=9, temperature=temperature))
        for _ in range(6):
            batch.step()
        batch.leave([drawn])
    while batch.rows:
        batch.step()
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert len(row.tokens) == 60
        assert greedy_gaps(target, prompt, row.tokens).max() <= 1


def test_a_batch_is_captured_once_for_whatever_rows_it_holds():
    """Requests that come and go, drawn beside greedy ones: each emits the known walk, and nothing is captured anew."""
    pair = make_pair(ModelShape(4, 256, 4, 512, 2048), ModelShape(1, 128, 2, 256, 2048), 0.8)
    for model in (pair.target, pair.draft):
        model.decoder.to("cuda", torch.bfloat16).pack()
    batch = Batch(pair.target, pair.draft, 4, 300, 6)
    batch.warm()

    def captured() -> dict[int, list[object]]:
        return {size: list(engine._graphs._captured.values()) for size, engine in batch._kept.items()}

    before, rows = captured(), []
    assert list(before) == [1, 2, 4, 6]
    assert all(len(kinds) == 2 and all(kinds) for kinds in before.values())
    for number in range(24):
        temperature = 0.05 if number % 3 == 0 else 0.0
        settings = Settings(max_new_tokens=20 + 9 * (number % 7), temperature=temperature, seed=number, stop_tokens=())
        rows.append((number, settings, batch.join([5, 31 * number + 1], settings)))
        while len(batch.rows) > 5 or (number % 8 == 7 and len(batch.rows) > 1):
            batch.step()
    while batch.rows:
        batch.step()
    for number, settings, row in rows:
        assert row.tokens == pair.walk(31 * number + 1, settings.max_new_tokens)
    assert captured() == before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_k=50, top_p=0.9)])
def test_an_iteration_never_waits(sampling: Sampling):
    target, draft = on_gpu(torch.bfloat16)
    drafter = ModelDrafter(draft.decoder, 4, sampling, SHAPE.vocab)
    running = Engine.for_prompts(target.decoder, drafter, sampling, PROMPTS, [390] * len(PROMPTS))
    running.prefill()
    for _ in range(3):  # as it is, captured, replayed
        running.iterate()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):  # past the table of random numbers, which is refilled on the way
            running.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rounded", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 5, 20, 40, 96])
@pytest.mark.parametrize(
    "size", [(3072, 1024), (256, 512), (1024, 256), (12288, 4096), (22016, 4096), (8192, 8192), (44032, 8192)]
)
def test_products_as_they_are_cut(size: tuple[int, int], rows: int, rounded: bool):
    outputs, inputs = size
    draws = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, generator=draws, device="cuda").bfloat16()
    matrix = torch.randint(-127, 128, size, generator=draws, device="cuda", dtype=torch.int8)
    scales = torch.rand(outputs, generator=draws, device="cuda") / inputs**0.5 / 64
    dense = (matrix * scales[:, None]).bfloat16()
    weight = gpu.Weight(matrix, scales) if rounded else gpu.Weight(dense)
    gain = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    gated = outputs in (1024, 22016, 44032)
    wanted = F.rms_norm(x.float(), (inputs,)) @ dense.float().T
    if gated:
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
    tiling = gpu.tiling(gpu.chip(x.device), outputs, inputs, rows, gated)
    found = gpu.product(x, weight, tiling, norm=gpu.InputNorm(gain, 0.0), activation=gpu.GATED if gated else None)
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)


def test_the_known_walk(tmp_path):
    pair = make_pair(ModelShape(4, 256, 4, 512, 2048), ModelShape(1, 128, 2, 256, 2048), 0.8)
    target, draft = (sd.load(folder) for folder in pair.save(tmp_path))
    assert (target.device.type, target.decoder.dtype) == ("cuda", torch.bfloat16)
    for temperature in (0.0, 0.05):
        prompts = [[token] for token in (9, 300, 1999)]
        outs = sd.generate(target, prompts, draft=draft, lookahead=5, max_new_tokens=300, temperature=temperature)
        for prompt, out in zip(prompts, outs, strict=True):
            assert out.token_ids == pair.walk(*prompt, 300)
            assert out.stats.tar > 3
            assert out.stats.draft_s > 0
            assert out.stats.verify_s > 0


@pytest.mark.parametrize(
    "strategy",
    [{"drafter": "tree", "nodes": 10}, {"drafter": "skip"}, {"drafter": "ngram"}, {"rule": "block"}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_other_ways_to_propose(strategy: dict[str, object], temperature: float):
    pair = make_pair(ModelShape(4, 256, 4, 512, 2048), ModelShape(1, 128, 2, 256, 2048), 0.8)
    for model in (pair.target, pair.draft):
        model.decoder.to("cuda", torch.bfloat16).pack()
    draft = None if strategy.get("drafter") in ("skip", "ngram") else pair.draft
    prompts = [[token] for token in (9, 300, 1999)]
    outs = sd.generate(
        pair.target, prompts, draft=draft, lookahead=4, max_new_tokens=100, temperature=temperature, **strategy
    )
    assert [out.token_ids for out in outs] == [pair.walk(*prompt, 100) for prompt in prompts]


def test_what_was_captured_serves_other_prompts(monkeypatch: pytest.MonkeyPatch):
    """An engine is taken up again: other prompts, lengths and seeds in the same memory give what a new one gives."""
    monkeypatch.setattr(engine_cache, "ENGINES", EngineCache())
    target, draft = on_gpu(torch.bfloat16)
    for temperature in (0.0, 0.8):
        options = {"draft": draft, "lookahead": 4, "max_new_tokens": 60, "temperature": temperature}
        for seed, prompts in enumerate((PROMPTS, PROMPTS[::-1], [[one] for one in range(8)])):
            again = sd.generate(target, prompts, seed=seed, **options)
            assert len(engine_cache.ENGINES)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(engine_cache, "ENGINES", EngineCache())
                fresh = sd.generate(target, prompts, seed=seed, **options)
            assert [out.token_ids for out in again] == [out.token_ids for out in fresh]
            assert [out.stats.accepted for out in again] == [out.stats.accepted for out in fresh]
        assert all(out.stats.draft_s > 0 < out.stats.verify_s for out in again)


@pytest.mark.parametrize(
    "strategy", [{}, {"drafter": "tree", "nodes": 10}, {"drafter": "skip"}, {"drafter": "ngram"}], ids=str
)
def test_an_encoder_decoder(strategy: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """In float32, where it must be the CPU's output; the second batch of sources is in the memory of the first."""
    monkeypatch.setattr(engine_cache, "ENGINES", EngineCache())
    decoder = random_decoder(parse_shape("2+3x64/4h/96", vocab=300), seed=4)
    target = sd.Model("target", decoder)
    draft = noisy(target, 0.1, pack=False)
    plain = [sd.generate(target, sources, max_new_tokens=60) for sources in (PROMPTS, PROMPTS[::-1])]
    for model in (target, draft):
        model.decoder.to("cuda").pack()
    proposing = None if strategy.get("drafter") in ("skip", "ngram") else draft
    for sources, expected in zip((PROMPTS, PROMPTS[::-1]), plain, strict=True):
        outs = sd.generate(target, sources, draft=proposing, lookahead=4, max_new_tokens=60, **strategy)
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
        assert len(engine_cache.ENGINES)


def test_the_lookahead_follows_what_pays():
    target, draft = on_gpu(torch.bfloat16)
    plain = sd.generate(target, PROMPTS[0], max_new_tokens=200)
    auto = sd.generate(target, PROMPTS[0], draft=draft, lookahead="auto", max_new_tokens=200)
    found = explain(target, PROMPTS[0], plain.token_ids, auto.token_ids)
    assert found is None or found.tie, str(found)


def test_weights_in_8_bits(tmp_path):
    """Rounded once, a model is another model: it agrees with itself as any does, and as a draft with its original."""
    sd.Model("target", random_decoder(SHAPE, seed=1, scale=2.0)).save(tmp_path / "target")
    target, rounded = sd.load(tmp_path / "target"), sd.load(tmp_path / "target", "int8")
    assert rounded.decoder.blocks[0].up.weight.dtype == torch.int8
    for one, draft in ((target, rounded), (rounded, target)):
        plain = sd.generate(one, PROMPTS, max_new_tokens=60)
        speculative = sd.generate(one, PROMPTS, draft=draft, lookahead=4, max_new_tokens=60)
        assert sum(out.stats.accepted for out in speculative) > 0.5 * sum(out.stats.drafted for out in speculative)
        for prompt, first, second in zip(PROMPTS, plain, speculative, strict=True):
            found = explain(one, prompt, first.token_ids, second.token_ids)
            assert found is None or found.tie, str(found)


def test_what_a_timed_iteration_takes_is_at_least_its_parts():
    """Results come one iteration late: all of the iterations that a sample counts must have been waited for."""
    target, draft = on_gpu(torch.bfloat16)
    candidates = [Options(), Options(draft=draft, lookahead=4)]
    for turn in time_beside_plain(target, [PROMPTS[0]], candidates, warm_up=4, count=12, turns=4)[1:]:
        for plain, times, _ in turn:
            for one in (plain, times):
                assert one.total_s >= 0.99 * (one.draft_s + one.verify_s)


def test_a_study_runs_there(tmp_path):
    """Recorded, replayed, profiled, predicted and run live; what replay says of a known walk is what happens."""
    pair = make_pair(ModelShape(4, 256, 4, 512, 2048), ModelShape(1, 128, 2, 256, 2048), 0.8)
    _, folder = pair.save(tmp_path)
    target = sd.load(tmp_path / "target")
    prompts = [("few", Prompt(str(number), "few", f"Prompt {number} about {number * 7}")) for number in range(6)]
    plan = Plan(prompts, (1, 2, 4), max_new_tokens=40, rounds=1, live=4, contexts=(64,), nodes=(4,))

    def follow(_what: str, steps: Iterator[int], _count: int) -> None:
        for _ in steps:
            pass

    draft = sd.load_draft(folder)
    proposers = [model_proposer(draft), tree_proposer(draft), ngram_proposer(target), skip_proposer(target)]
    found = study(target, proposers, plan, tmp_path / "run", follow)
    assert len(found.rows) == 4
    for row in found.rows:
        assert row.live is not None
        assert row.live.lossless
        # in 16 bits the ranks of tokens that a draft finds about as likely may change places
        assert row.live.tar == pytest.approx(row.prediction.tar, rel=0.05 if row.candidate.tree else 1e-6)
