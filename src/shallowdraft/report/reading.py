"""Reading a run: whatever a study's folder holds, with a word about what is not as it should be."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import UnionType

from shallowdraft.bench.levels import KIND, BenchSettings, read_requests, speed_up, summarise
from shallowdraft.cost import Iteration, Prediction, Silence
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.files import from_record, parse_json, read_json, read_lines, require_fields
from shallowdraft.records import RANDOM, Record, Records
from shallowdraft.report import fields
from shallowdraft.report.run import Accuracy, Asked, Entry, Live, Run, Score, Server, Step, Tars, Text, label
from shallowdraft.shapes.notation import parse_shape

FILES = {"trace": "trace", "replays": "replays", "profile": "profile", "live": "live runs", "inside": "inside"}
"""Names of files and kinds of records."""
FIELDS: dict[str, type | UnionType] = {
    "replays": fields.Replay,
    "profile": fields.Sample | fields.Plan,
    "live": fields.LiveRun,
    "inside": fields.Inside,
}


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder; name the one that was given to study --out")
    files = {name: _read(folder / f"{name}.jsonl", kind, FIELDS.get(name)) for name, kind in FILES.items()}
    found = {name: file for name, file in files.items() if file}
    study = _study(folder / "study.json")
    if not found and study is None:
        raise OptionError(f"{folder} holds no records of a study; make them with shallowdraft study --out {folder}")
    try:
        return _run(folder, found, study)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: its records lack {error}; run the study again, it reuses the others") from None


def _run(folder: Path, found: dict[str, Records], study: Record | None) -> Run:
    headers = [file.header for file in found.values()]
    times = [header.get("provenance", {}).get("time", "") for header in headers]
    texts = _latest(found.get("inside"), "set", "id", "sample", "drafter", "draft")
    return Run(
        folder,
        {name: value for header in headers for name, value in header.get("about", {}).items()},
        max(times, default="") or "unknown",
        _entries(study, _latest(found.get("replays"), "drafter", "draft")),
        verdict=study["verdict"] if study else None,
        plain_tokens_per_s=study["plain_tokens_per_s"] if study else None,
        failed=study.get("failed", {}) if study else {},
        stalled=study.get("stalled", []) if study else [],
        outputs=[None if row["tie"] and row["differs"] else row["tie"] for row in found.get("live", ())],
        texts=[_text(row) for row in texts],
        steps=_steps(found.get("profile", ())),
        accuracy=_accuracy(folder / "accuracy.json"),
        servers=_servers(folder),
    )


def _read(path: Path, kind: str, row: type | UnionType | None) -> Records | None:
    """None where there is no file, or a run was killed before its first line was whole."""
    begun = path.exists() and next(read_lines(path, RecordError, ended=True), None)
    return Records.read(path, kind, row) if begun else None


def _latest(file: Records | None, *names: str) -> list[Record]:
    return list(file.latest(*names).values()) if file else []


def _object(path: Path, wanted: type) -> Record | None:
    if not path.exists():
        return None
    found = read_json(path, RecordError, "run the command again that wrote it")
    require_fields(found, wanted, str(path), RecordError)
    return found


def _study(path: Path) -> Record | None:
    try:
        return _object(path, fields.Study)
    except RecordError as error:
        raise RecordError(f"{error}; run the study again, it reuses the others") from None


def _accuracy(path: Path) -> Accuracy | None:
    try:
        found = _object(path, fields.Accuracy)
    except RecordError as error:
        raise RecordError(f"{error}; this is not what shallowdraft accuracy --json prints, write it again") from None
    if found is None:
        return None
    claims = found["claims"]
    return Accuracy(
        [_score(draft, *one) for draft in found["drafts"] for one in draft["sets"].items() if draft["tar"]],
        {name: claim["of_accuracy"] for name, claim in claims.items()},
        {name: claim["statement"] for name, claim in claims.items()},
    )


def _score(draft: Record, task: str, score: Record) -> Score:
    low, high = score["accuracy"]["interval"]
    return Score(draft["name"], task, draft["tar"], score["accuracy"]["value"], (low, high), score["loss"])


def _servers(folder: Path) -> list[Server]:
    """Of every file of `bench` that lies in the folder and holds an answer."""
    files = [Records.read(path, KIND) for path in sorted(folder.glob("*.jsonl")) if _kind(path) == KIND]
    for file in files:
        require_fields(file.about, BenchSettings, f"{file.path}:1", RecordError)
    answered = [file for file in files if any("tokens" in row for row in read_requests(file.path))]
    plain: dict[str, Records] = {}
    for file in answered:
        if not file.about.get("draft"):
            plain.setdefault(_kin(file), file)
    try:
        return [server for file in answered for server in _levels(file, plain.get(_kin(file)))]
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: records of bench lack {error}; remove their file, or bench again") from None


def _levels(file: Records, plain: Records | None) -> Iterator[Server]:
    """A server at every concurrency, against the one without a draft."""
    draft, asked = file.about.get("draft"), _asked(file)
    for level in summarise(file.path):
        gain = speed_up(file.path, plain.path, level.concurrency) if draft and plain else None
        live = Live(*gain) if gain else None
        yield Server(file.path.stem, draft, file.about.get("lookahead"), level, live, asked)


def _asked(file: Records) -> Asked:
    about, prompts = file.about, frozenset((row["set"], row["id"]) for row in read_requests(file.path) if "id" in row)
    return Asked(prompts, about["max_tokens"], about["temperature"], about["chat"])


def _kin(file: Records) -> str:
    """What servers have in common that are compared: the software, and what is asked of them."""
    provenance = file.header.get("provenance", {})
    asked = [file.about.get(name) for name in ("max_tokens", "temperature", "chat")]
    return json.dumps([provenance.get("engine"), provenance.get("processor"), asked])


def _kind(path: Path) -> str | None:
    """What the records in a file are, if that is what it holds."""
    try:
        _, line = next(read_lines(path, RecordError, ended=True))
        found = parse_json(line)
    except (RecordError, ValueError, StopIteration):
        return None
    return found.get("kind") if isinstance(found, dict) else None


def _text(row: Record) -> Text:
    tokens = [(text, source, replaced) for text, source, replaced in row["tokens"]]
    candidate = (row["drafter"], row["draft"], row["lookahead"])
    return Text(row["set"], row["id"], row["sample"], candidate, row["tar"], row["prompt"], tokens)


def _entries(study: Record | None, replays: list[Record]) -> list[Entry]:
    kept = {(row["drafter"], row["draft"]): row for row in replays}
    rows = study["rows"] if study else replays
    labels = label([(row["drafter"], row["draft"], row["name"]) for row in rows])
    return [
        _entry(row, shown, kept.get((row["drafter"], row["draft"]), {}), ended=study is not None)
        for row, shown in zip(rows, labels, strict=True)
    ]


def _entry(row: Record, shown: str, replay: Record, *, ended: bool) -> Entry:
    named = Entry(
        row["name"],
        shown,
        row["drafter"],
        row["draft"],
        row.get("shape", ""),
        layers=replay.get("layers", 0),
        parameters=replay.get("parameters", 0),
        tars=_tars(replay),
        sets={name: _tars(figures) for name, figures in replay.get("sets", {}).items() if figures.get("tar")},
        acceptance_by_position=replay.get("acceptance_by_position", ()),
    )
    if not ended:
        return named
    times, live, disturbed = Iteration.from_json(row["iteration"]), row["live"], row.get("disturbed")
    low, high = row["predicted_interval"]
    return replace(
        named,
        prediction=Prediction(
            row["lookahead"],
            row["tar"],
            times,
            times.total_s / row["break_even_tar"],
            row.get("nodes", 0),
            _silence(row),
        ),
        interval=(low, high),
        live=Live(live["speed_up"], tuple(live["interval"])) if live else None,
        disturbed=disturbed["why"] if disturbed else None,
        curve=[_prediction(one) for one in row.get("curve", ())],
    )


def _tars(figures: Record) -> Tars:
    intervals = {int(size): (low, high) for size, (low, high) in figures.get("tar_interval", {}).items()}
    return Tars({int(size): tar for size, tar in figures.get("tar", {}).items()}, intervals)


def _prediction(one: Record) -> Prediction:
    times = Iteration.from_json(one)
    return Prediction(one["lookahead"], one["tar"], times, one["plain_s"], one["nodes"], _silence(one))


def _silence(row: Record) -> Silence | None:
    """Earlier records do not know of any."""
    return from_record(Silence, row["silence"], "study.json", RecordError) if row.get("silence") else None


def _steps(profile: Iterable[Record]) -> list[Step]:
    """Medians over all samples at the shortest context."""
    rows = [row for row in profile if row.get("draft", "").startswith(RANDOM) and row["batch"] == 1]
    shortest = min((row["context"] for row in rows), default=0)
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["context"] == shortest:
            times.setdefault(row["draft"].removeprefix(RANDOM), []).append(row["draft_s"] / row["lookahead"])
    shapes = {name: parse_shape(name) for name in times}
    return [Step(name, shapes[name].layers, shapes[name].d_model, median(times[name])) for name in times]
