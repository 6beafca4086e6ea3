"""Digests of checkpoint folders: they depend on the content alone, and large files are only sampled."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shallowdraft as sd
from shallowdraft.identity import BLOCK_BYTES, BLOCKS, WHOLE_BYTES, folder_digest
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sd.Model("m", random_decoder(parse_shape("1x64/2h/96", vocab=64))).save(tmp_path / "model")
    return tmp_path / "model"


def test_a_copy_has_the_same_digest(checkpoint: Path, tmp_path: Path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere", "transformers_version": "9"}))
    assert folder_digest(copy) == folder_digest(checkpoint) == sd.load(checkpoint).digest


def test_one_other_weight_or_field_changes_the_digest(checkpoint: Path):
    before = folder_digest(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    changed = folder_digest(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert len({before, changed, folder_digest(checkpoint)}) == 3


def test_a_folder_without_weights_has_no_digest(checkpoint: Path):
    (checkpoint / "model.safetensors").unlink()
    assert folder_digest(checkpoint) is None


def test_little_of_a_large_file_is_read(checkpoint: Path):
    """A sparse file as large as a big model; the blocks that are read still show a difference."""
    size = 20 * 2**30
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(size)
    before = folder_digest(checkpoint)
    assert size > 1000 * BLOCKS * BLOCK_BYTES
    with (checkpoint / "model.safetensors").open(
        "r+b"
    ) as file:  # as fine-tuning does, which changes nearly all weights
        file.seek(size // 3)
        file.write(b"1" * WHOLE_BYTES)
    assert folder_digest(checkpoint) != before


def test_a_model_in_memory_has_a_digest():
    decoder = random_decoder(parse_shape("1x64/2h/96", vocab=64))
    model = sd.Model("m", decoder)
    before = model.digest
    assert before == sd.Model("other name", random_decoder(parse_shape("1x64/2h/96", vocab=64)).pack()).digest
    with torch.no_grad():
        decoder.norm.weight[0] += 1
    assert model.digest != before
