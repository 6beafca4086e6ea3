"""Records belong to weights, not to the names that somebody typed: other weights under a path are another model."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from shallowdraft.cli import main
from shallowdraft.models.synthetic import make_pair
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying import live

SETTINGS = ["--lookaheads", "2:2", "--max-new-tokens", "16", "--rounds", "1", "--dtype", "float32", "--json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of the same shapes and vocabulary: in one the draft agrees often, in the other hardly ever."""
    folder = tmp_path_factory.mktemp("made")
    shapes = parse_shape("2x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512)
    make_pair(*shapes, 0.9).save(folder / "one")
    make_pair(*shapes, 0.1, seed=5).save(folder / "two")
    lines = [{"prompt": f"Prompt {number} about {number * 7}", "id": str(number)} for number in range(4)]
    (folder / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what is run anew is so for its weights alone."""
    monkeypatch.setattr(live, "REPEATS", 0)


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the first pair and prompts of its own."""
    shutil.copytree(made / "one", tmp_path, dirs_exist_ok=True)
    shutil.copy(made / "few.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(capsys, *more: str, target: str = "target", draft: str = "draft") -> dict:
    given = ["study", "--target", target, "--drafts", draft, "--prompts", "few.jsonl", "--out", "run", *SETTINGS]
    assert main([*given, *more]) == 0
    return json.loads(capsys.readouterr().out)


def replaced(folder: Path, made: Path, name: str) -> None:
    shutil.rmtree(folder / name)
    shutil.copytree(made / "two" / name, folder / name)


def rows(file: str) -> list[dict]:
    """Records of a file, without its header and the plans of a profile."""
    lines = [json.loads(line) for line in Path("run", file).read_text().splitlines()[1:]]
    return [row for row in lines if "planned" not in row]


def test_a_draft_that_was_replaced_is_replayed_timed_and_run_anew_and_nothing_else(folder: Path, made: Path, capsys):
    before = study(capsys)["rows"][0]
    trace, counts = (
        Path("run/trace.jsonl").read_text(),
        {name: len(rows(name)) for name in ("profile.jsonl", "live.jsonl")},
    )
    replaced(folder, made, "draft")
    after = study(capsys)["rows"][0]
    assert Path("run/trace.jsonl").read_text() == trace
    assert after["prediction"]["tar"] < before["prediction"]["tar"]
    if after["live"]:  # its own live runs, not those of the old weights
        assert after["live"]["tar"] == pytest.approx(after["prediction"]["tar"])
    assert after["digest"] != before["digest"]
    for name, count in counts.items():
        by_digest = Counter(row["digest"] for row in rows(name))
        assert by_digest[before["digest"]] == count
        assert by_digest[after["digest"]] >= count
    assert study(capsys)["rows"][0]["live"] == after["live"]  # and is done once


def test_another_precision_of_a_draft_is_timed_anew(folder: Path, capsys):
    study(capsys)
    count = len(rows("profile.jsonl"))
    (row,) = study(capsys, "--draft-dtype", "bfloat16")["rows"]
    assert row["dtype"] == "bfloat16"
    assert Counter(row["dtype"] for row in rows("profile.jsonl")) == {"float32": count, "bfloat16": count}


def test_the_same_weights_under_other_paths_are_recognised(folder: Path, capsys):
    before = study(capsys)["rows"][0]
    sizes = {name: len(rows(name)) for name in ("trace.jsonl", "profile.jsonl", "live.jsonl")}
    shutil.copytree("draft", "elsewhere")
    for target, draft in (("./target", "draft/"), ("target/", str(folder / "draft")), ("target", "elsewhere")):
        after = study(capsys, target=target, draft=draft)["rows"][0]
        assert after["live"] == before["live"]
    assert {name: len(rows(name)) for name in sizes} == sizes


def test_a_target_that_was_replaced_is_refused(folder: Path, made: Path, capsys):
    study(capsys)
    replaced(folder, made, "target")
    given = ["--target", "target", "--drafts", "draft", "--prompts", "few.jsonl", "--out", "run", *SETTINGS]
    assert main(["study", *given]) == 2
    error = capsys.readouterr().err
    assert "run/trace.jsonl was begun with another target; name another file or folder, or remove it" in error


def test_prompts_that_were_edited_are_refused(folder: Path, capsys):
    study(capsys)
    lines = Path("few.jsonl").read_text().splitlines()
    lines[1] = json.dumps({"prompt": "Something else", "id": "1"})
    Path("few.jsonl").write_text("\n".join(lines) + "\n")
    given = ["--target", "target", "--drafts", "draft", "--prompts", "few.jsonl", "--out", "run", *SETTINGS]
    assert main(["study", *given]) == 2
    assert "begun with another text of prompt 1 of few" in capsys.readouterr().err


def test_a_trace_and_a_profile_of_different_targets_do_not_meet(folder: Path, made: Path, capsys):
    study(capsys)
    replaced(folder, made, "target")
    profile = [
        "profile",
        "--target",
        "target",
        "--drafts",
        "draft",
        "--lookaheads",
        "2",
        "--contexts",
        "16",
        "--rounds",
        "1",
    ]
    assert main([*profile, "--out", "other.jsonl"]) == 0
    commands = {
        "predict": ["--trace", "run/trace.jsonl", "--profile", "other.jsonl"],
        "skip-search": ["--target", "target", "--trace", "run/trace.jsonl", "--out", "skips.jsonl", "--trials", "1"],
        "design": ["--target", "target", "--trace", "run/trace.jsonl", "--profile", "run/profile.jsonl"],
        "export": ["draft", "--target", "target", "--engine", "vllm", "--study", "run", "--out", "exported"],
    }
    for verb, options in commands.items():
        capsys.readouterr()
        assert main([verb, *options]) == 2, verb
        error = capsys.readouterr().err
        assert "is another model" in error or "other weights under that name" in error
    replaced(folder, made, "draft")
    shutil.rmtree("target")
    shutil.copytree(made / "one" / "target", "target")
    assert main(["export", *commands["export"]]) == 2
    assert "its weights were replaced since" in capsys.readouterr().err
