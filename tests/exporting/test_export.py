"""Exported pairs, as transformers and gguf read them; settings with the study's lookahead; bad input."""

import copy
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
import yaml

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.cost import Iteration, Prediction
from shallowdraft.errors import RecordError, UnsupportedModelError
from shallowdraft.exporting.advice import Advice, advise
from shallowdraft.exporting.engines import setup
from shallowdraft.exporting.export import export
from shallowdraft.models.synthetic import make_pair
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.records import Records
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.profile import KIND as PROFILE
from shallowdraft.runs.replays import KIND as REPLAYS
from shallowdraft.runs.study import LiveSpeed, StudyResult, StudyRow, write_study
from shallowdraft.runs.trace import KIND as TRACE
from shallowdraft.shapes.notation import parse_shape

PAIR = ["export", "zoo:2x192", "--target", "zoo:target"]
PROMPT = "The old house at the end of the road"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target and a draft with a tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    make_pair(parse_shape("2x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8).save(folder)
    return folder


def arguments(small: Path, engine: str, out: Path) -> list[str]:
    names = [str(small / "draft"), "--target", str(small / "target")]
    return ["export", *names, "--engine", engine, "--lookahead", "3", "--out", str(out)]


def test_assisted_generation_in_transformers_gives_our_output(tmp_path: Path, capsys):
    out = tmp_path / "made" / "pair"
    assert main([*PAIR, "--engine", "transformers", "--lookahead", "3", "--out", str(out)]) == 0
    assert f"start it: {out}/start.sh\nwhich runs there: python3 -c" in capsys.readouterr().out
    target, draft = (transformers.AutoModelForCausalLM.from_pretrained(out / role) for role in ("target", "draft"))
    assert draft.generation_config.num_assistant_tokens == 3
    assert draft.generation_config.num_assistant_tokens_schedule == "constant"
    inputs = transformers.AutoTokenizer.from_pretrained(out / "draft")(PROMPT, return_tensors="pt")
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    output = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=40)[0]
    ours = sd.generate(sd.load("zoo:target"), PROMPT, draft=sd.load("zoo:2x192"), lookahead=3, max_new_tokens=40)
    assert output[inputs["input_ids"].shape[1] :].tolist() == ours.token_ids
    assert len(passes) < 36  # tokens were accepted
    assert [path.name for path in out.parent.iterdir()] == ["pair"]
    assert json.loads((out / "export.json").read_text())["advice"]["lookahead"] == 3
    assert (out / "start.sh").stat().st_mode & stat.S_IXUSR


def run_start_script(out: Path, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run start.sh from the folder `programs`, which is first in PATH."""
    path = f"{programs}:/usr/bin:/bin"
    return subprocess.run(
        [os.path.relpath(out / "start.sh", programs), "--port", "1"],
        cwd=programs,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("engine", "variable"),
    [
        ("vllm", "VLLM"),
        ("sglang", "PYTHON"),
        ("trtllm", "TRTLLM_SERVE"),
        ("llama.cpp", "LLAMA_SERVER"),
        ("transformers", "PYTHON"),
    ],
)
def test_start_sh_runs_the_named_program_or_says_what_is_missing(
    small: Path, tmp_path: Path, engine: str, variable: str, capsys
):
    out, programs = tmp_path / "a pair", tmp_path / "bin"
    assert main(arguments(small, engine, out)) == 0
    assert f"{variable}=/path/to/" in capsys.readouterr().out
    programs.mkdir()
    program = setup(engine, "t", 3, {}).command[0]
    for name in ("another", program, "python"):
        (programs / name).write_text(f'#!/bin/sh\n[ "$1" = -c ] && [ $# = 2 ] && exit 0\necho {name} "$PWD" "$@"\n')
        (programs / name).chmod(0o755)
    for name, environment in ((program, {}), ("another", {variable: "another"}), ("another", {variable: "./another"})):
        run = run_start_script(out, programs, **environment)
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.startswith(f"{name} {out}")
        assert run.stdout.endswith("--port 1\n")
    for missing in ("nowhere/program", "no-such-program"):
        run = run_start_script(out, programs, **{variable: missing})
        assert run.returncode == 127
        assert f"there is no {missing} here; " in run.stderr
        assert f"or name one: {variable}=" in run.stderr


def test_start_sh_says_that_a_python_lacks_the_engine(small: Path, tmp_path: Path):
    assert main(arguments(small, "sglang", tmp_path / "out")) == 0
    run = run_start_script(tmp_path / "out", tmp_path, PYTHON=sys.executable)
    assert run.returncode == 127
    assert f"{sys.executable} has no sglang; pip install sglang, or name another one: PYTHON=" in run.stderr
    assert run.stderr.count("\n") == 1


def test_gguf_has_the_right_shapes_and_metadata(tmp_path: Path):
    out = tmp_path / "pair"
    assert main([*PAIR, "--engine", "llama.cpp", "--lookahead", "2", "--out", str(out)]) == 0
    reader, model = gguf.GGUFReader(out / "draft.gguf"), sd.load("zoo:2x192", "float32", "cpu", trainable=True)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    shape = model.shape
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == shape.layers
    assert fields["llama.attention.head_count"] == shape.heads
    assert fields["llama.attention.key_length"] == shape.head_dim
    assert fields["llama.rope.freq_base"] == 10000.0
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert len(fields["tokenizer.ggml.merges"]) > 7000
    names = {index: token for token, index in model.require_tokenizer().get_vocab().items()}
    assert fields["tokenizer.ggml.tokens"] == [names[index] for index in range(shape.vocab)]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["token_embd.weight"].shape.tolist() == [shape.d_model, shape.vocab]
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [shape.ffn, shape.d_model]
    assert sum(int(tensor.n_elements) for tensor in tensors.values()) == shape.parameters
    q = model.decoder.dense_state()["blocks.0.qkv.weight"][: shape.heads * shape.head_dim].numpy()
    half = shape.head_dim // 2
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"].data[:3], q[[0, half, 1]])  # the halves interleaved


def test_gguf_of_a_tokenizer_without_merges_has_one_that_never_applies(small: Path, tmp_path: Path, caplog):
    """llama.cpp refuses a byte-level BPE without a list of merges, and a synthetic pair has no merges."""
    assert main(arguments(small, "llama.cpp", tmp_path / "out")) == 0
    vocabulary = set(sd.load(small / "target").require_tokenizer().get_vocab())
    for role in ("target", "draft"):
        fields = gguf.GGUFReader(tmp_path / "out" / f"{role}.gguf").fields
        (merge,) = fields["tokenizer.ggml.merges"].contents()
        halves = merge.split(" ")
        assert [len(half) for half in halves] == [2, 2]  # text begins as single characters
        assert not vocabulary & {*halves, "".join(halves)}
    assert not caplog.records


@pytest.mark.parametrize(
    "kind", ["llama3-rope", "llama-biases-linear-rope", "llama-gqa-tied-head_dim", "qwen2", "qwen3"]
)
def test_transformers_reads_the_same_model_from_gguf(folder, small: Path, tmp_path: Path, kind: str):
    from shallowdraft.exporting.gguf_file import read_tokenizer, write_gguf

    model, tokenizer = sd.load(folder(kind), "float32", "cpu", trainable=True), read_tokenizer(small / "target")
    write_gguf(model, tokenizer, tmp_path / "model.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder(kind))
    config = copy.deepcopy(reference.config)  # it reads neither RoPE scaling nor head_dim from GGUF
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config)
    ids = torch.arange(90)[None]
    torch.testing.assert_close(read(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert ("llama.rope.scaling.factor" in reader.fields) == ("linear" in kind)
    divisors = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    if kind == "llama3-rope":
        plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(plain / divisors[0], reference.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    else:
        assert not divisors


@pytest.mark.parametrize(("numbers", "name"), [(r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2"), (r"\p{N}+", None)])
def test_gguf_names_the_way_text_is_split(tmp_path: Path, numbers: str, name: str | None):
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for ignore_merges in (True, False):  # llama.cpp ignores merges for llama-bpe only
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, byte_level(use_regex=False)])
        assert split_name(tokenizer, tmp_path) == (name if ignore_merges == (name == "llama-bpe") else None)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, byte_level()])  # splits once more
    assert split_name(tokenizer, tmp_path) is None


def byte_level(**options: bool) -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | options)


def split_name(tokenizer: tokenizers.Tokenizer, folder: Path) -> str | None:
    """Return the name of the split; None if the tokenizer is refused."""
    from shallowdraft.exporting.gguf_file import read_tokenizer

    tokenizer.save(str(folder / "tokenizer.json"))
    try:
        return read_tokenizer(folder).split
    except UnsupportedModelError:
        return None


@pytest.mark.parametrize(
    ("normalizer", "options", "name"),
    [
        (None, {}, "gpt-2"),
        (tokenizers.normalizers.NFC(), {}, "gpt-2"),
        (tokenizers.normalizers.Sequence([]), {}, "gpt-2"),
        (tokenizers.normalizers.Lowercase(), {}, None),
        (tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC(), tokenizers.normalizers.Lowercase()]), {}, None),
        (None, {"add_prefix_space": True}, None),
        (None, {"use_regex": False}, None),
    ],
)
def test_gguf_refuses_tokenizers_that_change_text(
    tmp_path: Path, normalizer: tokenizers.normalizers.Normalizer | None, options: dict[str, bool], name: str | None
):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(**options)
    if normalizer:
        tokenizer.normalizer = normalizer
    assert split_name(tokenizer, tmp_path) == name


def test_gguf_in_16_bits(small: Path, tmp_path: Path):
    assert main([*arguments(small, "llama.cpp", tmp_path / "out"), "--dtype", "bf16"]) == 0
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "target.gguf").tensors}
    assert tensors["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_a_smaller_vocabulary_is_padded_and_the_padding_never_proposed(small: Path, tmp_path: Path):
    tokenizer = load_tokenizer(small / "target")
    make_pair(parse_shape("2x64/2h/96", vocab=540), parse_shape("1x64/2h/96", vocab=540), 0.8).save(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide" / "target")  # 28 ids have no token
    (tmp_path / "wide" / "target" / "tokenizer.model").write_bytes(b"sentencepiece")
    exported = export(str(small / "draft"), str(tmp_path / "wide" / "target"), "vllm", Advice(2), tmp_path / "out")
    assert exported.vocabulary == "512 token ids made 540, as many as the target's"
    assert not (tmp_path / "out" / "target").exists()  # vLLM reads it where it is
    assert (tmp_path / "out" / "draft" / "tokenizer.model").is_file()
    assert str(tmp_path / "wide" / "target") in exported.command
    padded, before = sd.load(tmp_path / "out" / "draft"), sd.load(small / "draft")
    assert padded.shape.vocab == 540
    hidden = torch.randn(200, 64)
    after = padded.decoder.head(hidden)
    torch.testing.assert_close(after[:, :512], before.decoder.head(hidden))
    assert int(after.argmax(1).max()) < 512
    narrow = export(str(tmp_path / "out" / "draft"), str(small / "target"), "vllm", Advice(2), tmp_path / "cut")
    assert "540 token ids made 512" in narrow.vocabulary
    torch.testing.assert_close(sd.load(narrow.folder / "draft").decoder.head(hidden), before.decoder.head(hidden))


def test_settings_have_lookaheads_by_batch_size_if_the_engine_takes_them():
    batches = {1: 4, 4: 2, 16: 0}
    vllm = json.loads(setup("vllm", "t", 4, batches).files["speculative.json"])
    assert (vllm["method"], vllm["model"], vllm["num_speculative_tokens"]) == ("draft_model", "draft", 4)
    assert vllm["num_speculative_tokens_per_batch_size"] == [[1, 3, 4], [4, 15, 2], [16, 16, 0]]
    assert "num_speculative_tokens_per_batch_size" not in setup("vllm", "t", 4, {}).files["speculative.json"]
    trtllm = yaml.safe_load(setup("trtllm", "t", 4, batches).files["trtllm.yaml"])["speculative_config"]
    assert trtllm["max_draft_len"] == 4
    assert trtllm["draft_len_schedule"] == {3: 4, 15: 2, 16: 0}
    sglang = yaml.safe_load(setup("sglang", "t", 4, batches).files["sglang.yaml"])
    assert (sglang["speculative-num-steps"], sglang["speculative-num-draft-tokens"]) == (4, 5)
    flags = setup("llama.cpp", "t.gguf", 4, batches).command
    assert flags[flags.index("--spec-draft-n-max") + 1] == "4"


@pytest.mark.parametrize(
    ("batches", "longest", "schedule"), [({1: 2, 4: 3}, 2, {3: 2, 4: 2}), ({1: 0, 4: 3}, 4, None), ({}, 4, None)]
)
def test_tensorrt_llm_gets_no_lookahead_longer_than_the_first(batches: dict[int, int], longest: int, schedule: object):
    """It does not start with another schedule, nor with one that begins with 0."""
    config = yaml.safe_load(setup("trtllm", "t", 4, batches).files["trtllm.yaml"])["speculative_config"]
    assert (config["max_draft_len"], config.get("draft_len_schedule")) == (longest, schedule)


def test_the_lookahead_of_a_study_is_exported(small: Path, tmp_path: Path, capsys):
    run, target, draft = tmp_path / "run", str(small / "target"), str(small / "draft")
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"prompt": f"Prompt {n}"}) + "\n" for n in range(4)))
    common = ["--target", target, "--rounds", "1"]
    study = ["--drafts", draft, "--prompts", str(tmp_path / "few.jsonl"), "--lookaheads", "1:3", "--live", "0"]
    assert main(["study", *common, *study, "--max-new-tokens", "12", "--out", str(run)]) == 0
    best = json.loads((run / "study.json").read_text())["rows"][0]
    advice = advise(run, target, draft)
    assert (advice.lookahead, advice.by_batch, advice.how) == (best["lookahead"], {}, "predicted")
    times = ["--drafts", draft, "--lookaheads", "1,3", "--contexts", "64", "--batches", "4"]
    assert main(["profile", *common, *times, "--out", str(run / "profile.jsonl")]) == 0
    assert advise(run, target, draft).by_batch.keys() == {1, 4}
    capsys.readouterr()
    command = ["export", draft, "--target", target, "--engine", "vllm", "--study", str(run)]
    assert main([*command, "--out", str(tmp_path / "out"), "--json"]) == 0
    config = json.loads(json.loads(capsys.readouterr().out)["files"]["speculative.json"])
    first = best["lookahead"] if best["prediction"]["speed_up"] > 1 else 0
    assert config["num_speculative_tokens_per_batch_size"][0] == [1, 3, first]
    assert main([*command, "--lookahead", "2", "--out", str(tmp_path / "out2")]) == 2
    assert main(["export", "zoo:4x128", *command[2:], "--out", str(tmp_path / "out2")]) == 2
    error = capsys.readouterr().err
    assert "its study has no draft zoo:4x128" in error
    assert "run the study again with this draft too" in error


def timed_run(folder: Path, speed_up: float, live: float | None) -> Path:
    """Write the study of one draft, whose profile has batches of 4 in which speculation is twice as fast."""
    folder.mkdir()
    vocabulary = {"size": 512, "tokens": None, "digest": None}
    measured = live and LiveSpeed(1.6, 100 * live, 100.0, live, (live - 0.2, live + 0.2), lossless=True)
    predicted = Prediction(1, 1.6, Iteration(0.0, 1.6 / speed_up), 1.0)
    row = StudyRow("zoo:2x192", Candidate("zoo:2x192", 1), "", predicted, (speed_up, speed_up), measured)
    write_study(folder / "study.json", StudyResult((row,), 100.0))
    output = {"set": "zoo", "id": "0", "sample": 0, "prompt": [1, 2], "output": [3, 4]}
    place = {"draft": "zoo:2x192", "lookahead": 1, "context": 2, "round": 0, "turn": 0}
    times = {"plain_s": 1.0, "draft_s": 0.1, "target_s": 0.7, "rest_s": 0.0, "handover_s": 0.0, "arithmetic_s": 0.0}
    for name, kind, about, rows in (
        ("trace", TRACE, {"target": "zoo:target", "vocabulary": vocabulary, "sampling": {}}, [output]),
        ("replays", REPLAYS, {}, [{"name": "", "drafter": "model", "draft": "zoo:2x192", "tar": {"1": 1.6}}]),
        ("profile", PROFILE, {}, [place | times | {"batch": batch} for batch in (1, 4)]),
    ):
        file = Records.open(folder / f"{name}.jsonl", kind, about)
        file.append(*rows)
    return folder


@pytest.mark.parametrize(
    ("predicted", "live", "first"), [(1.2, None, 1), (0.9, None, 0), (1.2, 0.95, 0), (0.9, 1.1, 1), (1.0, None, 0)]
)
def test_batch_size_1_has_no_speculation_if_that_is_slower(
    tmp_path: Path, predicted: float, live: float | None, first: int
):
    advice = advise(timed_run(tmp_path / "run", predicted, live), "zoo:target", "zoo:2x192")
    assert advice.by_batch == {1: first, 4: 1}
    assert advice.lookahead == 1
    assert advice.interval == (live and (live - 0.2, live + 0.2))


def test_advice_for_batches_counts_iterations_in_which_the_draft_is_silent(tmp_path: Path):
    """Without those iterations the TAR alone would make the draft twice as fast."""
    run = timed_run(tmp_path / "run", 1.2, None)
    silent = {"name": "", "drafter": "model", "draft": "zoo:2x192", "tar": {"1": 1.6}}
    silent["silence"] = {"1": {"begins": 100, "iterations": 0.9, "tokens": 0.56}}
    replays = Records.read(run / "replays.jsonl", REPLAYS)
    replays.append(silent)
    slow = {"draft": "zoo:2x192", "lookahead": 1, "context": 2, "round": 0, "turn": 0, "batch": 8}
    slow |= {"plain_s": 1.0, "draft_s": 1.3, "target_s": 0.7, "rest_s": 0.0, "handover_s": 0.0, "arithmetic_s": 0.0}
    Records.read(run / "profile.jsonl", PROFILE).append(slow)
    assert advise(run, "zoo:target", "zoo:2x192").by_batch == {1: 1, 4: 1, 8: 1}
    replays.append(silent | {"silence": {}})
    assert advise(run, "zoo:target", "zoo:2x192").by_batch == {1: 1, 4: 1, 8: 0}


def test_batches_timed_at_shorter_lookaheads_than_the_studys(tmp_path: Path):
    run = timed_run(tmp_path / "run", 1.2, None)
    far = {"name": "", "drafter": "model", "draft": "zoo:2x192", "tar": {"2": 1.9, "3": 2.2}}
    Records.read(run / "replays.jsonl", REPLAYS).append(far)
    with pytest.raises(RecordError, match="profile --drafts zoo:2x192 --lookaheads 2 --batches 4"):
        advise(run, "zoo:target", "zoo:2x192")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "transformers"])
def test_the_printed_advice(tmp_path: Path, capsys, engine: str):
    run, out = timed_run(tmp_path / "run", 1.2, 1.26), tmp_path / "out"
    assert main([*PAIR, "--engine", engine, "--study", str(run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "lookahead 1: 1.26x (1.06–1.46) as fast here, measured live" in printed
    assert ("by batch size: 1: 1, 4: 1" in printed) == (engine in ("vllm", "trtllm"))
    assert json.loads((out / "export.json").read_text())["advice"]["interval"] == pytest.approx([1.06, 1.46])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --study"),
        (["--lookahead", "0"], "--lookahead is 0"),
        (["--lookahead", "3", "--dtype", "int8"], "no other engine reads our int8"),
        (["--study", "nowhere"], "holds no study.json"),
        (["--lookahead", "3", "--target", "opt-nowhere/x/y"], "no such folder"),
        (["--lookahead", "3", "--out", "."], "exists already"),
    ],
)
def test_bad_input(small: Path, tmp_path: Path, capsys, options: list[str], message: str):
    command = [word for word in arguments(small, "vllm", tmp_path / "out") if word not in ("--lookahead", "3")]
    assert main(command + options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unsupported_models_are_refused_before_any_work(folder, small: Path, tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="of the family opt; for sglang we write"):
        export(str(folder("opt")), str(folder("opt")), "sglang", Advice(2), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        export(str(folder("mistral-window")), str(folder("mistral-window")), "llama.cpp", Advice(2), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="tokenizer is not one that GGUF export supports"):
        export(str(folder("llama")), str(folder("llama")), "llama.cpp", Advice(2), tmp_path / "out")
    with pytest.raises(sd.ShallowdraftError, match="vocabulary is not the target's"):
        export("zoo:2x192", str(small / "target"), "vllm", Advice(2), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_nothing_behind(small: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sd.Model, "save", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    assert main(arguments(small, "vllm", tmp_path / "out")) == 2
    assert not list(tmp_path.iterdir())


def test_a_terminated_export_leaves_nothing_behind(small: Path, tmp_path: Path, monkeypatch):
    def stop(*_: object) -> None:
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sd.Model, "save", stop)
    with pytest.raises(SystemExit) as ended:
        main(arguments(small, "vllm", tmp_path / "out"))
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.iterdir())


def test_the_remains_of_a_killed_export_are_removed_by_the_next(small: Path, tmp_path: Path):
    (tmp_path / "out.partial" / "draft").mkdir(parents=True)
    (tmp_path / "out.partial" / "half").touch()
    before = os.umask(0o027)
    try:
        assert main(arguments(small, "vllm", tmp_path / "out")) == 0
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "draft",
        "export.json",
        "speculative.json",
        "start.sh",
    }
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]}
    assert (modes["out"], modes["start.sh"], modes["model.safetensors"]) == (0o750, 0o750, 0o640)
