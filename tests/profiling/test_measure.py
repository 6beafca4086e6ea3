"""Measuring: samples of a command that goes on, and predictions from them through the commands."""

import json
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import RecordError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.profiling import measure as measuring
from shallowdraft.profiling.measure import require_machine
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.part_times import Point
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.shapes.notation import parse_shape


def test_another_machine():
    with pytest.raises(RecordError, match="measured on elsewhere"):
        require_machine(Profile({"device": "elsewhere"}, {}), torch.device("cpu"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_pair(parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8).save(folder)
    return folder


def test_from_a_trace_and_a_profile_to_a_verdict(pair: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, draft = str(pair / "target"), str(pair / "draft")
    assert (
        main(["record", "--target", target, "--prompts", "zoo", "--limit", "5", "--max-new-tokens", "20", "--out", "t"])
        == 0
    )
    measure = [
        "profile",
        "--target",
        target,
        "--drafts",
        draft,
        "--lookaheads",
        "1,3",
        "--contexts",
        "16",
        "--out",
        "p",
    ]
    assert main([*measure, "--rounds", "1"]) == 0
    once = Path("p").read_text()
    assert main([*measure, "--rounds", "2"]) == 0  # goes on
    assert Path("p").read_text().startswith(once)
    assert {len(found) for found in read_profile(Path("p")).samples.values()} == {2 * measuring.TURNS}
    candidates = [Candidate.with_draft(sd.load_draft(draft), lookahead) for lookahead in (1, 3)]
    assert set(read_profile(Path("p")).samples) == {Point(candidate, 16, 1) for candidate in candidates}
    capsys.readouterr()
    assert main(["predict", "--trace", "t", "--profile", "p", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    assert found["lookahead"] in (1, 2, 3)
    assert found["speed_up"] == pytest.approx(found["tokens_per_s"] / found["plain_tokens_per_s"])
    assert main(["replay", "--trace", "t", "--drafts", draft, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["drafts"]
    assert one["tar"][str(found["lookahead"])] == pytest.approx(found["tar"])
    assert len(one["tar"]) == 32
    assert one["sets"].keys() == {"zoo"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tar", "3"], "--draft-ms"),
        (["--tar", "9", "--lookahead", "5", "--draft-ms", "1", "--verify-ms", "5"], "between 1 and 6"),
        (["--tar", "3", "--lookahead", "5", "--draft-ms", "nan", "--verify-ms", "5"], "must be a time"),
        (["--tar", "3", "--lookahead", "5", "--draft-ms", "1", "--verify-ms", "0"], "must be a time"),
        (["--trace", "t"], "both --trace and --profile"),
        (["--trace", "t", "--profile", "p"], "no such file"),
    ],
)
def test_wrong_numbers(given: list[str], said: str, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *given]) == 2
    assert said in capsys.readouterr().err


def test_numbers_typed_in(capsys):
    given = ["--lookahead", "5", "--draft-ms", "1", "--verify-ms", "7", "--plain-ms", "6.5"]
    assert main(["predict", "--tar", "3", *given]) == 0
    assert "pays 2.44x at lookahead 5" in capsys.readouterr().out
    assert main(["predict", "--tar", "3", *given[:-1], "7.2"]) == 0
    said = capsys.readouterr().out
    assert "drafting takes 0.37, faster verification gives 0.07, the rest takes 0.00: 2.70x is left" in said
    assert main(["predict", "--acceptance-rate", "1", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["tar"] == 6
