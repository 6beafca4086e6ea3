"""The command line: output, errors, interrupts, torchrun, --help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.commands.verbs import Verb
from shallowdraft.kernels import cpu
from shallowdraft.models.model import _warn_float32_draft
from shallowdraft.models.synthetic import make_pair
from shallowdraft.runs.trace import read_trace
from shallowdraft.shapes.shape import ModelShape

VERBS = [verb.__metadata__[0].name for verb in get_args(Verb)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    shape, small = ModelShape(2, 32, 2, 48, 400, context=96), ModelShape(1, 24, 2, 32, 400, context=96)
    target, draft = make_pair(shape, small, 0.8).save(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


def generate(folders: tuple[str, str], *options: str, draft: bool = True) -> int:
    drafting = ["--draft", folders[1]] if draft else []
    return main(
        ["generate", "--target", folders[0], *drafting, "--prompt", "hello", "--max-new-tokens", "20", *options]
    )


def test_json_output_is_one_object(folders, capsys):
    assert generate(folders, "--json") == 0
    speculative = json.loads(capsys.readouterr().out)
    assert generate(folders, "--json", draft=False) == 0
    plain = json.loads(capsys.readouterr().out)
    assert speculative["token_ids"] == plain["token_ids"]
    assert speculative["text"] == plain["text"]
    expected = {
        "iterations", "drafted", "accepted", "tar", "acceptance_rate", "acceptance_histogram", "acceptance_by_position",
        "prefill_s", "draft_s", "verify_s", "other_s", "total_s", "tokens_per_s",
    }  # fmt: skip
    assert expected <= speculative["stats"].keys()
    assert speculative["stats"]["tar"] > plain["stats"]["tar"] == 1.0


def test_text_goes_to_stdout_and_statistics_to_stderr(folders, capsys):
    assert generate(folders) == 0
    printed = capsys.readouterr()
    target = sd.load(folders[0])
    assert printed.out == sd.generate(target, "hello", max_new_tokens=20).text + "\n"
    assert re.search(r"20 tokens in .* tokens/s · TAR \d\.\d\d · \d+% of drafted tokens accepted", printed.err)


def test_sampling_options_reach_the_engine(folders, capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        options = [
            "--temperature",
            "20",
            "--top-k",
            "300",
            "--top-p",
            "0.9999",
            "--seed",
            seed,
            "--json",
            "--threads",
            "1",
        ]
        assert generate(folders, *options, "--dtype", "float32", "--device", "cpu") == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("ids")
    shape, small = ModelShape(2, 32, 2, 48, 400, context=96), ModelShape(1, 24, 2, 32, 400, context=96)
    target, draft = make_pair(shape, small, 0.8).save(folder)
    for file in [*target.glob("*token*"), *draft.glob("*token*")]:
        file.unlink()
    return str(target), str(draft)


def test_token_ids_instead_of_text(folders, without_tokenizer, capsys):
    text = sd.load(folders[0]).encode("hello")
    assert generate(folders, "--json") == 0
    expected = json.loads(capsys.readouterr().out)
    for target, draft in (folders, without_tokenizer):
        command = ["generate", "--target", target, "--draft", draft, "--max-new-tokens", "20"]
        assert main([*command, "--json", "--prompt-ids", *map(str, text)]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == expected["token_ids"]
    assert main([*command, "--prompt-ids", *map(str, text)]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in expected["token_ids"]]
    for options, message in (
        (["--prompt", "hello"], "or give token ids: --prompt-ids, or "),
        (["--prompt-ids", "1", "400"], "token id 400 is outside the target's vocabulary of 400"),
        (["--prompt-ids", "1", "--prompt", "hello"], "or --prompt-ids with token ids"),
        (["--prompt-ids", "1", "--chat"], "is token ids, which no chat template takes"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


def test_token_ids_in_a_file_of_prompts(without_tokenizer, tmp_path: Path, capsys):
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    prompts.write_text('{"ids": [5, 6, 7], "id": "a"}\n{"ids": [8]}\n')
    target, draft = without_tokenizer
    options = ["--prompts", str(prompts), "--max-new-tokens", "9"]
    assert main(["generate", "--target", target, *options, "--json"]) == 0
    generations = json.loads(capsys.readouterr().out)["generations"]
    assert main(["record", "--target", target, *options, "--out", str(trace)]) == 0
    outputs = read_trace(trace).outputs
    assert [output.prompt for output in outputs] == [[5, 6, 7], [8]]
    assert [output.output for output in outputs] == [generation["token_ids"] for generation in generations]
    assert main(["replay", "--trace", str(trace), "--drafts", draft]) == 0
    assert main(["record", "--target", target, *options, "--chat", "--out", str(tmp_path / "chat.jsonl")]) == 2
    assert "prompt a is token ids" in capsys.readouterr().err


def test_inspect(folders, capsys):
    assert main(["inspect", *folders, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["models"][0]["parameters"] == sd.load(folders[0]).shape.parameters
    assert printed["vocabulary"]["relation"] == "same"
    assert main(["inspect", folders[0]]) == 0
    assert "2x32/2h/48" in capsys.readouterr().out
    assert main(["inspect", "noft-wide-796m"]) == 0
    assert "796,290,560" in capsys.readouterr().out
    assert main(["inspect", folders[0], "--dtype", "bf16", "--context", "10", "--json"]) == 0
    bf16 = json.loads(capsys.readouterr().out)
    assert bf16["models"][0]["weight_bytes"] == 2 * bf16["models"][0]["parameters"]
    assert bf16["free_bytes"] > 0
    assert main(["inspect", folders[0], "--context", "0"]) == 2


def test_inspect_counts_a_cache_no_longer_than_the_context(folders, capsys):
    for context, tokens in (("1024", 96), ("10", 10)):
        assert main(["inspect", *folders, "--context", context, "--json"]) == 0
        for model in json.loads(capsys.readouterr().out)["models"]:
            assert model["kv_bytes"] == tokens * model["kv_bytes_per_token"]
    assert main(["inspect", *folders]) == 0
    printed = capsys.readouterr().out
    assert "for 96 tokens" in printed
    assert "1,024" not in printed


@pytest.mark.skipif(cpu.library() is None or not 12 % cpu.lanes(), reason="no gcc, or narrow vectors")
def test_a_draft_that_cannot_run_in_int8_is_reported_once(folders, capsys, caplog):
    """The target's heads are 16 wide, the draft's 12."""
    reason = f"int8 needs a CPU, gcc and heads whose width is a multiple of {cpu.lanes()}; these are 12 wide"
    assert main(["inspect", *folders, "--device", "cpu"]) == 0
    assert f"{folders[1]} drafts in float32: {reason}\n" in capsys.readouterr().out
    assert main(["inspect", *folders, "--device", "cpu", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["draft_dtype"] for model in models] == ["int8", "float32"]
    _warn_float32_draft.cache_clear()
    for _ in range(2):
        assert generate(folders, "--device", "cpu") == 0
    assert [record.message for record in caplog.records] == [f"the draft runs in float32: {reason}"]
    _warn_float32_draft.cache_clear()
    assert generate(folders, "--device", "cpu", "--draft-dtype", "float32") == 0
    assert len(caplog.records) == 1


def test_inspect_of_two_vocabularies(folders, capsys):
    assert main(["inspect", folders[0], "opt-125m"]) == 2
    assert "0 tokens are shared" in capsys.readouterr().err


def test_pair(tmp_path: Path, capsys):
    shapes = ["--target-shape", "2x32/2h/48", "--draft-shape", "1x32/2h/48", "--vocab", "400"]
    assert main(["pair", *shapes, "--agreement", "0.5", "--out", str(tmp_path / "p")]) == 0
    assert "agreement 50.0%; TAR" in capsys.readouterr().out
    assert main(["pair", *shapes, "--out", str(tmp_path / "p")]) == 2
    assert "already holds" in capsys.readouterr().err
    assert main(["pair", *shapes, "--dtype", "bf16", "--out", str(tmp_path / "half")]) == 0
    assert json.loads((tmp_path / "half" / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main(["pair", *shapes, "--out", str(tmp_path / "file")]) == 2
    assert "check the path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lookahead", "0"], "lookahead is 0; it must be a whole number from 1 to 32"),
        (["--lookahead", "99"], "lookahead is 99; it must be a whole number from 1 to 32"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "7"], "top_p is 7.0"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a" * 99], "99 tokens"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--target", "no/such/folder"], "no such folder"),
        (["--target", __file__], "is a file"),
        (["--seed", "99999999999999999999"], "seed is"),
        (["--draft", "./nowhere"], "no such folder"),
        (["--device", "cuda:9"], "CUDA GPUs"),
        (["--threads", "0"], "--threads is 0"),
        (["--threads", "99999"], "--threads is 99999"),
        (["--chat"], "no chat template"),
    ],
)
def test_bad_input_takes_one_line_and_exit_code_2(folders, capsys, options: list[str], message: str):
    assert generate(folders, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_an_error_of_all_processes_of_a_torchrun_is_printed_by_rank_0(folders):
    """The other process waits for torchrun to terminate it, which happens as soon as rank 0 has failed."""
    command = [sys.executable, "-m", "shallowdraft", "generate", "--target", folders[0], "--prompt", "x"]
    processes = [
        subprocess.Popen(
            [*command, *options],
            env=os.environ | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
        for options in ([], ["--lookahed", "3"])
    ]
    first, waiting = processes[:2], processes[2:]
    without_option, unknown_option = (process.communicate()[0] for process in first)
    assert without_option.count("\n") == 1
    assert without_option.startswith(
        "error: torchrun started 2 processes, which would all do the same; add --tensor-parallel"
    )
    assert "lookahed" in unknown_option
    for process in waiting:
        process.terminate()
        assert process.communicate()[0] == ""


def test_an_error_of_another_rank_alone_is_printed_too(folders, capsys, monkeypatch):
    monkeypatch.setattr("shallowdraft.cli.PEER_DELAY_S", 0.0)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert generate(folders, "--tensor-parallel", "--dtype", "int8") == 2
    assert capsys.readouterr().err.startswith("process 1: error: int8 weights cannot be split")


def test_rank_variables_without_torchrun_have_no_effect(folders, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert generate(folders, "--max-new-tokens", "2") == 0
    assert generate(folders, "--max-new-tokens", "0") == 2
    assert "process 3" not in capsys.readouterr().err


@pytest.mark.parametrize("program", [["-m", "shallowdraft"], [str(Path(sys.executable).with_name("shallowdraft"))]])
def test_an_interrupt_during_the_first_imports_takes_one_line(tmp_path: Path, program: list[str]):
    """Ctrl-C while tyro, which every command needs, is imported."""
    (tmp_path / "tyro.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(sd.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *program, "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("delay_s", [0.003, 0.05])
def test_a_second_ctrl_c_during_the_exit_changes_nothing(tmp_path: Path, delay_s: float):
    """With torch the interpreter takes long to exit, and near its end nothing catches a signal any more."""
    (tmp_path / "tyro.py").write_text(
        "import os, signal, subprocess, torch\n"
        f"subprocess.Popen(['sh', '-c', f'sleep {delay_s}; kill -INT {{os.getpid()}}'])\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(sd.__file__).parents[1])])
    command = [sys.executable, "-m", "shallowdraft", "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shallowdraft {sd.__version__}\n"


def test_a_reader_that_closes_the_pipe_is_no_error(folders):
    command = f"{Path(sys.executable).with_name('shallowdraft')} generate --target {folders[0]} --prompt x | head -c 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (len(done.stdout), done.stderr.count(b"error")) == (3, 0)


def test_a_terminal_without_unicode_is_no_error(folders):
    command = [str(Path(sys.executable).with_name("shallowdraft")), "generate", "--target", folders[0], "--prompt", "é"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode == 0


def test_debug_shows_the_traceback(folders):
    with pytest.raises(sd.ShallowdraftError):
        generate(folders, "--lookahead", "0", "--debug")


def test_an_unknown_option_is_an_error(folders):
    with pytest.raises(SystemExit) as stop:
        generate(folders, "--lookahed", "3")
    assert stop.value.code == 2


def test_the_installed_command(folders):
    command = [str(Path(sys.executable).with_name("shallowdraft")), "generate", "--target", folders[0], "--prompt", "x"]
    good = subprocess.run([*command, "--max-new-tokens", "3", "--json"], capture_output=True, text=True, check=False)
    assert good.returncode == 0
    assert len(json.loads(good.stdout)["token_ids"]) == 3
    bad = subprocess.run([*command, "--lookahead", "99"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS)])
def test_help_needs_no_torch(verb: list[str]):
    script = f"""
import sys
from shallowdraft.cli import main
try:
    main({[*verb, "--help"]!r})
except SystemExit as stop:
    assert stop.code == 0
assert not {{"torch", "transformers", "numpy"}} & sys.modules.keys()
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0
