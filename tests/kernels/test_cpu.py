"""The C kernel: products against PyTorch, its build, and life without it. Layers are in tests/models/test_parity.py."""

import logging

import pytest
import torch
from conftest import PACKINGS
from hypothesis import given, settings
from hypothesis import strategies as st

import shallowdraft as sd
from shallowdraft.errors import OptionError
from shallowdraft.kernels import cpu
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


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A machine that has not built the kernel yet."""
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
