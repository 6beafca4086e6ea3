"""The C kernel: products against PyTorch, its build, and decoding without it. Layers: tests/models/test_parity.py."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PACKINGS
from hypothesis import given, settings
from hypothesis import strategies as st

import shallowdraft as sd
from shallowdraft.decoding.state import State, fill, new_state
from shallowdraft.decoding.verification import Proposal, verify_choice
from shallowdraft.errors import OptionError
from shallowdraft.kernels import cpu
from shallowdraft.models.cache import KVCache
from shallowdraft.models.checkpoint import load_decoder
from shallowdraft.models.projection import Projection, best_packing

needs_kernel = pytest.mark.skipif("panels" not in PACKINGS, reason="no C compiler on this machine")
CPU = torch.device("cpu")


@needs_kernel
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    outputs=st.integers(1, 100).map(lambda n: 2 * n),
    inputs=st.integers(1, 90),
    rows=st.integers(1, 40),
    bias=st.booleans(),
)
def test_products(outputs: int, inputs: int, rows: int, bias: bool):
    layer = Projection(outputs, inputs, bias=bias).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(rows, inputs)
    expected = layer(x)
    layer.pack("panels")
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x.t().contiguous().t()), expected, rtol=1e-5, atol=1e-5)


@needs_kernel
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    outputs=st.integers(1, 60).map(lambda n: 2 * n),
    inputs=st.integers(1, 90),
    rows=st.integers(1, 20),
    bias=st.booleans(),
    gated=st.booleans(),
)
def test_products_of_8_bit_weights(outputs: int, inputs: int, rows: int, bias: bool, gated: bool):
    layer = Projection(outputs, inputs, bias=bias, gated=gated).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    exact, x = layer.weight.clone(), torch.randn(rows, inputs)
    layer.pack("int8")
    rounded = layer.dense_weight()
    assert layer.weight.dtype == torch.int8
    assert ((rounded - exact).abs() <= 0.51 * exact.abs().amax(1, keepdim=True) / 127).all()
    if not gated:  # a gated product exists only inside a layer
        expected = torch.nn.functional.linear(x, rounded, layer.dense_bias())
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


@needs_kernel
def test_rounding_8_bit_weights_again_changes_nothing():
    """Weights that were rounded once give the same integers when they are rounded again."""
    layer = Projection(64, 48, bias=False).requires_grad_(False)
    torch.nn.init.normal_(layer.weight)
    layer.pack("int8")
    again = Projection(64, 48, bias=False).requires_grad_(False)
    again.weight.copy_(layer.dense_weight())
    again.pack("int8")
    assert torch.equal(again.weight, layer.weight)


@needs_kernel
@pytest.mark.parametrize("packing", ["panels", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
def test_results_do_not_depend_on_the_number_of_threads(folder, kind: str, packing: str):
    """A prompt, greedy decoding and logits are the same to the last bit, also with more threads than cores or rows."""
    decoder = load_decoder(folder(kind), dtype=torch.float32, device=CPU).pack(packing)
    tokens = torch.randint(97, (3, 30), generator=torch.Generator().manual_seed(0))
    positions, before, outputs = torch.arange(30).expand(3, -1), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            cache = decoder.new_cache(3, 40)
            logits = decoder.head(decoder(tokens, positions, cache, 30))
            drafted, largest = decoder.decode(tokens[:, -1:], positions[:, -1:], cache, 40, 5, 97)
            outputs.append((logits, cache.kv, drafted, largest))
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


@needs_kernel
@pytest.mark.parametrize("packing", ["panels", "int8"])
@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "mistral-window", "qwen2", "qwen3-tied", "opt"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_greedy_decoding_in_one_call(folder, kind: str, packing: str, count: int):
    """One call gives the tokens of single passes, for rows of different lengths and a cut vocabulary."""
    decoder = load_decoder(folder(kind), dtype=torch.float32, device=CPU).pack(packing)
    tokens = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(count))
    lengths = torch.tensor([[20], [13], [7]])
    for vocab in (97, 60, 200):
        actual = []
        for steps in (6, 1):  # one call of six; six calls of one
            cache = decoder.new_cache(3, 40)
            decoder(tokens, torch.arange(20).expand(3, -1), cache, 20)
            at = lengths - count + torch.arange(count)
            given, made, logits = tokens.gather(1, at), [], []
            for _ in range(6 // steps):
                ids, largest = decoder.decode(given, at, cache, 40, steps, vocab)
                made.append(ids)
                logits.append(largest)
                given, at = ids[:, -1:], at[:, -1:] + steps
            actual.append((torch.cat(made, 1), torch.cat(logits, 1)))
        cache = decoder.new_cache(3, 40)
        decoder(tokens, torch.arange(20).expand(3, -1), cache, 20)
        at = lengths - count + torch.arange(count)
        expected = reference(decoder, tokens.gather(1, at), at, cache, 6, vocab)
        for ids, largest in actual:
            assert torch.equal(ids, expected[0])
            torch.testing.assert_close(largest, expected[1])
            assert ids.max() < min(vocab, 97)


def reference(decoder, tokens, positions, cache, steps, vocab):
    made, logits = [], []
    for _ in range(steps):
        best, token = decoder.head(decoder(tokens, positions, cache, 40)[:, -1])[:, :vocab].max(-1)
        made.append(token)
        logits.append(best)
        tokens, positions = token[:, None], positions[:, -1:] + 1
    return torch.stack(made, 1), torch.stack(logits, 1)


@needs_kernel
@pytest.mark.parametrize("packing", ["panels", "int8"])
@pytest.mark.parametrize("kind", ["llama", "mistral-window", "qwen3-tied"])
@pytest.mark.parametrize("count", [0, 1, 4, 13])
def test_verification_and_commit_in_one_call(folder, kind: str, packing: str, count: int):
    """One call gives what single steps give: none, some or all accepted, rows of unequal lengths, one at its limit."""
    decoder = load_decoder(folder(kind), dtype=torch.float32, device=CPU).pack(packing)
    prompts = torch.randint(97, (4, 20), generator=torch.Generator().manual_seed(count)).tolist()
    prompts = [prompt[:length] for prompt, length in zip(prompts, (20, 13, 7, 9), strict=True)]
    limits = [40, 30, 40, 10]

    def begun() -> tuple[State, KVCache]:
        state = new_state(prompts, limits, count, CPU)
        cache = decoder.new_cache(*state.tokens.shape)
        fill(decoder, cache, state)
        return state, cache

    state, cache = begun()
    right = decoder.decode(*state.tail(1), cache, 40, count, 97)[0] if count else state.tokens[:, :0]
    for wrong in range(count + 1):
        proposed = right.clone()
        proposed[0, wrong:] = (right[0, wrong:] + 1) % 97
        proposal = Proposal(proposed, None, torch.ones(4, count))
        state, cache = begun()
        best, choice = decoder.choose(*state.tail(1, proposed), cache, state.span, 97)
        verdict = verify_choice(best, choice, proposal)
        state.commit(verdict)
        again, cache = begun()
        packed = decoder.commit_greedy(proposed, proposal.largest, again.tokens, again.length, again.limit, cache, -1)
        assert packed.tolist() == torch.cat((verdict.accepted[:, None], choice), 1).tolist()
        assert packed[0, 0] == wrong
        assert again.length.tolist() == state.length.tolist()
        for row, length in enumerate(state.length.tolist()):
            assert again.tokens[row, :length].tolist() == state.tokens[row, :length].tolist()


@needs_kernel
def test_only_logits_that_decide_must_be_finite(folder):
    decoder = load_decoder(folder("llama"), dtype=torch.float32, device=CPU)
    sound = decoder.pack("panels")
    wrong = load_decoder(folder("llama"), dtype=torch.float32, device=CPU)
    wrong.head.weight.data[70] = float("nan")
    wrong.pack("panels")

    def accepted(decoder, drafted: list[float]) -> int:
        state = new_state([[3, 4, 5]], [9], 2, CPU)
        cache = decoder.new_cache(*state.tokens.shape)
        fill(decoder, cache, state)
        row = state.tokens, state.length, state.limit
        return int(decoder.commit_greedy(torch.tensor([[96, 96]]), torch.tensor([drafted]), *row, cache, -7)[0, 0])

    assert accepted(sound, [1.0, 1.0]) == 0
    assert accepted(sound, [1.0, float("inf")]) == -7
    assert accepted(wrong, [1.0, 1.0]) == -7


@needs_kernel
def test_nan_is_not_hidden(folder):
    decoder = load_decoder(folder("llama"), dtype=torch.float32, device=CPU)
    decoder.head.weight.data[70] = float("nan")
    decoder.pack("panels")
    cache = decoder.new_cache(1, 16)
    _, largest = decoder.decode(torch.tensor([[3, 4]]), torch.tensor([[0, 1]]), cache, 16, 2, 97)
    assert largest.isnan().all()
    cache = decoder.new_cache(1, 16)
    _, largest = decoder.decode(torch.tensor([[3, 4]]), torch.tensor([[0, 1]]), cache, 16, 2, 60)
    assert largest.isfinite().all()


@needs_kernel
def test_drafts_run_in_8_bits_and_change_nothing(folder):
    target, exact, draft = sd.load(folder("llama")), sd.load(folder("llama")), sd.load_draft(folder("llama"))
    assert draft.decoder.packing == "int8"
    plain = sd.generate(target, [1, 2, 3], max_new_tokens=60)
    for one in (exact, draft):
        run = sd.generate(target, [1, 2, 3], draft=one, lookahead=4, max_new_tokens=60)
        assert run.token_ids == plain.token_ids
    assert run.stats.acceptance_rate > 0.8  # its own weights, rounded


def test_8_bits_need_the_kernel(folder, monkeypatch):
    monkeypatch.setattr("shallowdraft.models.model.best_packing", lambda *_: "onednn")
    with pytest.raises(OptionError, match="int8 needs a CPU, gcc"):
        sd.load(folder("llama"), dtype="int8")
    assert sd.load_draft(folder("llama")).decoder.packing != "int8"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Pretend that the kernel has not been built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    yield tmp_path / "shallowdraft"
    cpu.library.cache_clear()


@needs_kernel
def test_it_is_built_once(fresh, monkeypatch):
    assert cpu.library() is not None
    (built,) = fresh.iterdir()
    cpu.library.cache_clear()
    written = built.stat().st_mtime_ns
    assert cpu.library() is not None
    assert built.stat().st_mtime_ns == written


def test_without_a_compiler_decoding_works_and_says_so(fresh, folder, monkeypatch, caplog):
    expected = sd.generate(sd.load(folder("llama")), [1, 2, 3], max_new_tokens=20).token_ids
    cpu.library.cache_clear()
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        model = sd.load(folder("llama"))
        sd.load(folder("llama"))
    assert [record.message for record in caplog.records if "gcc" in record.message] == [
        "gcc not found: decoding on the CPU uses PyTorch's operations and is slower; install gcc"
    ]
    assert model.decoder.native is None
    assert best_packing(model.shape, torch.float32, CPU) == "onednn"
    assert sd.generate(model, [1, 2, 3], max_new_tokens=20).token_ids == expected


def test_a_compiler_that_fails_is_reported(fresh, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "_FLAGS", ("-no-such-flag",))
    with caplog.at_level(logging.WARNING):
        assert cpu.library() is None
    assert "cannot be built" in caplog.text or "gcc not found" in caplog.text


@needs_kernel
def test_the_default_dtype_does_not_matter(folder):
    model = sd.load(folder("llama"))
    expected = sd.generate(model, [1, 2, 3], max_new_tokens=20).token_ids
    torch.set_default_dtype(torch.float64)
    try:
        assert sd.generate(model, [1, 2, 3], max_new_tokens=20).token_ids == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("packing", [packing for packing in PACKINGS if packing != "none"])
def test_a_packed_decoder_cannot_be_cast(folder, packing: str):
    decoder = load_decoder(folder("llama"), dtype=torch.float32, device=CPU).pack(packing)
    with pytest.raises(OptionError, match="packed decoder"):
        decoder.to(torch.bfloat16)


def test_probes_take_less_than_a_millisecond_or_are_unknown():
    for threads in (1, 2):
        handover_s, arithmetic_s = cpu.probe(threads)
        assert 0 <= handover_s < 1e-3
        assert 0 <= arithmetic_s < 1
        assert bool(arithmetic_s) == (threads > 1)


@needs_kernel
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_processors_with_shorter_vectors(capability: str):
    """Run the tests of products, layers and rounding in a process that packs weights for shorter vectors."""
    here = Path(__file__).parent
    chosen = "products or (panels and (llama or opt)) or (rounds_alike and qwen3)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", chosen]
    files = [str(here / "test_cpu.py"), str(here.parent / "models" / "test_parity.py")]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_vectors_of_each_processor(monkeypatch):
    for capability, lanes in {"AVX512": 16, "AVX2": 8, "DEFAULT": 4}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda known=capability: known)
        assert cpu.lanes.__wrapped__() == lanes
