"""Reader of a run's folder for the report."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from shallowdraft.benchmarking.levels import speed_up, summarise
from shallowdraft.errors import OptionError
from shallowdraft.records import RANDOM, Records, is_begun, kind_of
from shallowdraft.reporting.labels import short_labels
from shallowdraft.reporting.run import BenchedServer, Entry, Requested, RunView, ShapeStep
from shallowdraft.runs import live, profile, replays, servers, tokens, trace
from shallowdraft.runs.accuracy import read_accuracy
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.live import LiveRun, read_live_runs
from shallowdraft.runs.profile import read_samples
from shallowdraft.runs.replays import ReplayRecord, TarFigures, read_replays
from shallowdraft.runs.study import StudyResult, StudyRow, read_study
from shallowdraft.runs.tokens import read_tokens
from shallowdraft.shapes.notation import parse_shape


def read_run(folder: Path) -> RunView:
    """Read all records of a run; missing records leave gaps in the report, damaged ones are errors."""
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder; name the one that was given to study --out")
    run = RunFolder(folder)
    headers = [file.header for file in _begun_files(run)]
    result = read_study(run.study) if run.study.exists() else None
    if not headers and result is None:
        raise OptionError(f"{folder} holds no records of a study; make them with shallowdraft study --out {folder}")
    times = [header.get("provenance", {}).get("time", "") for header in headers]
    entries = _entries(result, read_replays(run.replays) if is_begun(run.replays) else [])
    return RunView(
        folder,
        {name: value for header in headers for name, value in header["about"].items()},
        max(times, default="") or "unknown",
        entries,
        verdict=result.rows[0].verdict(entries[0].label) if result else None,
        plain_tokens_per_s=result.plain_tokens_per_s if result else None,
        failed=result.failed if result else {},
        stalled=result.stalled if result else (),
        outputs=[_same_output(live_run) for live_run in read_live_runs(run.live)] if is_begun(run.live) else [],
        texts=read_tokens(run.tokens) if is_begun(run.tokens) else [],
        steps=_shape_steps(run.profile),
        accuracy=read_accuracy(run.accuracy) if run.accuracy.exists() else None,
        servers=_servers(run),
    )


def _begun_files(run: RunFolder) -> list[Records]:
    """Return the files of a study that have a first line, in the order of its stages."""
    kinds = {
        run.trace: trace.KIND,
        run.replays: replays.KIND,
        run.profile: profile.KIND,
        run.live: live.KIND,
        run.tokens: tokens.KIND,
    }
    return [Records.read(path, kind) for path, kind in kinds.items() if is_begun(path)]


def _same_output(run: LiveRun) -> bool | None:
    """Return whether the output is plain decoding's; None if it is except for a rounding tie."""
    return None if run.tie and run.differs else run.tie


def _entries(result: StudyResult | None, records: Sequence[ReplayRecord]) -> list[Entry]:
    """Return the rows of the study with their replays, or of an unfinished study the replays alone."""
    by_key = {(record.drafter, record.draft): record for record in records}
    if result is None:
        labels = short_labels([(record.drafter, record.draft, record.name) for record in records])
        return [_replayed_entry(record, short) for record, short in zip(records, labels, strict=True)]
    labels = short_labels([(row.candidate.drafter, row.candidate.draft, row.name) for row in result.rows])
    return [
        _ranked_entry(row, by_key.get(row.candidate.proposer), short)
        for row, short in zip(result.rows, labels, strict=True)
    ]


def _replayed_entry(record: ReplayRecord, short: str) -> Entry:
    return Entry(
        record.name,
        short,
        record.drafter,
        record.draft,
        record.digest,
        record.shape,
        record.layers,
        record.parameters,
        tars=TarFigures(record.tar, record.tar_interval),
        sets={name: figures for name, figures in record.sets.items() if figures.tar},
        acceptance_by_position=record.acceptance_by_position,
    )


def _ranked_entry(row: StudyRow, record: ReplayRecord | None, short: str) -> Entry:
    without_replay = ReplayRecord(row.name, row.candidate.drafter, row.candidate.draft)
    return replace(
        _replayed_entry(record or without_replay, short),
        name=row.name,
        digest=row.candidate.digest,
        shape=row.shape,
        prediction=row.prediction,
        predicted_interval=row.predicted_interval,
        live=row.live,
        disturbed=row.disturbed,
        curve=row.curve,
    )


def _shape_steps(path: Path) -> list[ShapeStep]:
    """Return median seconds of a draft step of each shape, over all samples at the shortest context, at batch 1."""
    samples = {
        point: rows
        for point, rows in (read_samples(path) if is_begun(path) else {}).items()
        if point.candidate.draft.startswith(RANDOM) and point.batch == 1
    }
    shortest = min((point.context for point in samples), default=0)
    times: dict[str, list[float]] = {}
    for point, rows in samples.items():
        if point.context == shortest:
            steps = times.setdefault(point.candidate.draft.removeprefix(RANDOM), [])
            steps.extend(row["draft_s"] / point.candidate.lookahead for row in rows)
    shapes = {notation: parse_shape(notation) for notation in times}
    return [
        ShapeStep(notation, shapes[notation].layers, shapes[notation].d_model, median(seconds))
        for notation, seconds in times.items()
    ]


def _servers(run: RunFolder) -> list[BenchedServer]:
    """Return the servers in the files that `bench` wrote into the folder, except files without an answer."""
    files = [servers.open_requests(path) for path in run.json_lines if kind_of(path) == servers.KIND]
    answered = [file for file in files if any("tokens" in row for row in servers.read_requests(file.path))]
    plain: dict[str, Records] = {}
    for file in answered:
        if not file.about.get("draft"):
            plain.setdefault(_comparable(file), file)
    return [server for file in answered for server in _levels(file, plain.get(_comparable(file)))]


def _levels(file: Records, plain: Records | None) -> Iterator[BenchedServer]:
    """Yield a server at every concurrency, compared with the one without a draft."""
    about = file.about
    keys = frozenset((row["set"], row["id"]) for row in servers.read_requests(file.path) if "id" in row)
    requested = Requested(keys, about["max_tokens"], about["temperature"], about["chat"])
    for level in summarise(file.path):
        gain = speed_up(file.path, plain.path, level.concurrency) if about.get("draft") and plain else None
        factor, interval = gain or (None, (0.0, 0.0))
        yield BenchedServer(
            file.path.stem,
            about.get("draft"),
            about.get("draft_digest"),
            about.get("lookahead"),
            level,
            factor,
            interval,
            requested,
        )


def _comparable(file: Records) -> str:
    """Return what servers must have in common to be compared: engine, machine and requests."""
    provenance = file.header.get("provenance", {})
    requested = [file.about.get(name) for name in ("max_tokens", "temperature", "chat")]
    return json.dumps([provenance.get("engine"), provenance.get("processor"), requested])
