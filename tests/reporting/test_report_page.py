"""Tests of the page: whole runs, runs with parts missing, hostile text, several runs, bad input."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from made_run import make_run, make_server

from shallowdraft.cli import main
from shallowdraft.commands.study import StudyCommand
from shallowdraft.display.tabular import format_cell
from shallowdraft.errors import RecordError
from shallowdraft.records import Records
from shallowdraft.reporting.figure_files import markdown
from shallowdraft.reporting.figures import Table
from shallowdraft.reporting.labels import short_labels
from shallowdraft.reporting.page import make_page, render
from shallowdraft.reporting.reading import read_run
from shallowdraft.reporting.sections.improvement import lags
from shallowdraft.runs.servers import KIND

CHARTS = {
    "speed-up", "prediction", "throughput", "sets", "lookahead", "position", "time", "waterfall", "required", "extra",
    "parity", "what-if",
}  # fmt: skip
OF_SEVERAL_DRAFTS = {"extra", "parity"}
ACCURACY = {
    "drafts": [
        {
            "name": f"draft {number}",
            "tar": 1.5 + number,
            "sets": {"mmlu": {"accuracy": {"value": 0.3, "interval": [0.2, 0.4], "chance": 0.25}, "loss": 2.0}},
        }
        for number in range(3)
    ],
    "claims": {"mmlu": {"of_accuracy": 0.5, "statement": "accuracy ranks drafts as TAR does to +0.50"}},
}


def drawn(folder: Path) -> set[str]:
    """Return the ids of the charts on a run's page, after compiling each."""
    figures = make_page([read_run(folder)]).figures
    for figure in figures:
        vl_convert.vegalite_to_vega(figure.spec())
    return {figure.id for figure in figures}


def test_a_run_with_one_draft(tmp_path: Path):
    run = make_run(tmp_path / "run")
    assert drawn(run) == CHARTS - OF_SEVERAL_DRAFTS
    html = render(make_page([read_run(run)]))
    assert "There is only one proposer, so none has to catch up" in html
    assert "Speculation pays: draft-0 at lookahead 2 is 1.38x as fast" in html
    assert "identical to plain decoding in all 6 live runs" in html
    assert "No accuracy was measured; run <code>shallowdraft accuracy --drafts made/draft-0" in html
    assert "No shapes were timed" in html
    assert "a processor, threads: 2" in html
    assert "http://" not in html.split("<script>")[0]


def test_twenty_drafts_on_six_sets_at_twelve_lookaheads_are_no_large_file(tmp_path: Path):
    sets = [f"set {number}" for number in range(6)]
    run = make_run(tmp_path / "run", 20, sets=sets, lookaheads=12, shapes=True)
    (run / "accuracy.json").write_text(json.dumps(ACCURACY))
    assert drawn(run) == CHARTS | {"latency", "accuracy"}
    html = render(make_page([read_run(run)]))
    assert len(html.encode()) < 5e6
    assert "At width 128, a draft step takes 3.0 times as long with 4 layers as with 1." in html
    assert "The rank correlation of accuracy with TAR is +0.50 on mmlu" in html


@pytest.mark.parametrize(
    ("missing", "gone", "said"),
    [
        (["replays"], {"sets", "position"}, "The run has no replays"),
        (["live"], set(), "not compared: nothing was run live"),
        (["tokens"], set(), "Missing: outputs token by token."),
        (["profile", "live"], set(), "unknown: nothing was timed"),
        (
            ["study"],
            CHARTS - {"sets", "position"},
            "Missing: speed-ups, predicted against measured.</b> The study has not finished",
        ),
        (["study", "replays", "profile", "live", "tokens"], CHARTS, "The study has not finished"),
    ],
)
def test_a_missing_part_is_named_and_the_rest_is_shown(tmp_path: Path, missing, gone, said):
    run = make_run(tmp_path / "run", 2)
    for name in missing:
        (run / f"{name}.json{'' if name == 'study' else 'l'}").unlink()
    assert drawn(run) == CHARTS - gone
    assert said in render(make_page([read_run(run)]))


def test_a_study_without_live_runs_or_curves(tmp_path: Path):
    run = make_run(tmp_path / "run", 2)
    study = json.loads((run / "study.json").read_text())
    for row in study["rows"]:
        row |= {"live": None, "curve": []}
    (run / "study.json").write_text(json.dumps(study))
    assert drawn(run) == CHARTS - {"prediction", "lookahead", "what-if"}
    html = render(make_page([read_run(run)]))
    assert "run the study again with --live 3" in html
    assert "no predictions at every lookahead" in html


def test_runs_of_earlier_versions_are_read_or_refused_with_what_to_do(tmp_path: Path):
    run = make_run(tmp_path / "run", 2)
    text = (run / "study.json").read_text()
    entries = read_run(run).entries
    assert all(entry.prediction and entry.curve for entry in entries)
    (run / "study.json").write_text(text.replace('"schema": 2,', ""))
    with pytest.raises(RecordError, match=r"another version of this package; run the study again, it reuses"):
        read_run(run)
    (run / "study.json").write_text(text.replace('"other_s"', '"rest_s"'))
    with pytest.raises(RecordError, match=r"other_s is missing; .*run the study again"):
        read_run(run)
    (run / "study.json").write_text(text)
    samples = (run / "profile.jsonl").read_text()
    (run / "profile.jsonl").write_text(samples.replace('"verify_s"', '"target_s"').replace('"other_s"', '"rest_s"'))
    (run / "tokens.jsonl").rename(run / "inside.jsonl")
    assert (read_run(run).entries, len(read_run(run).texts)) == (entries, 12)


def test_a_run_that_was_killed_while_it_wrote(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (run / "study.json").unlink()
    with (run / "live.jsonl").open("a") as file:
        file.write('{"set": "zo')
    (run / "tokens.jsonl").write_text("")
    (run / "profile.jsonl").write_text('{"kind": "pro')
    assert "The study has not finished" in render(make_page([read_run(run)]))


def test_text_is_shown_and_never_run(tmp_path: Path):
    evil = "</script><script>alert(1)</script>"
    run = make_run(tmp_path / "run", 2, prompt=evil, name=f"x{evil}", sets=(evil,))
    study = json.loads((run / "study.json").read_text())
    (run / "study.json").write_text(json.dumps(study | {"failed": {evil: evil}}))
    html = render(make_page([read_run(run)]))
    assert "<script>alert" not in html
    assert html.count("<script") == html.count("</script>") == 3
    assert "&lt;script&gt;alert(1)" in html
    assert "instead of “ &lt;b&gt;sits”" in html


def test_two_runs(tmp_path: Path, capsys):
    first, second = make_run(tmp_path / "one" / "run", 2), make_run(tmp_path / "other" / "run", 3)
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "both.html")]) == 0
    assert "both.html" in capsys.readouterr().out
    html = (tmp_path / "both.html").read_text()
    assert "The fastest in one/run: draft-1 at lookahead 2" in html
    assert "How does TAR depend on the target" not in html
    assert html.count("Speculation pays: draft") == 2
    (second / "study.json").unlink()
    assert "The study has not finished" in render(make_page([read_run(first), read_run(second)]))


def test_runs_of_several_targets(tmp_path: Path):
    """Proposers with the same end of their path are told apart; an unfinished run, or one without replays, is named."""
    first = make_run(tmp_path / "one", 2, sets=("zoo", "arena"), lookaheads=6)
    second = make_run(tmp_path / "two", 3, sets=("zoo", "arena"), lookaheads=4, target="made/other")
    third = make_run(tmp_path / "three", 1, name="elsewhere/draft", target="made/other")
    page = make_page([read_run(folder) for folder in (first, second, third)])
    compared, across = page.figures
    assert compared.table.columns[1:4] == ("speed-up, one", "speed-up, two", "speed-up, three")
    assert [row[0] for row in compared.table.rows] == [
        "made/draft-1", "made/draft-0", "made/draft-2", "elsewhere/draft-0",
    ]  # fmt: skip
    assert across.table.columns == ("proposer", "run", "target", "prompt set", "size", "TAR", "95 % from", "95 % to")
    rows = {(row[0], row[2], row[3]): row[4:6] for row in across.table.rows if row[1] != "three"}
    assert rows["made/draft-0", "made/target", "zoo"] == rows["made/draft-0", "made/other", "zoo"] == (4, 1.9375)
    assert rows["made/draft-0", "made/other", "arena"][1] == pytest.approx(0.97 * 1.9375)
    assert ("elsewhere/draft-0", "three", "made/other") in {row[:3] for row in across.table.rows}
    assert across.finding.endswith(
        "TAR of made/draft-1 by prompt set: 2.11 to 2.17 with target, 2.11 to 2.17 with other (two)."
    )
    for figure in page.figures:
        vl_convert.vegalite_to_vega(figure.spec())
    (second / "study.json").unlink()
    (third / "replays.jsonl").unlink()
    html = render(make_page([read_run(folder) for folder in (first, second, third)]))
    assert "Missing: speed-ups of two.</b> The study has not finished" in html
    assert "Missing: TAR of three.</b> The run has no replays" in html
    assert "The fastest in one:" in html


@pytest.mark.parametrize(("folders", "said"), [([], "no run is named"), (["run", "run/../run"], "named twice")])
def test_which_runs_is_said(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, folders: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert main(["report", *folders]) == 2
    assert said in capsys.readouterr().err


def test_what_was_measured_and_what_was_not_are_told_apart(tmp_path: Path):
    """The fastest proposer that ran live is slower than others were predicted to be."""
    folder = make_run(tmp_path / "run", 5)
    study = json.loads((folder / "study.json").read_text())
    for row in study["rows"]:
        row["live"] = row["live"] and row["live"] | {"speed_up": 1.1, "interval": [1.0, 1.2]}
    (folder / "study.json").write_text(json.dumps(study))
    findings = {figure.id: figure.finding for figure in make_page([read_run(folder)]).figures}
    assert findings["speed-up"].endswith(
        "(95\N{NO-BREAK SPACE}%: 1.00 to 1.20); draft-1, not run live, may be faster: 1.42 times, predicted."
    )
    assert findings["throughput"].startswith(
        "The proposer with the highest TAR is not the fastest: draft-4 has TAR 2.14 and 220 tokens per second; draft-3"
    )


def test_prompts_that_were_left_out_are_named(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    assert make_page([read_run(folder)]).warnings == []
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"stalled": ["zoo books-4"]}))
    run = read_run(folder)
    said = (
        f"Measured speed-ups leave out zoo books-4, where the machine stalled. To measure again, remove {folder}/live."
    )
    assert said in render(make_page([run]))
    assert f"run: {said}" in render(make_page([run, read_run(make_run(tmp_path / "calm"))]))


def test_what_was_disturbed_is_named_and_wins_nothing(tmp_path: Path):
    folder = make_run(tmp_path / "run", 2)
    study = json.loads((folder / "study.json").read_text())
    measured, disturbed = sorted(study["rows"], key=lambda row: row["prediction"]["speed_up"])
    measured["live"] = study["rows"][0]["live"] | {"speed_up": 1.1, "interval": [1.0, 1.2]}
    disturbed |= {"live": None, "impossible": disturbed["live"] | {"speed_up": 3.0, "tar": 2.0}}
    (folder / "study.json").write_text(json.dumps(study | {"rows": [measured, disturbed]}))
    page = make_page([read_run(folder)])
    again = f"To measure again, remove {folder}/live.jsonl and run the study."
    (warning,) = page.warnings
    assert warning.startswith(f"{disturbed['name']}: measured 3.000x (")
    assert "above its TAR of 2.000 after all runs: impossible" in warning
    assert warning.endswith(again)
    speed = next(figure.finding for figure in page.figures if figure.id == "speed-up")
    assert f" at lookahead {measured['lookahead']} is fastest: 1.10 times plain decoding, measured" in speed
    assert "disturbed when it was measured, may be faster: 1.42 times, predicted." in speed


def test_a_server_is_compared_with_times_of_one_machine(tmp_path: Path):
    """The prediction beside a server is for the machine's speed while profiling, not during the live runs."""
    run = make_run(tmp_path / "run")
    study = json.loads((run / "study.json").read_text())
    (row,) = study["rows"]
    row["prediction"]["plain_s"] *= 2
    (run / "study.json").write_text(json.dumps(study))
    make_server(run / "plain.jsonl")
    make_server(run / "drafted.jsonl", 1.5, 0.5, draft=row["draft"], lookahead=row["lookahead"])
    (gains,) = [figure for figure in make_page([read_run(run)]).figures if figure.id == "gains"]
    (prediction,) = [point for point in row["curve"] if point["lookahead"] == row["lookahead"]]
    expected = prediction["tar"] * prediction["plain_s"] / sum(prediction["iteration"].values())
    assert gains.table.rows[0][7] == pytest.approx(expected)


def test_a_server_beside_the_prediction(tmp_path: Path):
    run = make_run(tmp_path / "run", 2, sets=["zoo", "arena"])
    html = render(make_page([read_run(run)]))
    assert "Missing: speed-ups of a server.</b> No server was measured" in html
    (row,) = [entry for entry in read_run(run).entries if entry.draft == "made/draft-1"]
    zoo, arena = (row.sets[name].tar[2] for name in ("zoo", "arena"))
    tar = 2 / (1 / zoo + 1 / arena)  # as many tokens of each set
    make_server(run / "plain.jsonl", sets=["zoo", "arena"])
    assert "No server was measured both with and without a draft" in render(make_page([read_run(run)]))
    drafting = {"draft": "made/draft-1", "lookahead": 2}
    make_server(run / "drafted.jsonl", 1.02 * tar, 0.5, sets=["zoo", "arena"], **drafting)
    make_server(run / "other.jsonl", 3.0, 0.25, **{"temperature": 1.0} | drafting)  # other requests
    make_server(run / "unknown.jsonl", 1.5, 0.8, draft="no such", lookahead=2)
    Records.open(run / "a-plain.jsonl", KIND, {"max_tokens": 20, "temperature": 0.0, "chat": False}, engine="made")
    (run / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    assert drawn(run) == CHARTS | {"gains", "servers"}
    page = make_page([read_run(run)])
    (gains,) = [figure for figure in page.figures if figure.id == "gains"]
    assert gains.finding == (
        "drafted at concurrency 1 is 2.00 times as fast as without a draft (95\N{NO-BREAK SPACE}%: 2.00 to 2.00); "
        "TAR on servers is at most 2\N{NO-BREAK SPACE}% off the replayed TAR."
    )
    rows = {(line[0], line[1]): line for line in gains.table.rows}
    assert set(rows) == {("drafted", 1), ("drafted", 2), ("unknown", 1)}  # two at once: of other prompts
    assert gains.note.endswith(
        "Left out, as no server without a draft answered the same requests: "
        "other at concurrency 1; other at concurrency 2; unknown at concurrency 2."
    )
    predicted = next(prediction for prediction in row.curve if prediction.lookahead == 2)
    assert rows["drafted", 1][7] == pytest.approx(tar / predicted.iteration.total_s * predicted.plain_s)
    assert rows["drafted", 1][8:] == pytest.approx((1.02 * tar, tar))
    assert rows["unknown", 1][9] is None
    (speeds,) = [figure for figure in page.figures if figure.id == "servers"]
    assert speeds.finding == "drafted is fastest: 78 tokens per second at concurrency 2."
    assert {line[0] for line in speeds.table.rows} == {"plain", "drafted"}
    assert speeds.note.endswith(
        "Left out, as they were sent other requests: other (other prompts, temperature 1 instead of 0); "
        "unknown (other prompts). Not predicted, as the study has no such draft: unknown (no such)."
    )


def test_servers_that_were_asked_alike_are_shown_together(tmp_path: Path):
    run = make_run(tmp_path / "run")
    for name, options in (("a", {}), ("b", {"draft": "made/draft-0", "lookahead": 2}), ("c", {"max_tokens": 64})):
        make_server(run / f"{name}.jsonl", **options)
    (speeds,) = [figure for figure in make_page([read_run(run)]).figures if figure.id == "servers"]
    assert {line[0] for line in speeds.table.rows} == {"a", "b"}
    assert speeds.note.endswith("they were sent other requests: c (64 tokens instead of 20).")
    (run / "c.jsonl").unlink()
    (speeds,) = [figure for figure in make_page([read_run(run)]).figures if figure.id == "servers"]
    assert "Left out" not in speeds.note


def test_what_it_takes_to_catch_up_is_the_papers(tmp_path: Path):
    """Extra TAR and parity latency follow the paper's formulas; the last proposer's tokens are hardly ever accepted."""
    folder = make_run(tmp_path / "run", 20)
    study = json.loads((folder / "study.json").read_text())
    study["rows"][-1]["prediction"]["tar"] = 1.05
    (folder / "study.json").write_text(json.dumps(study))
    run = read_run(folder)
    winner = run.predicted[0].best
    candidates = zip(run.predicted[1:], lags(run.predicted)[1:], strict=True)
    for entry, lag in candidates:
        verify_s = entry.best.iteration.verify_s + entry.best.iteration.other_s
        per_token_s = winner.iteration.total_s / winner.tar
        assert lag.extra_tar == pytest.approx((verify_s + entry.best.iteration.draft_s) / per_token_s - entry.best.tar)
        assert lag.parity_s == pytest.approx(entry.best.tar * per_token_s - verify_s)
    figures = {figure.id: figure for figure in make_page([run]).figures}
    assert figures["extra"].finding.startswith("To be as fast as draft-3, draft-4 needs 0.01 more tokens per iteration")
    assert figures["parity"].finding == (
        "To be as fast as draft-3, draft-4 must draft for 1.74 ms instead of 1.76 ms per iteration; "
        "1 of 19 others cannot be as fast, even if drafting took no time."
    )


@pytest.mark.parametrize("breakage", ["nowhere", "empty", "broken", "lacking", "list", "accuracy"])
def test_bad_input_says_what_to_do_in_one_line(tmp_path: Path, capsys, breakage: str):
    run = tmp_path / breakage
    if breakage != "nowhere":
        run.mkdir()
    contents = {"broken": "{", "lacking": '{"rows": [{}]}', "list": "[]"}
    if breakage in contents:
        (run / "study.json").write_text(contents[breakage])
    if breakage == "accuracy":
        (make_run(run / "run") / "accuracy.json").write_text("{}")
        run = run / "run"
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    said = {
        "nowhere": "there is no such folder",
        "empty": "holds no records of a study",
        "lacking": "run the study again",
        "accuracy": "not what shallowdraft accuracy writes",
    }
    assert said.get(breakage, "run the study again") in error
    assert error.count("\n") == 1


def test_figures_are_written_for_papers(tmp_path: Path):
    run, folder = make_run(tmp_path / "run", 2), tmp_path / "figures"
    assert main(["report", str(run), "--figures", str(folder)]) == 0
    assert (run / "report.html").is_file()
    assert {file.name for file in folder.iterdir()} == {
        f"{chart}.{ending}" for chart in CHARTS for ending in ("svg", "png", "csv", "md")
    }
    assert (folder / "speed-up.csv").read_text().startswith("proposer,size,predicted speed-up")
    assert (folder / "time.png").read_bytes().startswith(b"\x89PNG")


def test_no_model_is_loaded(tmp_path: Path):
    run = make_run(tmp_path / "run")
    script = f"""
import sys
from shallowdraft.cli import main
from shallowdraft.commands.study import StudyCommand
from shallowdraft.errors import RecordError
assert main(["report", {str(run)!r}]) == 0
assert "torch" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_what_to_install_is_said(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "shallowdraft.reporting.page", None)
    assert main(["report", str(make_run(tmp_path / "run"))]) == 2
    assert "pip install 'shallowdraft[report]'" in capsys.readouterr().err


def test_the_demo_ends_with_a_report(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(StudyCommand, "run", lambda _: 0)
    assert main(["demo", "--out", str(run)]) == 0
    assert f"the report is in {run / 'report.html'}" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "shallowdraft.reporting.page", None)
    assert main(["demo", "--out", str(run)]) == 0
    assert "pip install 'shallowdraft[report]'" in capsys.readouterr().out


def test_labels_tell_drafts_apart():
    named = [("model", "a/b/draft", ""), ("tree", "a/c/draft", ""), ("ngram", "n-gram", "n-gram")]
    assert short_labels(named) == ["b/draft", "tree c/draft", "n-gram"]
    assert short_labels([("model", "zoo:4x128", "")]) == ["zoo:4x128"]
    assert len(short_labels([("model", "x" * 99, "")])[0]) == 22
    assert len(set(short_labels([("model", first + "x" * 99, "") for first in "ab"]))) == 2


def test_tables():
    assert [format_cell(cell) for cell in (None, "a", 1234, 1234.5, 12.34, 1.234, 0.01234)] == [
        "–", "a", "1,234", "1,234", "12.3", "1.23", "0.0123",
    ]  # fmt: skip
    assert markdown(Table(("a|b", "c"), [(1, 2.0)])) == "| a\\|b | c |\n| --- | --- |\n| 1 | 2.00 |\n"


@pytest.mark.slow
def test_whatever_field_is_missing_the_page_is_made_or_it_is_said(tmp_path: Path):
    """Every field of every kind of record, one at a time."""
    run = make_run(tmp_path / "run", 2, shapes=True)
    (run / "accuracy.json").write_text(json.dumps(ACCURACY))
    said = 0
    for file in sorted(run.iterdir()):
        whole = file.read_text()
        lines = whole.splitlines() if file.suffix == ".jsonl" else [whole]
        for at, line in enumerate(lines[:2]):
            for lacking in lacking_one(json.loads(line)):
                file.write_text("\n".join([*lines[:at], json.dumps(lacking), *lines[at + 1 :], ""]))
                try:
                    make_page([read_run(run)])
                except RecordError:
                    said += 1
        file.write_text(whole)
    assert said > 20


def lacking_one(value: Any) -> Iterator[Any]:
    """Yield the value without one field, for each field at any depth; of lists, in the first item only."""
    if isinstance(value, dict):
        for name in value:
            yield {other: inner for other, inner in value.items() if other != name}
            yield from ({**value, name: inner} for inner in lacking_one(value[name]))
    elif isinstance(value, list) and value:
        yield from ([inner, *value[1:]] for inner in lacking_one(value[0]))
