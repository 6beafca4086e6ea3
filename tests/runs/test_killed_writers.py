"""Files of a run after their writer was killed, at any byte: all whole records are kept, and writing goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shallowdraft.cost import Iteration, Prediction
from shallowdraft.records import Records
from shallowdraft.replaying import skip
from shallowdraft.replaying.skip import replay_skip
from shallowdraft.runs import profile, servers
from shallowdraft.runs.accuracy import (
    AccuracyResult,
    DraftScores,
    ShareCorrect,
    TaskScore,
    read_accuracy,
    write_accuracy,
)
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import LiveRun, append_live_runs, open_live_runs, read_live_runs
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.part_times import Point
from shallowdraft.runs.profile import open_profile, point_fields, read_profile, samples_taken
from shallowdraft.runs.replays import ReplayRecord, read_replays, write_replays
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.search import open_search, read_search
from shallowdraft.runs.servers import open_requests, read_requests
from shallowdraft.runs.study import StudyResult, StudyRow, read_study, write_study
from shallowdraft.runs.tokens import TokenSources, read_tokens, write_tokens
from shallowdraft.runs.trace import Output, Trace, append_outputs, open_trace, read_trace

STATE = MachineState(0.005)
ABOUT = {"target": "tärget", "target_digest": "0123"}
TARGET: Any = SimpleNamespace(name="tärget", digest="0123")
SAMPLES = 25  # bytes at which a line is cut


@dataclass(frozen=True)
class Kind:
    """A kind of record, written and read by the functions of its module."""

    write: Callable[[Path, int], None]
    """Opens the file and writes one record, named after a number, unless the file has it."""
    read: Callable[[Path], list[str]]
    """Reads the names of all records."""


def name(number: int) -> str:
    return f"é{number}"  # two bytes for one character: a cut may lie between them


def output(number: int) -> Output:
    return Output(name(number), "zoo", 0, [1, 2], [3, 4, 5])


def write_trace(path: Path, number: int) -> None:
    vocabulary = {"size": 8, "tokens": None, "digest": None, "added": {}}
    file = open_trace(path, "tärget", "0123", vocabulary, Sampling(), {"max_new_tokens": 3})
    append_outputs(file, [output(number)])


def write_sample(path: Path, number: int) -> None:
    point = Point(Candidate(name(number), 2), 64, 1)
    times = {"plain_s": 1.0, "draft_s": 0.1, "verify_s": 1.2, "other_s": 0.1, "handover_s": 0.0, "arithmetic_s": 0.0}
    file = open_profile(path, ABOUT)
    if (point, 0, 0) not in samples_taken(file):
        file.append(point_fields(point) | times | {"round": 0, "turn": 0})


def write_plan(path: Path, number: int) -> None:
    points = [Point(Candidate(name(number), lookahead), 64, 1) for lookahead in (1, 2)]
    profile.plan(open_profile(path, ABOUT), points, rounds=1, turns=3)


def read_plans(path: Path) -> list[str]:
    return [row[profile.PLANNED][0]["draft"] for row in Records.read(path, profile.KIND, profile.PlanFields)]


def write_live(path: Path, number: int) -> None:
    run = LiveRun("zoo", name(number), "", 0, Candidate("d", 2), 20, 10, 0.1, 0.02, 0.07, None, True, (STATE, STATE))
    append_live_runs(open_live_runs(path, ABOUT), [run])


def write_sources(path: Path, number: int) -> None:
    tokens = (("Thé", "own", None), (" cat", "correction", " dog"))
    row = TokenSources("zoo", name(number), 0, "d", 2, "model", (), "0123", "float32", 1.5, "Once", tokens)
    write_tokens(path, ABOUT, [row])


def write_skip_replay(path: Path, number: int) -> None:
    trace = Trace("tärget", {"size": 8}, Sampling(), [output(earlier) for earlier in range(number + 1)], "0123")
    replay_skip(TARGET, [1, 3], trace, [1, 2], path)


def read_skip_replays(path: Path) -> list[str]:
    return [row["id"] for row in Records.read(path, skip.KIND)]


def write_request(path: Path, number: int) -> None:
    settings = {"url": "http://é", "model": "m", "max_tokens": 20, "temperature": 0.0, "chat": False}
    file = Records.open(path, servers.KIND, settings)
    place = {"concurrency": 1, "in_run": 2, "round": 0, "set": "zoo", "id": name(number)}
    times = {"arrivals_s": [0.1, 0.2], "total_s": 0.2, "share_s": 0.2}
    file.append(place | times | {"tokens": 2, "speculation": None}, sync=False)
    open_requests(path)


def write_judgement(path: Path, number: int) -> None:
    figures = {"lookahead": 2, "tar": 1.5, "speed_up": 1.2, "tokens_per_s": 240.0}
    open_search(path, ABOUT).append({"candidate": name(number), "rung": 0, "tokens": 1000} | figures)


KINDS = {
    "trace": Kind(write_trace, lambda path: [recorded.id for recorded in read_trace(path).outputs]),
    "profile, samples": Kind(
        write_sample, lambda path: [point.candidate.draft for point in read_profile(path).samples]
    ),
    "profile, plans": Kind(write_plan, read_plans),
    "replays": Kind(
        lambda path, number: write_replays(path, ABOUT, [ReplayRecord(name(number), "model", name(number))]),
        lambda path: [replay.draft for replay in read_replays(path)],
    ),
    "live runs": Kind(write_live, lambda path: [run.id for run in read_live_runs(path)]),
    "tokens": Kind(write_sources, lambda path: [row.id for row in read_tokens(path)]),
    "skip replays": Kind(write_skip_replay, read_skip_replays),
    "servers": Kind(write_request, lambda path: [row["id"] for row in read_requests(path)]),
    "search": Kind(write_judgement, lambda path: [row["candidate"] for row in read_search(path)]),
}


@pytest.fixture(autouse=True)
def _all_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two right tokens at every position, without a model."""
    monkeypatch.setattr(skip, "drafted_right", lambda target, skips, outputs, longest: [[2, 2] for _ in outputs])


def cuts(start: int, end: int) -> list[int]:
    """Return bytes from start to end, spread evenly, with both ends and their neighbours."""
    step = max(1, (end - start) // SAMPLES)
    return sorted({start, start + 1, *range(start, end, step), end - 1})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cut_last_line_is_dropped_and_written_again(kind: Kind, tmp_path: Path):
    path = tmp_path / "file.jsonl"
    for number in (0, 1):
        kind.write(path, number)
    whole = path.read_bytes()
    assert kind.read(path) == [name(0), name(1)]
    last_line = whole[:-1].rfind(b"\n") + 1
    assert "é".encode() in whole[last_line:]
    within_character = whole.rfind("é".encode()) + 1
    for cut in {*cuts(last_line, len(whole)), within_character}:
        path.write_bytes(whole[:cut])
        assert kind.read(path) == [name(0)]
        kind.write(path, 1)
        assert path.read_bytes() == whole, f"cut at byte {cut} of {len(whole)}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cut_first_line_is_written_again(kind: Kind, tmp_path: Path):
    path = tmp_path / "file.jsonl"
    kind.write(path, 0)
    header = path.read_bytes().index(b"\n") + 1
    whole = path.read_bytes()
    for cut in cuts(0, header):
        path.write_bytes(whole[:cut])
        kind.write(path, 0)
        assert kind.read(path) == [name(0)], f"cut at byte {cut} of {header}"


def study(speed_up: float) -> StudyResult:
    prediction = Prediction(2, 1.5, Iteration(0.001, 0.005, 0.0002), 0.005 * speed_up)
    candidate = Candidate("dräft", 2, digest="0123", dtype="float32")
    return StudyResult((StudyRow("dräft", candidate, "1x64/2h/96", prediction, (1.0, 1.3)),), 200.0)


def accuracy(loss: float) -> AccuracyResult:
    task = TaskScore(ShareCorrect(0.5, (0.4, 0.6), 0.25), loss, ShareCorrect(0.5, (0.4, 0.6), 0.25))
    return AccuracyResult((DraftScores("dräft", 1.5, {"mmlu": task}, "0123"),))


@pytest.mark.parametrize(
    ("write", "read", "old", "new"),
    [(write_study, read_study, study(1.0), study(1.1)), (write_accuracy, read_accuracy, accuracy(2.0), accuracy(1.0))],
    ids=["study.json", "accuracy.json"],
)
def test_an_interrupted_write_leaves_the_file_as_it_was(write, read, old, new, tmp_path: Path, monkeypatch):
    """The partial file may hold any part of the text, or all of it without having replaced the other."""
    path = tmp_path / "file.json"
    write(path, old)
    assert read(path) == old
    size = len(path.read_text(encoding="utf-8"))
    for cut in cuts(0, size):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", cut_writer(cut))
            with pytest.raises(KeyboardInterrupt):
                write(path, new)
        assert read(path) == old
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(path, new)
    assert read(path) == old
    write(path, new)
    assert read(path) == new != old
    assert list(tmp_path.iterdir()) == [path]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def cut_writer(cut: int) -> Callable[..., None]:
    """Return a `Path.write_text` that is interrupted after some characters."""

    def write_some(path: Path, text: str, encoding: str) -> None:
        with path.open("w", encoding=encoding) as file:
            file.write(text[:cut])
        raise KeyboardInterrupt

    return write_some
