"""Shapes: which can be, what they would cost by the law, and the TAR they need; the search that builds them."""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shallowdraft import cost
from shallowdraft.building.pruning import require_reachable
from shallowdraft.cli import main
from shallowdraft.errors import OptionError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.portable import require_portable
from shallowdraft.profiling.latency_model import LatencyModel, layer_weights, trial_shapes
from shallowdraft.records import Records
from shallowdraft.runs.profile import KIND, read_profile
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying.design import design, enumerate_shapes
from shallowdraft.studying.search import choose_candidates, plan_rungs

PARENT = parse_shape("12x256/4h/688", vocab=1024)
LAW = LatencyModel(1e-5, 1e-6, 2e-5, 1e-11, 0.0)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A target of 1 ms a token that verifies d tokens in 1 ms + 20 us each."""
    file = Records.open(tmp_path / "profile", KIND, {"target": "t", "device": "elsewhere"})
    for d in (1, 2, 4, 8):
        row = {
            "draft": "at hand",
            "lookahead": d,
            "context": 64,
            "batch": 1,
            "round": 0,
            "turn": 0,
            "handover_s": 0,
            "arithmetic_s": 0,
        }
        file.append(row | {"plain_s": 1e-3, "pass_s": 1e-3, "draft_s": 1e-4, "target_s": 1e-3 + 2e-5 * d, "rest_s": 0})
    return tmp_path / "profile"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-350m", "tiny-llama-1.1b", "llama-7b", "4x64/8h/4kv/96"])
def test_every_shape_can_be_pruned_to_and_loaded(name: str):
    parent = parse_shape(name)
    shapes = enumerate_shapes(parent)
    for shape in (*shapes, *trial_shapes(parent)):
        require_reachable(parent, shape)
        require_portable(shape)
    assert parent in shapes
    assert all(shape.parameters <= 10**9 for shape in enumerate_shapes(parent, 10**9))
    with pytest.raises(OptionError, match="allow more"):
        enumerate_shapes(parent, 1000)


def test_what_is_needed_gives_the_wanted_throughput(profile: Path):
    found = design(enumerate_shapes(PARENT), LAW, read_profile(profile), 64, range(1, 9), best_tokens_per_s=2000.0)
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    for one in found:
        for needed, goal in ((one.break_even, 1000.0), (one.to_win, 2000.0)):
            d = needed.lookahead
            times = cost.Iteration(LAW.draft_s(one.shape, d, 64), 1e-3 + 2e-5 * d)
            assert cost.throughput(needed.tar, times) == pytest.approx(goal)
            if needed.acceptance_rate <= 1:
                assert cost.independent_tar(needed.acceptance_rate, d) == pytest.approx(needed.tar)
    front = [one for one in found if one.on_front]
    for one in found:  # whatever is not on the front has a faster or equal shape with as many weights
        better = [
            two for two in front if two.step_s <= one.step_s and layer_weights(two.shape) >= layer_weights(one.shape)
        ]
        assert better


def test_rungs_share_the_tokens():
    rungs = plan_rungs(9, 2_700_000)
    assert [(rung.candidates, rung.tokens) for rung in rungs] == [(9, 100_000), (3, 300_000), (1, 900_000)]
    assert plan_rungs(1, 10_000)[0].tokens == 10_000


def test_candidates_come_from_all_parents_and_could_win(profile: Path):
    parents = {"deep": PARENT, "flat": parse_shape("2x256/4h/688", vocab=1024)}
    found = choose_candidates(parents, LAW, read_profile(profile), 64, range(1, 9), 2000.0, 6)
    assert {one.parent for one in found} == {"deep", "flat"}
    assert len(found) == len({one.name for one in found}) <= 6
    with pytest.raises(OptionError, match="could be faster"):
        choose_candidates(parents, LAW, read_profile(profile), 64, range(1, 9), 1e9, 6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    pair = make_pair(parse_shape("4x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8)
    pair.target.tokenizer.eos_token = pair.target.tokenizer.convert_ids_to_tokens(511)  # documents begin after it
    pair.save(folder)
    return folder


def slow_the_target(profile: Path) -> None:
    """One so small takes hardly longer than its drafts, and on a busy machine none of them seems to pay."""
    first, *rows = map(json.loads, profile.read_text().splitlines())
    slower = [row | {name: 20 * row[name] for name in ("plain_s", "pass_s", "verify_s") if name in row} for row in rows]
    profile.write_text("".join(json.dumps(row) + "\n" for row in (first, *slower)))


def printed(arguments: list[str]) -> str:
    """What a command that goes well prints."""
    with redirect_stdout(StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue()


@dataclass(frozen=True)
class Searched:
    """A finished search and what led to it."""

    folder: Path
    given: list[str]
    """Arguments of a design."""
    search: list[str]
    """More of them, all but --out."""
    profiled: str
    report: str

    def rows(self, out: str) -> list[dict[str, Any]]:
        return list(Records.read(self.folder / out / "search.jsonl", "search"))


@pytest.fixture(scope="module")
def searched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """From a profile with shapes to a built draft."""
    folder, target = tmp_path_factory.mktemp("searched"), str(models / "target")
    profile, trace = str(folder / "p"), str(folder / "t")
    timed = ["profile", "--target", target, "--drafts", str(models / "draft"), "--shapes", "auto"]
    profiled = printed([*timed, "--lookaheads", "1,4", "--contexts", "16", "--rounds", "1", "--out", profile])
    slow_the_target(Path(profile))
    recorded = ["record", "--target", target, "--prompts", "zoo", "--limit", "4", "--max-new-tokens", "16"]
    printed([*recorded, "--out", trace])
    given = ["design", "--target", target, "--profile", profile, "--lookaheads", "1:4"]
    search = ["--trace", trace, "--search", "--candidates", "4", "--tokens", "40000", "--generated", "16384", "--json"]
    report = printed([*given, *search, "--out", str(folder / "o")])
    return Searched(folder, given, search, profiled, report)


def test_the_commands(searched: Searched, models: Path):
    """A design, and a built draft; a second run builds nothing anew."""
    assert "latency model:" in searched.profiled
    found = json.loads(printed([*searched.given, "--json"]))
    assert {one["shape"] for one in found["shapes"] if one["on_front"]}
    assert "to beat" in printed([*searched.given, "--trace", str(searched.folder / "t")])
    out = searched.folder / "o"
    lines = (out / "search.jsonl").read_text()
    about, *rows = map(json.loads, lines.splitlines())
    assert len(rows) == sum(rung["candidates"] for rung in about["about"]["rungs"])
    assert json.loads(searched.report)["failed"] == []
    assert printed([*searched.given, *searched.search, "--out", str(out)]) == searched.report
    assert (out / "search.jsonl").read_text() == lines
    drafted = ["--draft", str(out / "draft"), "--prompt", "a", "--max-new-tokens", "8"]
    assert main(["generate", "--target", str(models / "target"), *drafted]) == 0


def searched_again(searched: Searched, out: str, damaged: Sequence[int], rung: int = 0) -> list[str]:
    """The arguments of a search that was stopped before its first rung was judged, some builds of a rung damaged."""
    first = [row["candidate"] for row in searched.rows("o") if row["rung"] == 0]
    for number, name in enumerate(first):
        built = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
        sound, again = searched.folder / "o" / built / "rung-0", searched.folder / out / built
        shutil.copytree(sound, again / "rung-0")
        if number in damaged:
            shutil.copytree(sound, again / f"rung-{rung}", dirs_exist_ok=True)
            (again / f"rung-{rung}" / "model.safetensors").write_bytes(b"none")
    shutil.copytree(searched.folder / "o" / "text", searched.folder / out / "text")
    return [*searched.given, *searched.search, "--out", str(searched.folder / out)]


def test_a_candidate_that_fails_is_passed_over(searched: Searched, capsys):
    command = searched_again(searched, "one", [0])
    for _ in ("the first time", "resumed"):
        assert main(command) == 0
        said = capsys.readouterr()
        rows = searched.rows("one")
        (failed,) = [row for row in rows if "failed" in row]
        assert failed["candidate"] == searched.rows("o")[0]["candidate"]
        assert "model.safetensors: truncated or corrupt" in failed["failed"]
        assert f"passed over: {failed['candidate']}: {failed['failed']}" in said.err
        assert json.loads(said.out)["failed"] == [failed]
        assert json.loads(said.out)["found"]["candidate"] != failed["candidate"]
        assert len(rows) == len(searched.rows("o"))
    assert main([argument for argument in command if argument != "--json"]) == 0
    assert "is predicted" in capsys.readouterr().out


def test_a_slower_one_takes_the_place_of_those_that_fail_later(searched: Searched, capsys):
    """The second rung has room for two of four, and three fail in it."""
    assert main(searched_again(searched, "later", [0, 1, 2], rung=1)) == 0
    rows = searched.rows("later")
    assert [row["rung"] for row in rows if "failed" in row] == [1, 1, 1]
    assert json.loads(capsys.readouterr().out)["found"]["candidate"] == rows[3]["candidate"]


def test_a_search_in_which_all_fail_says_so(searched: Searched, capsys):
    command = searched_again(searched, "all", range(4))
    for _ in ("the first time", "resumed"):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "error: none of 4 candidates could be built, loaded and replayed; the first: " in said
        assert "model.safetensors: truncated or corrupt" in said.splitlines()[-1]
    assert not (searched.folder / "all" / "draft").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--search"], "needs --trace"),
        (["--cluster", "host:6379"], "--cluster is for --search"),
        (["--parents", "zoo:4x128", "zoo:8x96"], "for --search"),
        (["--lookaheads", "x"], "--lookaheads"),
        (["--profile", "nowhere"], "no such file"),
    ],
)
def test_bad_input(more: list[str], said: str, tmp_path: Path, capsys):
    given = ["design", "--target", "zoo:target", "--profile", str(tmp_path / "none")]
    assert main([*given, *more]) == 2
    assert said in capsys.readouterr().err
