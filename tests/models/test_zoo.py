"""Models of the zoo by name, and weights stored as 8-bit integers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import CheckpointError
from shallowdraft.models import zoo


@pytest.fixture
def small_zoo(tmp_path: Path, folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo of two untrained models."""
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    for name, kind in (("target", "llama"), ("a-draft", "llama-gqa-tied-head_dim")):
        model = sd.load(folder(kind))
        model.save(tmp_path / name, int8=True)
        card = {"shape": str(model.shape), "parameters": model.shape.parameters, "method": "made up", "tokens": 10**7}
        card |= {"held_out": {"loss": 2.5} | ({"acceptance": 0.7} if name != "target" else {})}
        (tmp_path / name / "card.json").write_text(json.dumps(card))
    return tmp_path


def test_models_are_loaded_and_listed_by_name(small_zoo: Path, capsys):
    assert zoo.names() == ["target", "a-draft"]
    target, draft = sd.load("zoo:target"), sd.load("zoo:a-draft")
    plain, speculative = (sd.generate(target, [1, 2, 3], draft=d, max_new_tokens=20) for d in (None, draft))
    assert plain.token_ids == speculative.token_ids
    assert main(["zoo", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["shape"]) for one in listed] == [(n, str(sd.load(f"zoo:{n}").shape)) for n in zoo.names()]
    assert main(["zoo"]) == 0
    assert "zoo:a-draft" in capsys.readouterr().out
    assert main(["inspect", "zoo:target", "zoo:a-draft"]) == 0


def test_an_unknown_name_says_which_there_are(small_zoo: Path):
    with pytest.raises(CheckpointError, match="zoo:drat: no such model in the zoo; there are zoo:target, zoo:a-draft"):
        sd.load("zoo:drat")


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "opt"])
def test_eight_bits_are_a_quarter_of_the_size_and_close(kind: str, folder, tmp_path: Path):
    model = sd.load(folder(kind))
    model.save(tmp_path / "whole")
    model.save(tmp_path / "int8", int8=True)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "int8")]
    assert sizes[1] < 0.4 * sizes[0]
    rounded = sd.load(tmp_path / "int8").decoder.dense_state()
    for name, tensor in model.decoder.dense_state().items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, rounded[name])
        else:
            half_a_step = tensor.abs().amax(1, keepdim=True) / 254
            assert ((tensor - rounded[name]).abs() <= half_a_step * 1.001).all()


def test_eight_bits_from_bf16_keep_their_sign(folder, tmp_path: Path):
    model = sd.load(folder("llama"), dtype="bfloat16")
    model.save(tmp_path / "int8", int8=True)
    rounded = sd.load(tmp_path / "int8", dtype="float32").decoder.dense_state()
    for name, tensor in model.decoder.dense_state().items():
        large = tensor.float().abs() > 0.5 * tensor.float().abs().amax()
        assert (tensor.float().sign() == rounded[name].sign())[large].all()


def test_saving_8_bit_weights_again_changes_nothing(folder, tmp_path: Path):
    sd.load(folder("llama")).save(tmp_path / "one", int8=True)
    sd.load(tmp_path / "one").save(tmp_path / "two", int8=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-6, atol=0)
