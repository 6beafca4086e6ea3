"""Our decoder against transformers, for every supported kind of model."""

from pathlib import Path

import pytest
import torch
import transformers
from conftest import CONFIGS, PACKINGS, random_reference

import shallowdraft as sd
from shallowdraft.decoding import state as decoding_state
from shallowdraft.models.checkpoint import load_decoder

TOLERANCE = 1e-4  # logits reach about 8; float32 rounding moves them by about 1e-5


@pytest.fixture(params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def prompts() -> torch.Tensor:
    return torch.randint(0, 97, (3, 60), generator=torch.Generator().manual_seed(3))


def logits_in_passes(model: sd.Model, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the logits at every position, with the tokens in passes of these sizes."""
    rows, length = tokens.shape
    assert sum(sizes) == length
    cache = model.decoder.new_cache(rows, length + 5)
    results, start = [], 0
    with torch.inference_mode():
        for size in sizes:
            positions = torch.arange(start, start + size).expand(rows, -1)
            hidden = model.decoder(tokens[:, start : start + size], positions, cache, start + size)
            results.append(model.decoder.head(hidden))
            start += size
    return torch.cat(results, 1)


def load_packed(folder: Path, packing: str) -> sd.Model:
    decoder = load_decoder(folder, dtype=torch.float32, device=torch.device("cpu"))
    return sd.Model(folder.name, decoder.pack(packing))


SIZES = {"prefill": [60], "steps": [1] * 60, "mixed": [20, 1, 2, 7, 1, 13, 16]}


KERNEL_KINDS = [kind for kind in CONFIGS if kind != "llama-gqa-tied-head_dim"]  # heads of 24: no multiple of 16
WAYS = [(kind, way) for kind in CONFIGS for way in PACKINGS if way != "panels" or kind in KERNEL_KINDS]


@pytest.mark.parametrize(("kind", "packing"), WAYS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_logits_at_every_position(kind: str, folder, prompts: torch.Tensor, sizes: list[int], packing: str):
    with torch.inference_mode():
        expected = random_reference(kind)(prompts).logits
    actual = logits_in_passes(load_packed(folder(kind), packing), prompts, sizes)
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.skipif("panels" not in PACKINGS, reason="no C compiler on this machine")
@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_the_kernel_rounds_alike_however_tokens_are_grouped(kind: str, folder, prompts: torch.Tensor):
    """In the C kernel a row does not depend on other rows: single steps and passes agree to the last bit."""
    model = load_packed(folder(kind), "panels")
    assert model.decoder.native is not None
    steps, mixed, whole = (logits_in_passes(model, prompts, sizes) for sizes in SIZES.values())
    assert torch.equal(steps, mixed)
    assert torch.equal(steps, whole)
    assert torch.equal(logits_in_passes(model, prompts[1:2], [60]), whole[1:2])


def test_whole_texts_without_a_cache(kind: str, folder, prompts: torch.Tensor):
    with torch.inference_mode():
        expected = random_reference(kind)(prompts).logits
        decoder = load_packed(folder(kind), "none").decoder
        assert (decoder.logits(prompts) - expected).abs().max() < TOLERANCE


def test_64_greedy_tokens(kind: str, folder, prompts: torch.Tensor):
    reference = random_reference(kind)
    expected = reference.generate(
        prompts[:1, :9], attention_mask=torch.ones(1, 9), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    out = sd.generate(sd.load(folder(kind)), prompts[0, :9].tolist(), max_new_tokens=64)
    assert out.token_ids == expected[0, 9:].tolist()


def test_a_folder_we_saved_gives_transformers_the_same_logits(kind: str, folder, prompts: torch.Tensor, tmp_path):
    sd.load(folder(kind)).save(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        assert (again(prompts).logits - random_reference(kind)(prompts).logits).abs().max() < 1e-6


def test_prefill_in_chunks_is_prefill_at_once(kind: str, folder, prompts: torch.Tensor, monkeypatch):
    model = sd.load(folder(kind))
    rows = [prompts[0, :50].tolist(), prompts[1, :17].tolist(), prompts[2, :1].tolist()]
    whole = sd.generate(model, rows, max_new_tokens=8)
    monkeypatch.setattr(decoding_state, "PREFILL_CHUNK", 7)
    assert [out.token_ids for out in sd.generate(model, rows, max_new_tokens=8)] == [out.token_ids for out in whole]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(folder, prompts: torch.Tensor, dtype: str):
    exact = logits_in_passes(sd.load(folder("llama")), prompts, [60])
    rounded = logits_in_passes(sd.load(folder("llama"), dtype=dtype), prompts, [60]).float()
    assert (rounded - exact).norm() / exact.norm() < {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
