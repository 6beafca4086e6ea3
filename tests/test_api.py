"""The product in Python: the example, the same numbers as the commands, and results that show themselves."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.display.tabular import MOST_ROWS, Tabular
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.models import zoo

pytestmark = pytest.mark.skipif(not zoo.names(), reason="the zoo is not built")

EXAMPLE = Path(__file__).parents[1] / "examples" / "zoo_study.py"
SMALL = {"limit": 4, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the names of the example, after it ran."""
    folder = tmp_path_factory.mktemp("api") / "run"
    before, sys.argv = sys.argv, [str(EXAMPLE), str(folder)]
    try:
        return folder, runpy.run_path(str(EXAMPLE))
    finally:
        sys.argv = before


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> dict:
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example_is_short_and_needs_nothing_deeper():
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 25
    assert [line for line in lines if re.match(r"(from|import) .*shallowdraft", line)] == ["import shallowdraft as sd"]


def test_the_example_has_the_numbers_of_the_commands(example, capsys):
    folder, names = example
    trace, profile = ["--trace", str(folder / "trace.jsonl")], ["--profile", str(folder / "profile.jsonl")]
    assert printed(capsys, "replay", *trace, "--drafts", *names["drafts"]) == as_json(names["replays"])
    # The profile has more samples since the example predicted: the study added a lookahead.
    assert printed(capsys, "predict", *trace, *profile) == as_json(sd.predict(names["trace"], folder / "profile.jsonl"))
    again = ["--target", "zoo:target", "--prompts", "zoo", "--limit", "8", "--max-new-tokens", "32"]
    printed(capsys, "record", *again, "--out", str(folder.parent / "again.jsonl"))
    recorded = [(folder / "trace.jsonl").read_text(), (folder.parent / "again.jsonl").read_text()]
    assert recorded[0].splitlines()[1:] == recorded[1].splitlines()[1:]
    study = ["--drafts", *names["drafts"], "--lookaheads", "2,4,6", "--rounds", "1", "--out", str(folder)]
    assert printed(capsys, "study", *again, *study) == as_json(names["study"])


def as_json(result: Tabular) -> dict:
    return json.loads(json.dumps(result.to_json()))


def test_results_show_themselves(example):
    folder, names = example
    for name in ("trace", "replays", "profile", "predictions", "study"):
        result = names[name]
        assert isinstance(result, Tabular)
        assert repr(result).startswith(result.caption)
        assert f"<th>{result.columns[0]}</th>" in result._repr_html_()
        assert all(len(row) == len(result.columns) for row in result.cells)
    assert "zoo:2x192" in repr(names["study"])
    assert names["replays"]["zoo:2x192"].tar[4] == names["replays"].to_json()["drafts"][0]["tar"][4]
    run = sd.open_run(folder)
    assert "study.json" in repr(run)
    assert run.study.verdict == names["study"].verdict
    assert sorted(replay.draft for replay in run.replays) == names["drafts"]
    assert len(run.trace.outputs) == 8
    assert sorted(run.profile.drafts) == names["drafts"]
    assert run.live
    assert run.tokens
    with pytest.raises(RecordError, match=r"accuracy\.json: there is no such file; write it with sd\.accuracy"):
        _ = run.accuracy


def test_long_tables_say_what_they_leave_out():
    class Long(Tabular):
        caption = "many <rows>"
        columns = ("n",)
        cells = tuple((number,) for number in range(MOST_ROWS + 3))

    assert "… and 3 more rows" in repr(Long())
    assert "many &lt;rows&gt;" in Long()._repr_html_()


def test_a_data_frame_has_all_rows(example):
    pandas = pytest.importorskip("pandas")
    frame = example[1]["trace"].data_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["set", "id", "sample", "prompt tokens", "new tokens"]
    assert len(frame) == 8


def test_progress_is_shown_silent_or_handed_on(tmp_path: Path, capsys):
    steps = []
    sd.record("zoo:target", "zoo", tmp_path / "t", **SMALL, progress=lambda *step: steps.append(step))
    assert steps == [("recording", 0, 4), ("recording", 4, 4)]
    assert capsys.readouterr().err == ""
    sd.record("zoo:target", "zoo", tmp_path / "silent", **SMALL, progress=False)
    assert capsys.readouterr() == ("", "")


def test_models_may_be_loaded_or_named(tmp_path: Path):
    target, draft = sd.load("zoo:target"), sd.load_draft("zoo:2x192")
    trace = sd.record(target, ["zoo"], tmp_path / "t", **SMALL, progress=False)
    named, loaded = sd.replay(tmp_path / "t", "zoo:2x192"), sd.replay(trace, [draft])
    assert named.to_json() == loaded.to_json()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sd.record("zoo:target", "zoo", "t", max_new_tokens=0), "--max-new-tokens is 0; it must be at least 1"),
        (lambda: sd.record("zoo:target", (), "t"), "give --prompts"),
        (lambda: sd.replay("t", "zoo:2x192", lookahead=33), "--lookahead is 33; it must be 1 to 32"),
        (lambda: sd.profile("zoo:target", (), "p"), "there is nothing to time"),
        (lambda: sd.study("zoo:target", "zoo:2x192", prompts="zoo", out="r", lookaheads=[0]), "--lookaheads is 0"),
        (lambda: sd.open_run("nowhere"), "there is no such folder"),
        (lambda: sd.report([]), "no run is named"),
        (lambda: sd.bench("http://x", "m", "zoo", "s", concurrency=()), "--concurrency is empty"),
    ],
)
def test_wrong_input_says_what_to_do(call, message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=re.escape(message)):
        call()
    assert not list(tmp_path.iterdir())
