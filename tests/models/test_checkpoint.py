"""Saving and loading of folders, and errors for broken ones."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, PACKINGS, random_heads, random_reference
from safetensors.torch import load_file, save_file

import shallowdraft as sd
from shallowdraft.errors import (
    CheckpointError,
    MemoryShortageError,
    OptionError,
    UnsupportedModelError,
    VocabularyError,
)
from shallowdraft.models import checkpoint, memory
from shallowdraft.models.heads import save_heads
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.shapes.shape import ModelShape


@pytest.fixture
def copy(folder, tmp_path: Path) -> Path:
    """A copy of a folder, to be broken."""
    return Path(shutil.copytree(folder("llama"), tmp_path / "model"))


def weights(model: sd.Model) -> dict[str, torch.Tensor]:
    return model.decoder.dense_state()


def same_weights(one: sd.Model, two: sd.Model) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["llama-gqa-tied-head_dim", "opt-350m"])
def test_shards(kind: str, folder, tmp_path: Path):
    random_reference(kind).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_weights(sd.load(tmp_path), sd.load(folder(kind)))


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_old_bin_files(kind: str, folder, tmp_path: Path):
    model = random_reference(kind)
    names = {name.removeprefix("model.") if kind == "opt" else name: t for name, t in model.state_dict().items()}
    names["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    torch.save(names, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "llama")
    model.config.save_pretrained(tmp_path)
    assert same_weights(sd.load(tmp_path), sd.load(folder(kind)))


def test_a_pickle_that_runs_code_is_refused(copy: Path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (copy / "harmed",))

    (copy / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Harm()}, copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*convert it to safetensors"):
        sd.load(copy)
    assert not (copy / "harmed").exists()


def test_dtypes(copy: Path):
    assert sd.load(copy).decoder.dtype == torch.float32
    assert sd.load(copy, dtype="bf16").decoder.dtype == torch.bfloat16
    assert sd.load(copy, dtype=torch.float16).decoder.dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "said"), [({"dtype": "int4"}, "'int4'"), ({"device": "tpu"}, "'tpu'"), ({"device": "cuda:7"}, "0 CUDA")]
)
def test_unknown_dtypes_and_devices(copy: Path, options: dict[str, str], said: str):
    with pytest.raises(OptionError, match=said):
        sd.load(copy, **options)


def test_save_and_load_with_tokenizer_and_stop_tokens(tmp_path: Path):
    shape = ModelShape(1, 32, 2, 48, 330)
    tokenizer = byte_tokenizer(330)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    sd.Model("m", random_decoder(shape).pack(), tokenizer, (3, 7)).save(tmp_path)
    again = sd.load(tmp_path)
    assert again.stop_tokens == (3, 7)
    assert again.shape == shape
    assert again.decode(again.encode("naïve text")) == "naïve text"
    assert again.decode(again.encode_chat([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_who_may_read_what_is_saved_follows_the_umask(tmp_path: Path, umask: int, mode: int):
    model = sd.Model("m", random_decoder(ModelShape(1, 32, 2, 48, 330)), byte_tokenizer(330))
    before = os.umask(umask)
    try:
        model.save(tmp_path / "model")
        save_heads(random_heads(model, 1), tmp_path / "heads")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in files}
    assert {path: path.stat().st_mode & 0o777 for path in files} == dict.fromkeys(files, mode)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["llama-biases-linear-rope", "opt-350m", "qwen3-tied"])
def test_packing_only_permutes(folder, kind: str, packing: str):
    shape = checkpoint.read_shape(folder(kind))
    plain, packed = (
        checkpoint.load_decoder(folder(kind), dtype=torch.float32, device=torch.device("cpu")) for _ in "ab"
    )
    actual = packed.pack(packing).dense_state()
    assert actual.keys() == shape.layout().keys()
    for name, tensor in plain.dense_state().items():
        assert torch.equal(actual[name], tensor), name


def test_a_cached_hub_model_loads_offline(copy: Path, tmp_path: Path, monkeypatch):
    """A folder laid out as huggingface_hub's cache is found without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    shutil.copytree(copy, home / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    real = checkpoint.snapshot_download
    monkeypatch.setattr(
        checkpoint,
        "snapshot_download",
        lambda *a, **k: real(*a, cache_dir=tmp_path / "hub", local_files_only=True, **k),
    )
    assert same_weights(sd.load("someone/tiny"), sd.load(copy))
    with pytest.raises(CheckpointError, match=r"someone/else.*HF_TOKEN"):
        sd.load("someone/else")


def rewrite_config(folder: Path, **change) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def rewrite_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


BREAKAGES = {
    "no folder": (lambda f: shutil.rmtree(f), CheckpointError, "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, r"config.json: missing"),
    "half a config": (lambda f: truncate(f / "config.json", 0.5), CheckpointError, "not readable as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), CheckpointError, "no JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "no model.safetensors"),
    "empty weights": (lambda f: truncate(f / "model.safetensors", 0.0), CheckpointError, "truncated or corrupt"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors", 0.7), CheckpointError, "truncated or corrupt"),
    "corrupt weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 999),
        CheckpointError,
        "truncated or corrupt",
    ),
    "a shard missing": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        CheckpointError,
        "model-2.safetensors missing",
    ),
    "unknown family": (
        lambda f: rewrite_config(f, model_type="gemma3"),
        UnsupportedModelError,
        "'gemma3'.*supported are",
    ),
    "a tensor missing": (
        lambda f: rewrite_weights(f, lambda t: t.pop("model.norm.weight")),
        CheckpointError,
        "tensor model.norm.weight missing",
    ),
    "a tensor of the wrong shape": (
        lambda f: rewrite_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(9)})),
        CheckpointError,
        r"model.norm.weight is \[9\], config.json says \[64\]",
    ),
    "a tensor too many": (
        lambda f: rewrite_weights(f, lambda t: t.update({"lora_A": torch.ones(9)})),
        CheckpointError,
        "tensor lora_A not part of a llama model",
    ),
    "quantised weights without saying so": (
        lambda f: rewrite_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        UnsupportedModelError,
        "stored as I8",
    ),
    "an index that is none": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
        CheckpointError,
        "no weight_map",
    ),
    "a bin file of something else": (
        lambda f: ((f / "model.safetensors").unlink(), torch.save([1, 2], f / "pytorch_model.bin")),
        CheckpointError,
        "holds no map",
    ),
    "junk as a bin file": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "pytorch_model.bin").write_bytes(b"junk\n")),
        CheckpointError,
        "not readable as plain tensors",
    ),
    "an empty bin file": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "pytorch_model.bin").write_bytes(b"")),
        CheckpointError,
        "not readable as plain tensors",
    ),
    "another model's config": (
        lambda f: rewrite_config(f, num_hidden_layers=5),
        CheckpointError,
        "model.layers.3.* missing",
    ),
    "a broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        VocabularyError,
        "tokenizer cannot be loaded",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_folders(copy: Path, breakage: str):
    damage, error, said = BREAKAGES[breakage]
    damage(copy)
    with pytest.raises(error, match=said) as caught:
        sd.load(copy)
    assert "\n" not in str(caught.value)


def test_weights_and_caches_are_checked_against_memory(copy: Path, monkeypatch):
    model = sd.load(copy)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000)
    with pytest.raises(MemoryShortageError, match=r"GiB.*are free"):
        sd.load(copy)
    with pytest.raises(MemoryShortageError, match="a cache of 2 x"):
        sd.generate(model, [[1], [2]])


def test_free_memory_is_known_here():
    free = memory.free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 2**20


@pytest.mark.parametrize("kind", CONFIGS)
def test_check_folder_reads_no_weight(kind: str, folder):
    assert checkpoint.check_folder(folder(kind)) == sd.load(folder(kind)).shape
