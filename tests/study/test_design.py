"""Shapes: which can be, what they would cost by the law, and the TAR they need; the search that builds them."""

import json
from pathlib import Path

import pytest

from shallowdraft import cost
from shallowdraft.building.pruning import require_reachable
from shallowdraft.cli import main
from shallowdraft.errors import OptionError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.profiling.latency import KIND, read_profile
from shallowdraft.profiling.law import LatencyLaw, layer_weights
from shallowdraft.records import Records
from shallowdraft.shapes import NAMED, parse
from shallowdraft.study.design import design, enumerate_shapes
from shallowdraft.study.search import choose_candidates, plan_rungs

PARENT = parse("12x256/4h/688", vocab=1024)
LAW = LatencyLaw(1e-5, 1e-6, 2e-5, 1e-11, 0.0)


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


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-350m", "tiny-llama-1.1b"])
def test_every_shape_can_be_pruned_to(name: str):
    parent = NAMED[name]
    shapes = enumerate_shapes(parent)
    for shape in shapes:
        require_reachable(parent, shape)
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
    parents = {"deep": PARENT, "flat": parse("2x256/4h/688", vocab=1024)}
    found = choose_candidates(parents, LAW, read_profile(profile), 64, range(1, 9), 2000.0, 6)
    assert {one.parent for one in found} == {"deep", "flat"}
    assert len(found) == len({one.name for one in found}) <= 6
    with pytest.raises(OptionError, match="could be faster"):
        choose_candidates(parents, LAW, read_profile(profile), 64, range(1, 9), 1e9, 6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    pair = make_pair(parse("4x64/2h/96", vocab=512), parse("1x64/2h/96", vocab=512), 0.8)
    pair.target.tokenizer.eos_token = pair.target.tokenizer.convert_ids_to_tokens(511)  # documents begin after it
    pair.save(folder)
    return folder


def slow_the_target(profile: Path) -> None:
    """One so small takes hardly longer than its drafts, and on a busy machine none of them seems to pay."""
    first, *rows = map(json.loads, profile.read_text().splitlines())
    slower = [row | {name: 20 * row[name] for name in ("plain_s", "pass_s", "target_s") if name in row} for row in rows]
    profile.write_text("".join(json.dumps(row) + "\n" for row in (first, *slower)))


def test_the_commands(models: Path, tmp_path: Path, capsys, monkeypatch):
    """From a profile with shapes to a design, and to a built draft; a second run builds nothing anew."""
    monkeypatch.chdir(tmp_path)
    target = str(models / "target")
    timed = ["profile", "--target", target, "--draft", str(models / "draft"), "--shapes", "auto"]
    assert main([*timed, "--lookaheads", "1", "4", "--contexts", "16", "--rounds", "1", "--out", "p"]) == 0
    assert "law:" in capsys.readouterr().out
    slow_the_target(Path("p"))
    recorded = ["record", "--target", target, "--prompts", "zoo", "--limit", "4", "--max-new-tokens", "16"]
    assert main([*recorded, "--out", "t"]) == 0
    given = ["design", "--target", target, "--profile", "p", "--lookaheads", "1:4"]
    capsys.readouterr()
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["shape"] for one in found["shapes"] if one["on_front"]}
    assert main([*given, "--trace", "t"]) == 0
    assert "to beat" in capsys.readouterr().out
    search = [*given, "--trace", "t", "--search", "--out", "o", "--candidates", "4", "--tokens", "40000"]
    search += ["--text", "16384", "--json"]
    assert main(search) == 0
    first = json.loads(capsys.readouterr().out)
    lines = Path("o/search.jsonl").read_text()
    about, *rows = map(json.loads, lines.splitlines())
    assert len(rows) == sum(rung["candidates"] for rung in about["about"]["rungs"])
    assert main(search) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert Path("o/search.jsonl").read_text() == lines
    assert main(["generate", "--target", target, "--draft", "o/draft", "--prompt", "a", "--max-new-tokens", "8"]) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--search"], "needs --trace"),
        (["--cluster", "host:6379"], "--cluster is for --search"),
        (["--parent", "zoo:4x128", "zoo:8x96"], "for --search"),
        (["--lookaheads", "x"], "--lookaheads"),
        (["--profile", "nowhere"], "no such file"),
    ],
)
def test_bad_input(more: list[str], said: str, tmp_path: Path, capsys):
    given = ["design", "--target", "zoo:target", "--profile", str(tmp_path / "none")]
    assert main([*given, *more]) == 2
    assert said in capsys.readouterr().err
