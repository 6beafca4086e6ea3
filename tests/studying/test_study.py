"""A study of tiny pairs through the command: the table, what is left out, what a killed run leaves behind."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import random_heads

import shallowdraft as sd
from shallowdraft.api.inputs import parse_lookaheads
from shallowdraft.cli import main
from shallowdraft.errors import OptionError
from shallowdraft.models.heads import save_heads
from shallowdraft.models.synthetic import make_pair
from shallowdraft.records import Records
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.runs import profile as profiles
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import LiveRun
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace, read_trace
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying import live
from shallowdraft.studying.forecast import forecast, forecast_in_states
from shallowdraft.studying.live import measured


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft of it; another pair whose vocabulary is not theirs."""
    folder = tmp_path_factory.mktemp("models")
    make_pair(parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8).save(folder)
    make_pair(parse_shape("2x64/2h/96", vocab=4096), parse_shape("1x64/2h/96", vocab=4096), 0.8).save(folder / "other")
    lines = [{"prompt": f"Prompt {number} about {number * 7}", "id": str(number)} for number in range(8)]
    (folder / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def arguments(models: Path, out: Path, *drafts: str) -> list[str]:
    given = ["study", "--target", str(models / "target"), "--prompts", str(models / "few.jsonl"), "--out", str(out)]
    names = [str(models / name) for name in drafts or ("draft",)]
    return [*given, "--drafts", *names, "--lookaheads", "1:4", "--max-new-tokens", "24", "--rounds", "1", "--json"]


def require_live_as_replayed(folder: Path, row: dict) -> None:
    """Each prompt was decoded as its replay says; whatever the times were, on a machine that others use too."""
    lines = [json.loads(line) for line in (folder / "live.jsonl").read_text().splitlines()[1:]]
    runs = {one["id"]: one for one in lines if (one["drafter"], one["draft"]) == (row["drafter"], row["draft"])}
    assert all(one["tie"] for one in runs.values())
    replays = [json.loads(line) for line in (folder / "replays.jsonl").read_text().splitlines()[1:]]
    (replayed,) = (one for one in replays if (one["drafter"], one["draft"]) == (row["drafter"], row["draft"]))
    tar = sum(one["emitted"] for one in runs.values()) / sum(one["iterations"] for one in runs.values())
    assert tar == pytest.approx(replayed["tar"][str(row["prediction"]["nodes"] or row["lookahead"])])
    if run := ran(row):  # on a machine that stalled too often there is none
        assert run["lossless"]
        assert run["tar"] == pytest.approx(row["prediction"]["tar"])


def test_it_ranks_and_says_whether_it_pays(models: Path, tmp_path: Path, capsys):
    assert main(arguments(models, tmp_path / "run")) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert 1 < row["prediction"]["tar"] <= row["lookahead"] + 1
    require_live_as_replayed(tmp_path / "run", row)
    assert found["lossless"]
    assert "speculation" in found["verdict"]
    assert json.loads((tmp_path / "run" / "study.json").read_text()) == found
    assert main(arguments(models, tmp_path / "run")[:-1]) == 0
    table = capsys.readouterr().out
    assert "outputs with every draft are those without" in table
    assert "needs" in table
    assert re.search(
        r"drafting takes [\d.]+, (longer verification takes|faster verification gives) [\d.]+, the rest", table
    )


def test_a_draft_that_cannot_be_used_is_named_and_left_out(models: Path, tmp_path: Path, capsys):
    assert main(arguments(models, tmp_path / "run", "draft", "other/draft", "nowhere")) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert len(found["rows"]) == 1
    assert set(found["failed"]) == {str(models / "other/draft"), str(models / "nowhere")}
    assert "vocabulary" in found["failed"][str(models / "other/draft")]
    assert err.count("was left out") == 2
    assert main(arguments(models, tmp_path / "run2", "nowhere")) == 2
    assert "no draft can be used" in capsys.readouterr().err


def ran(row: dict) -> dict:
    """What was measured live, a result or not: tiny models take less than others may disturb."""
    return row["live"] or row["impossible"]


def keys(folder: Path) -> dict[str, Counter[tuple]]:
    """Which records each file has; of live runs each once, since what stalls or is too fast is taken again."""
    names = {
        "trace.jsonl": ("set", "id", "sample"),
        "profile.jsonl": ("draft", "lookahead", "context", "batch", "round", "turn"),
        "live.jsonl": ("draft", "set", "id"),
    }
    found = {}
    for file, parts in names.items():
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()[1:]]
        found[file] = Counter(tuple(row[part] for part in parts) for row in rows if profiles.PLANNED not in row)
    return found | {"live.jsonl": Counter(set(found["live.jsonl"]))}


def lines_in(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_moments_nothing_is_lost_or_done_twice(models: Path, tmp_path: Path, capsys, kills: int):
    more = ["--lookaheads", "2:2", "--rounds", str(8 * kills)]  # one way live, whatever the times were
    assert main([*arguments(models, tmp_path / "whole"), *more]) == 0
    expected = json.loads(capsys.readouterr().out)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "shallowdraft", *arguments(models, killed), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    draws = random.Random(kills)
    for _ in range(kills):
        enough = lines_in(killed) + draws.randint(0, 5)
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while lines_in(killed) < enough and process.poll() is None:
                time.sleep(0.001)
            time.sleep(draws.uniform(0, 0.05))
            assert process.poll() is None  # there was work left
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    found = json.loads(done.stdout)
    assert keys(killed) == keys(tmp_path / "whole")
    assert max(count for file in keys(killed).values() for count in file.values()) == 1
    assert [(row["draft"], row["lookahead"]) for row in found["rows"]] == [
        (row["draft"], row["lookahead"]) for row in expected["rows"]
    ]
    for folder in ("whole", "killed"):
        require_live_as_replayed(tmp_path / folder, found["rows"][0])


def test_another_draft_reuses_the_rest(models: Path, tmp_path: Path, capsys):
    assert main(arguments(models, tmp_path / "run")) == 0
    before = (tmp_path / "run" / "profile.jsonl").read_text()
    assert main(arguments(models, tmp_path / "run", "draft", "target")) == 0
    assert (tmp_path / "run" / "profile.jsonl").read_text().startswith(before)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 2


def test_fewer_prompts_in_the_same_folder_are_a_study_of_their_own(models: Path, tmp_path: Path, capsys):
    """Records of the others stay in the file."""
    run = tmp_path / "run"
    given = [*arguments(models, run), "--lookaheads", "2:2"]
    assert main(given) == 0
    before = (run / "live.jsonl").read_text()
    capsys.readouterr()
    assert main([*given, "--limit", "3"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert ran(row)["tar"] == pytest.approx(row["prediction"]["tar"])
    outputs = read_trace(run / "trace.jsonl").outputs[:3]
    candidate = Candidate.of({name: row[name] for name in ("draft", "lookahead", "digest", "dtype")})
    runs = measured(run / "live.jsonl", outputs, [candidate])
    (result,) = (runs.by_candidate | runs.impossible).values()
    assert ran(row) == json.loads(json.dumps(asdict(result.speed)))
    assert set(result.states) <= {output.prompt_key for output in outputs}
    assert (run / "live.jsonl").read_text().startswith(before)


def test_a_prompt_on_which_the_machine_stalled_is_named(
    models: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    def stalls(runs: Sequence[LiveRun], _: object) -> list[str]:
        return ["sure" if run.id in ("3", "5") else "" for run in runs]

    monkeypatch.setattr(live, "find_stalls", stalls)
    given = arguments(models, tmp_path / "run")
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stalled"] == ["few 3", "few 5"]
    (row,) = found["rows"]
    assert ran(row)["tar"] == pytest.approx(row["prediction"]["tar"])
    assert main(given[:-1]) == 0
    assert "the machine stalled on few 3, few 5: left out of what was measured" in capsys.readouterr().out


def test_a_speed_up_above_its_tar_wins_nothing(models: Path, tmp_path: Path, capsys):
    """Iterations of one draft take half a plain token, in all rounds, so that nothing is left to run; others 1.5."""
    run, given = tmp_path / "run", arguments(models, tmp_path / "run", "draft", "target")
    fast, slow = str(models / "draft"), str(models / "target")
    assert main(given) == 0
    header, *lines = (run / "live.jsonl").read_text().splitlines()
    rows = {(row["draft"], row["id"]): row for row in map(json.loads, lines)}
    lines = [header]
    for (draft, _), row in rows.items():
        times = {"seconds": row["iterations"] * (0.5 if draft == fast else 1.5)}
        calm = {"states": [asdict(MachineState(1.0))] * 2}
        lines += [json.dumps(row | times | calm | {"round": number}) for number in range(1 + live.REPEATS)]
    (run / "live.jsonl").write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert main(given) == 0
    study = json.loads(capsys.readouterr().out)
    first, last = study["rows"]
    assert (first["draft"], last["draft"]) == (slow, fast)
    tars = [row["prediction"]["tar"] for row in (first, last)]
    assert (first["live"]["speed_up"], first["disturbed"]) == (pytest.approx(tars[0] / 1.5), None)
    assert (last["live"], last["impossible"]["speed_up"]) == (None, pytest.approx(tars[1] / 0.5))
    assert fast not in study["verdict"]
    assert main(given[:-1]) == 0
    table = capsys.readouterr().out
    assert f"{fast}: {last['disturbed']}; to measure again" in table
    assert "impossible, as an iteration takes at least as long as a plain token" in table


def every_drafter(models: Path, out: Path) -> list[str]:
    target = sd.load(models / "target")
    save_heads(random_heads(target, 2), models / "heads")
    drafters = ["--drafters", "model", "tree", "ngram", "skip", "medusa", "--node-counts", "3", "--live", "5"]
    return [*arguments(models, out), *drafters, "--heads", str(models / "heads"), "--lookaheads", "1:2"]


def test_every_way_to_propose_is_in_one_table_and_nothing_is_done_twice(models: Path, tmp_path: Path, capsys):
    given = every_drafter(models, tmp_path / "run")
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    draft = str(models / "draft")
    assert {row["name"] for row in found["rows"]} == {draft, f"tree {draft}", "n-gram", "skip", "medusa"}
    for row in found["rows"]:
        require_live_as_replayed(tmp_path / "run", row)
        assert (row["prediction"]["nodes"] == len(row["tree"]) == 3) == (row["drafter"] in ("tree", "medusa"))
    before = {file.name: file.read_text() for file in (tmp_path / "run").glob("*.jsonl")}
    files = {"trace.jsonl", "replays.jsonl", "profile.jsonl", "live.jsonl", "tokens.jsonl", "skips.jsonl"}
    assert set(before) == files
    assert main([one for one in given if one != "--json"]) == 0
    assert {file.name: file.read_text() for file in (tmp_path / "run").glob("*.jsonl")} == before
    assert "medusa" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafters", "tree", "ngram"], "give --drafts"),
        (["--drafters", "ngram", "--drafts", "zoo:4x128"], "--drafts is for --drafters model or tree"),
        (["--drafters", "ngram", "--node-counts", "4"], "--node-counts is for --drafters medusa or tree"),
        (["--drafters", "ngram", "--heads", "x"], "--heads is for --drafters medusa"),
        (["--drafters", "ngram", "--skips", "x"], "--skips is for --drafters skip"),
        (["--drafters", "medusa", "--node-counts", "64"], "a tree has 1 to 63"),
        (["--drafters", "tree", "--drafts", "x", "--max-new-tokens", "12"], "more than 12 --max-new-tokens"),
        (["--drafters", "skip", "--skips", "nowhere"], "no such file"),
        (["--drafters", "medusa"], "there are no heads; train some"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(models: Path, tmp_path: Path, capsys, options, said):
    given = ["study", "--target", str(models / "target"), "--prompts", str(models / "few.jsonl")]
    assert main([*given, "--out", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_time_of_proposals_of_several_lengths_is_their_mean(tmp_path: Path):
    """One iteration of three tokens, one of none, which takes a plain token and a look."""
    file = Records.open(tmp_path / "p", profiles.KIND, {})
    for lookahead, target_s in ((1, 1.2), (3, 1.6)):
        place = {"drafter": "ngram", "draft": "n-gram", "lookahead": lookahead, "context": 64, "batch": 1}
        times = {"plain_s": 1.0, "handover_s": 0.0, "arithmetic_s": 0.0, "draft_s": 0.1, "rest_s": 0.2}
        file.append(place | times | {"target_s": target_s, "round": 0, "turn": 0})
    trace = Trace("t", {}, Sampling(), [Output("0", "few", 0, [1], [1, 2, 3, 4, 5])])
    candidate = Candidate("n-gram", 3, "ngram")
    found = CountedReplay("n-gram", trace, {3: candidate}, {3: [[2, 0, 0, 0]]}, {3: [[3, 0, 0, 0]]})
    one = forecast(found, profiles.read_profile(tmp_path / "p"))[3]
    assert one.tar == 2.0
    assert asdict(one.iteration) == pytest.approx({"draft_s": 0.1, "verify_s": (1.6 + 1.0) / 2, "other_s": 0.1})
    beside = forecast_in_states(found, profiles.read_profile(tmp_path / "p"), 3, {("few", "0"): [MachineState(1.0)]})
    assert beside.iteration.total_s == pytest.approx(one.iteration.total_s)


def test_another_target_does_not_mix(models: Path, tmp_path: Path, capsys):
    assert main(arguments(models, tmp_path / "run")) == 0
    other = [
        str(models / "draft") if word == str(models / "target") else word
        for word in arguments(models, tmp_path / "run")
    ]
    assert main(other) == 2
    assert "was begun with another target" in capsys.readouterr().err


def test_lookaheads():
    assert parse_lookaheads("2:4") == [2, 3, 4]
    assert parse_lookaheads("5,1") == [1, 5]
    for wrong in ("", "0:3", "4:2", "1-3", "1:40", "a"):
        with pytest.raises(OptionError, match="--lookaheads"):
            parse_lookaheads(wrong)
