"""Files that others wrote: unusual ones that are read, invalid ones that are refused, and names that are not paths."""

import contextlib
import gzip
import json
import lzma
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shallowdraft as sd
from shallowdraft import files
from shallowdraft.building.corpus import read_corpus
from shallowdraft.building.token_store import open_store, write_store
from shallowdraft.building.tokenizer import train_tokenizer
from shallowdraft.cli import main
from shallowdraft.errors import CheckpointError, CorpusError, OptionError, PromptError, RecordError, VocabularyError
from shallowdraft.models.model import load
from shallowdraft.models.synthetic import byte_tokenizer, make_pair
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.prompts import load_prompts
from shallowdraft.records import Records, masked, masked_url
from shallowdraft.replaying.trace_import import import_completions
from shallowdraft.runs.trace import read_trace
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.accuracy import load_questions

BOM = b"\xef\xbb\xbf"
STRANGE = "one\u2028two\u2029three\x85four\x0b"
PROMPT = {"prompt": STRANGE, "id": "a"}
QUESTION = {"prompt": STRANGE, "choices": ["x", "y"], "answer": 1}
ANSWER = {"id": STRANGE, "prompt_token_ids": [1], "choices": [{"token_ids": [2]}]}
READERS: dict[str, tuple[dict, Callable[[Path], str], type[Exception]]] = {
    "prompts": (PROMPT, lambda path: load_prompts(path)[0].text, PromptError),
    "questions": (QUESTION, lambda path: load_questions(str(path))[0].context, PromptError),
    "completions": (ANSWER, lambda path: import_completions(path)[1][0].id, RecordError),
    "corpus": ({"text": STRANGE}, lambda path: next(read_corpus(path.parent))[2], CorpusError),
    "records": ({"kind": "k", "schema": 1, "about": {"a": STRANGE}}, lambda path: records(path), RecordError),
}


def records(path: Path) -> str:
    return str(Records.read(path, "k").about["a"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_pair(parse_shape("1x32/2h/48", vocab=320), parse_shape("1x32/2h/48", vocab=320), 0.8).save(folder)
    return folder


@pytest.mark.parametrize("name", READERS)
def test_json_is_read_exactly(name: str, tmp_path: Path):
    """The line has a byte order mark, and characters at which Python ends a line and JSON does not."""
    row, read, _ = READERS[name]
    file = tmp_path / "file.jsonl"
    file.write_bytes(BOM + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert read(file) == STRANGE


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "\\ud800", "text": "\\ud800"}', "surrogate"),
        (b"[" * 200_000, "deep"),
        (b"[" * 100 + b"]" * 100, "deep"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "' + b"a" * 2000 + b'"}', "more than 1,000 bytes"),
    ],
)
def test_invalid_lines_are_refused(name: str, content: bytes, message: str, tmp_path: Path, monkeypatch):
    _, read, error = READERS[name]
    if "bytes" in message:
        monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    file = tmp_path / "file.jsonl"
    file.write_bytes(content + b"\n")
    with pytest.raises(error, match=message):
        read(file)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path):
    _, read, error = READERS[name]
    os.mkfifo(tmp_path / "file.jsonl")
    with pytest.raises(error, match="not a regular file but a pipe"):
        read(tmp_path / "file.jsonl")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "model.safetensors", "generation_config.json"]
)
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name: str, models: Path, tmp_path: Path, capsys):
    copy = Path(shutil.copytree(models / "target", tmp_path / "model"))
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    assert main(["generate", "--target", str(copy), "--prompt", "a", "--max-new-tokens", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_records_are_not_written_to_a_pipe(models: Path, tmp_path: Path, capsys):
    os.mkfifo(tmp_path / "trace")
    command = ["record", "--target", str(models / "target"), "--prompts", "zoo", "--limit", "1"]
    assert main([*command, "--out", str(tmp_path / "trace")]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_a_line_that_was_cut_inside_a_character_is_dropped(tmp_path: Path):
    file = Records.open(tmp_path / "f", "k", {})
    file.append({"a": "first"})
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole + '{"a": "é'.encode()[:-1])
    again = Records.open(tmp_path / "f", "k", {})
    assert [row["a"] for row in again] == ["first"]
    assert (tmp_path / "f").read_bytes() == whole


def compressed(folder: Path, suffix: str, content: bytes) -> Path:
    folder.mkdir()
    file = folder / f"logs.jsonl{suffix}"
    file.write_bytes(gzip.compress(content, 1) if suffix == ".gz" else lzma.compress(content, preset=0))
    return file


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_files_that_expand_too_much_are_refused(suffix: str, tmp_path: Path, monkeypatch):
    """In one line without end, and in many lines."""
    monkeypatch.setattr(files, "LONGEST_LINE", 2**16)
    compressed(tmp_path / "line", suffix, b'{"text": "' + b"a" * 2**20 + b'"}\n')
    with pytest.raises(CorpusError, match=r"logs.jsonl.*:1: a line of more than 65,536 bytes"):
        list(read_corpus(tmp_path / "line"))
    monkeypatch.setattr(files, "ALWAYS_EXPANDED", 2**16)
    monkeypatch.setattr(files, "EXPANSION", 10)
    compressed(tmp_path / "lines", suffix, b'{"text": "a"}\n' * 2**16)
    with pytest.raises(CorpusError, match="over 10 times its own size; if that is right, decompress it first"):
        list(read_corpus(tmp_path / "lines"))


@pytest.mark.slow
def test_a_line_of_a_gigabyte_takes_little_memory(tmp_path: Path):
    with lzma.open(tmp_path / "logs.jsonl.xz", "wb", preset=0) as file:
        file.write(b'{"text": "')
        for _ in range(1024):
            file.write(b"a" * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorpusError, match="a line of more than"):
        list(read_corpus(tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_archives(suffix: str, tmp_path: Path):
    file = compressed(tmp_path / "text", suffix, json.dumps({"text": "Some words. "}).encode() * 500)
    whole = file.read_bytes()
    for size in range(1, len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=r"cannot be decompressed|no JSON"):
            list(read_corpus(tmp_path / "text"))
        file.write_bytes(whole[:size] + bytes([whole[size] ^ 0x55]) + whole[size + 1 :])
        with contextlib.suppress(CorpusError):  # some bytes have no meaning
            list(read_corpus(tmp_path / "text"))
    shutil.move(file, tmp_path / "text" / "logs.jsonl.zst")
    with pytest.raises(CorpusError, match=r"\.zst is not read"):
        list(read_corpus(tmp_path / "text"))


def test_a_long_document_is_tokenised_in_parts(tmp_path: Path, monkeypatch):
    speaker = byte_tokenizer(320)
    speaker.eos_token = speaker.convert_ids_to_tokens(300)
    text = "".join(f"line {number} of some\n" for number in range(500))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.txt").write_text(text)
    whole = write_store(tmp_path / "text", speaker, tmp_path / "whole")
    monkeypatch.setattr("shallowdraft.building.tokenizer.CHARACTERS_AT_ONCE", 300)
    parts = write_store(tmp_path / "text", speaker, tmp_path / "parts")
    assert parts.counts == whole.counts
    np.testing.assert_array_equal(parts.tokens("book", "train"), whole.tokens("book", "train"))
    assert len(train_tokenizer(iter([text]), 270)) == 270


@pytest.mark.parametrize("domain", ["../../../ESCAPED", "/ESCAPED", "a/b", "..", "", ".hidden", "a\\b", "a\0b", None])
def test_a_domain_is_not_a_path(domain: str | None, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    out = tmp_path / "a" / "b" / "c" / "store"
    speaker = byte_tokenizer(320)
    speaker.eos_token = speaker.convert_ids_to_tokens(300)
    rows = datasets.Dataset.from_dict({"text": ["Some words."] * 3, "domain": ["good", domain, "good"]})
    rows.save_to_disk(str(tmp_path / "set"))
    with pytest.raises(CorpusError, match=r"the domain .* is (a path|no name)"):
        write_store(tmp_path / "set", speaker, out)
    assert not list(tmp_path.rglob("*ESCAPED*"))
    store = {"tokenizer": "x", "vocab": 320, "end": 300, "counts": {str(domain or ""): {"train": 1, "val": 1}}}
    (out / "store.json").write_text(json.dumps(store))
    with pytest.raises(CorpusError, match="the domain"):
        open_store(out)


@pytest.mark.parametrize("name", ["../target/model.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_an_index_names_only_files_of_its_folder(name: str, models: Path, tmp_path: Path):
    copy = Path(shutil.copytree(models / "draft", tmp_path / "draft"))
    shutil.copytree(models / "target", tmp_path / "target")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="which is not a file in this folder"):
        load(copy)


@pytest.mark.parametrize(
    "entry", [{"tokenizer_file": "../other.json"}, {"fast_tokenizer_files": ["../tokenizer.4.0.json"]}]
)
def test_a_tokenizer_reads_only_its_folder(entry: dict, models: Path, tmp_path: Path):
    copy = Path(shutil.copytree(models / "draft", tmp_path / "draft"))
    for elsewhere in ("other.json", "tokenizer.4.0.json"):
        shutil.copy(copy / "tokenizer.json", tmp_path / elsewhere)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entry))
    with pytest.raises(VocabularyError, match="which is not in this folder"):
        load_tokenizer(copy)
    harmless = {"special_tokens_map_file": "/etc/passwd", "tokenizer_file": "/elsewhere/tokenizer.json"}
    config.write_text(json.dumps(harmless))
    assert len(load_tokenizer(copy)) == 320


@pytest.mark.parametrize("name", ["zoo:../..", "zoo:/etc", "zoo:target/../target", "zoo:"])
def test_zoo_names_are_not_paths(name: str, capsys):
    assert main(["inspect", name]) == 2
    assert "no such model in the zoo" in capsys.readouterr().err


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; it must be a whole number from 1 to 4,096"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "wrong type: num_hidden_layers True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; it must be true or false"),
        ({"rope_theta": 0}, "theta of rotary positions is 0.0"),
        ({"rope_theta": -1.0}, "theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rms_norm_eps": float("nan")}, "norm_eps"),
        ({"model_type": "mistral", "sliding_window": 0}, "a window has a token or more"),
    ],
)
def test_configs_of_no_model_are_refused(change: dict, message: str):
    with pytest.raises(sd.ShallowdraftError, match=message):
        ModelShape.from_config(LLAMA | change)
    assert ModelShape.from_config(LLAMA).layers == 1


def test_a_typed_shape_has_limits_too():
    with pytest.raises(OptionError, match="layers of a shape is 1,000,000,000; it may be 4,096 at most"):
        parse_shape("1000000000x64/2h/96")


@pytest.mark.parametrize("token", [-1, [2, -3], "2", True, 2**40, 1.5])
def test_stop_tokens_are_ids(token: object, models: Path, tmp_path: Path):
    copy = Path(shutil.copytree(models / "draft", tmp_path / "draft"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    with pytest.raises(CheckpointError, match=r"eos_token_id is .*, which is not a token id"):
        load(copy)


def trace(path: Path, *, about: dict | None = None, **change: object) -> Path:
    vocabulary = {"size": 320, "tokens": None, "digest": None}
    header = {"target": "t", "vocabulary": vocabulary, "sampling": {"temperature": 1.0}} | (about or {})
    row = {"id": "a", "set": "s", "sample": 0, "prompt": [1, 2], "output": [3, 4], "logprobs": [-0.5, -1.0], "cut": 0}
    path.unlink(missing_ok=True)
    row = {name: value for name, value in (row | change).items() if value != "left out"}
    Records.open(path, "trace", header).append(row)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": [3, -1]}, ":2: token id -1 is not in the target's vocabulary of 320"),
        ({"prompt": [320]}, ":2: token id 320 is not in"),
        ({"prompt": [10**30]}, r":2: prompt\[0\] is 1000"),
        ({"output": "left out"}, ":2: output is missing"),
        ({"output": "34"}, ":2: output is '34', not a list"),
        ({"output": [3, True]}, r":2: output\[1\] is True, not a whole number"),
        ({"logprobs": [-0.5, float("nan")]}, r":2: logprobs\[1\] is nan"),
        ({"logprobs": [-0.5]}, "lacks log-probabilities"),
        ({"logprobs": [-0.5, 3.0]}, "none is above 0"),
        ({"more": 1}, "an unknown field 'more'"),
        ({"about": {"sampling": {"temperature": -1.0}}}, ":1: temperature is -1.0"),
        ({"about": {"sampling": {"cold": 1}}}, ":1: has an unknown field 'cold'"),
        ({"about": {"vocabulary": 5}}, ":1: vocabulary is 5, not an object"),
    ],
)
def test_invalid_traces_are_refused(change: dict, message: str, tmp_path: Path):
    assert read_trace(trace(tmp_path / "whole")).outputs[0].output == [3, 4]
    with pytest.raises(RecordError, match=message):
        read_trace(trace(tmp_path / "t", **change))


def test_the_message_has_the_number_of_a_line_that_is_not_an_object(tmp_path: Path):
    path = trace(tmp_path / "t")
    path.write_text(path.read_text() + "[1]\n")
    with pytest.raises(RecordError, match=r"t:3: no JSON object"):
        read_trace(path)


@contextlib.contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Let no file grow beyond `free` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_file(models: Path, tmp_path: Path):
    model = sd.load(models / "target")
    with full_disk(2000):
        file = Records.open(tmp_path / "records", "k", {})
        with pytest.raises(OSError, match=r"too large: '.*records'"):
            file.append({"a": "a" * 4000})
        with pytest.raises(CheckpointError, match=r"saved: the tokenizer cannot be written .*is the disk full\?"):
            model.save(tmp_path / "saved")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.txt").write_text("One whole book. " * 2000)
    speaker = byte_tokenizer(320)
    speaker.eos_token = speaker.convert_ids_to_tokens(300)
    with full_disk(2000), pytest.raises(OSError, match=r"too large: '.*book\.train\.bin'"):
        write_store(tmp_path / "text", speaker, tmp_path / "store")


def test_records_hold_no_key_or_password(tmp_path: Path, monkeypatch):
    argv = ["x", "bench", "--url", "http://me:secret@host:8000/v1", "--api-key", "secret", "--url=https://me:secret@h"]
    monkeypatch.setattr(sys, "argv", argv)
    assert "secret" not in json.dumps(Records.open(tmp_path / "f", "k", {}).header)
    assert masked(argv)[2:4] == ["--url", "http://…@host:8000/v1"]
    assert masked_url("me:se@cret@host:80") == "…@host:80"
    for plain in ("http://host:8000/a@b", "some@where", "a prompt: you@home", "data/x:y@z"):
        assert masked_url(plain) == plain
