"""Records of a study for the report: replays of every proposer, and the sources of tokens."""

import json
from itertools import groupby
from pathlib import Path

import pytest
from tokenizer_kinds import tokenizer_of

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.models.synthetic import make_pair
from shallowdraft.records import Records
from shallowdraft.runs.replays import KIND as REPLAYS
from shallowdraft.runs.tokens import KIND
from shallowdraft.runs.trace import Output
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying.tokens import _pieces, _spelled, sources


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny study of a draft and of n-grams."""
    folder = tmp_path_factory.mktemp("inside")
    make_pair(parse_shape("2x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.7).save(folder)
    lines = [json.dumps({"prompt": f"Prompt <b>{number}</b>", "id": str(number)}) for number in range(5)]
    (folder / "few.jsonl").write_text("\n".join(lines) + "\n")
    command = ["study", "--target", str(folder / "target"), "--drafts", str(folder / "draft"), "--rounds", "1"]
    command += ["--prompts", str(folder / "few.jsonl"), "--lookaheads", "1:3", "--max-new-tokens", "16", "--live", "1"]
    assert main([*command, "--drafters", "model", "ngram", "--out", str(folder / "run"), "--json"]) == 0
    return folder / "run"


def test_sources_follow_the_iterations():
    came_from = sources([(2, 3), (3, 3), (0, 0), (0, 3), (2, 3)], 13)
    assert "".join(source[0] for source in came_from) == "oaacaaabocaac"
    assert sources([(2, 3)], 3) == ["own", "accepted", "accepted"]  # the output ends within an iteration


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_pieces_and_proposals_have_the_space_before_them(kind: str):
    target = sd.Model("m", None, tokenizer_of(kind))
    lily, she, was = (target.tokenizer.encode(text, add_special_tokens=False) for text in ("Lily.", "She", "was"))
    pieces = _pieces(target, Output("", "", 0, lily, [*she, *was]))
    assert "".join(pieces) == " She was"
    assert _spelled(target, lily, she[0]) == pieces[0]


def test_a_replay_is_kept_whole(run: Path):
    rows = list(Records.read(run / "replays.jsonl", REPLAYS))
    assert [row["drafter"] for row in rows] == ["model", "ngram"]
    draft = rows[0]
    assert draft["layers"] == 1
    assert draft["parameters"] > 0
    assert {"1", "2", "3"} <= draft["tar"].keys()
    assert len(draft["prompts"]) == 5
    assert len(draft["acceptance_by_position"]) == 3


def test_curves_have_every_lookahead(run: Path):
    rows = json.loads((run / "study.json").read_text())["rows"]
    assert [[prediction["lookahead"] for prediction in row["curve"]] for row in rows] == [[1, 2, 3]] * 2
    for prediction in (prediction for row in rows for prediction in row["curve"]):
        assert prediction["iteration"]["verify_s"] > 0
        assert prediction["plain_s"] > 0


def test_the_inside_agrees_with_the_trace_and_the_replay(run: Path):
    outputs = {row["id"]: row["output"] for row in Records.read(run / "trace.jsonl", "trace")}
    for row in Records.read(run / "tokens.jsonl", KIND):
        came_from = [source for _, source, _ in row["tokens"]]
        assert len(came_from) == len(outputs[row["id"]])
        longest = max([len(list(of)) for source, of in groupby(came_from) if source == "accepted"], default=0)
        assert longest <= row["lookahead"]
        ends = sum(source != "accepted" for source in came_from[1:]) + (came_from[-1] == "accepted")
        assert (len(came_from) - 1) / ends == pytest.approx(row["tar"])
        replaced = [proposal for _, source, proposal in row["tokens"] if source == "correction"]
        assert all(isinstance(text, str) for text in replaced) == (row["drafter"] == "model" or not replaced)


def test_a_report_is_made_of_it(run: Path, capsys):
    assert main(["report", str(run)]) == 0
    html = Path(capsys.readouterr().out.removeprefix("the report is in ").strip()).read_text()
    assert "Prompt &lt;b&gt;" in html
    for part in ("speed-up", "prediction", "throughput", "sets", "lookahead", "position", "required", "what-if"):
        assert f'data-chart="{part}"' in html
