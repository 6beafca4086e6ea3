"""A run as the report sees it: whatever a study's folder holds, and what is missing."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shallowdraft.cost import Iteration, Prediction
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.records import Record, Records
from shallowdraft.shapes import parse

FILES = {"trace": "trace", "replays": "replays", "profile": "profile", "live": "live runs", "inside": "inside"}
"""Names of files and kinds of records."""
RANDOM = "random:"  # what the name of a draft begins with that was timed with random weights
LONGEST_LABEL = 22

Interval = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """A proposer."""

    name: str
    label: str
    """A short name, for charts."""
    drafter: str
    draft: str
    shape: str = ""
    layers: int = 0
    parameters: int = 0
    prediction: Prediction | None = None
    """At its best; None while a run is unfinished."""
    interval: Interval = (0.0, 0.0)
    """Of the predicted speed-up."""
    live: Record | None = None
    curve: Sequence[Prediction] = ()
    """By size."""
    replay: Record = field(default_factory=dict)
    """What its replay knows; empty where that was not kept."""

    @property
    def best(self) -> Prediction:
        """Of those that a run has predicted."""
        assert self.prediction
        return self.prediction

    @property
    def speed_up(self) -> float:
        """Measured, or else predicted."""
        return float(self.live["speed_up"]) if self.live else self.best.speed_up

    @property
    def bounds(self) -> Interval:
        """Of that speed-up."""
        low, high = self.live["interval"] if self.live else self.interval
        return low, high

    @property
    def how(self) -> str:
        return "measured" if self.live else "predicted"

    @property
    def sets(self) -> dict[str, Record]:
        """What its replay knows by prompt set."""
        found: dict[str, Record] = self.replay.get("sets", {})
        return found

    def tar_interval(self, size: int) -> tuple[float | None, float | None]:
        """Of TAR over prompts, where a replay was kept."""
        low, high = self.replay.get("tar_interval", {}).get(str(size), (None, None))
        return low, high


@dataclass(frozen=True)
class Step:
    """Of a shape that was timed with random weights: seconds of one draft step."""

    shape: str
    layers: int
    d_model: int
    step_s: float


@dataclass(frozen=True)
class Run:
    """What a folder holds."""

    folder: Path
    headers: dict[str, Record]
    """First lines, by file."""
    entries: list[Entry]
    """Fastest first."""
    verdict: str | None = None
    """None: the study has not ended."""
    plain_tokens_per_s: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    live: list[Record] = field(default_factory=list)
    inside: list[Record] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    accuracy: Record | None = None

    @property
    def about(self) -> Record:
        """Target, shape, device, as far as they are known."""
        return {name: value for header in self.headers.values() for name, value in header["about"].items()}

    @property
    def target(self) -> str:
        return str(self.about.get("target", "an unknown target"))

    @property
    def time(self) -> str:
        """When its last file was begun."""
        return max((header["provenance"]["time"] for header in self.headers.values()), default="unknown")

    @property
    def predicted(self) -> list[Entry]:
        return [one for one in self.entries if one.prediction]

    @property
    def measured(self) -> list[Entry]:
        return [one for one in self.entries if one.live]

    def tokens_per_s(self, entry: Entry) -> float:
        """As many as its speed-up makes of plain decoding's, so that all meet the same machine."""
        assert self.plain_tokens_per_s
        return entry.speed_up * self.plain_tokens_per_s

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.entries for name in one.sets))


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder; name the one that was given to study --out")
    files = {name: _read(folder / f"{name}.jsonl", kind) for name, kind in FILES.items()}
    found = {name: file for name, file in files.items() if file}
    study = _object(folder / "study.json")
    if not found and study is None:
        raise OptionError(f"{folder} holds no records of a study; make them with shallowdraft study --out {folder}")
    try:
        return _run(folder, found, study)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: its records lack {error}; run the study again, it reuses the others") from None


def _run(folder: Path, found: dict[str, Records], study: Record | None) -> Run:
    return Run(
        folder,
        {name: file.header for name, file in found.items()},
        _entries(study, _latest(found.get("replays"), "drafter", "draft")),
        verdict=study["verdict"] if study else None,
        plain_tokens_per_s=study["plain_tokens_per_s"] if study else None,
        failed=study["failed"] if study else {},
        live=list(found.get("live", ())),
        inside=_latest(found.get("inside"), "set", "id", "sample", "drafter", "draft"),
        steps=_steps(found.get("profile", ())),
        accuracy=_accuracy(folder / "accuracy.json"),
    )


def _read(path: Path, kind: str) -> Records | None:
    return Records.read(path, kind) if path.is_file() and path.stat().st_size else None


def _latest(file: Records | None, *names: str) -> list[Record]:
    return list(file.latest(*names).values()) if file else []


def _object(path: Path) -> Record | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise RecordError(f"{path}: not JSON; was it edited? run the command again that wrote it") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path}: no JSON object; run the command again that wrote it")
    return found


def _accuracy(path: Path) -> Record | None:
    found = _object(path)
    if found is not None and not {"drafts", "claims"} <= found.keys():
        raise RecordError(f"{path}: this is not what shallowdraft accuracy --json prints; write it again")
    return found


def _entries(study: Record | None, replays: list[Record]) -> list[Entry]:
    kept = {(row["drafter"], row["draft"]): row for row in replays}
    rows = study["rows"] if study else replays
    labels = label([(row["drafter"], row["draft"], row["name"]) for row in rows])
    return [
        _entry(row, shown, kept.get((row["drafter"], row["draft"]), {}), ended=study is not None)
        for row, shown in zip(rows, labels, strict=True)
    ]


def _entry(row: Record, shown: str, replay: Record, *, ended: bool) -> Entry:
    about = {name: replay[name] for name in ("layers", "parameters") if name in replay}
    named = Entry(row["name"], shown, row["drafter"], row["draft"], row["shape"], replay=replay, **about)
    if not ended:
        return named
    times = Iteration(**row["iteration"])
    best = Prediction(row["lookahead"], row["tar"], times, times.total_s / row["break_even_tar"], row["nodes"])
    curve = [_prediction(one) for one in row.get("curve", ())]
    low, high = row["predicted_interval"]
    given = vars(named) | {"prediction": best, "interval": (low, high), "live": row["live"], "curve": curve}
    return Entry(**given)


def _prediction(one: Record) -> Prediction:
    times = Iteration(one["draft_s"], one["target_s"], one["rest_s"])
    return Prediction(one["lookahead"], one["tar"], times, one["plain_s"], one["nodes"])


def label(named: Sequence[tuple[str, str, str]]) -> list[str]:
    """Short names of proposers, given kind, draft and name: of a path its end, as much as tells drafts apart."""
    short = {"model": "", "tree": "tree "}
    drafts = ends([draft for kind, draft, _ in named if kind in short])
    found = [cut(short[kind] + drafts[draft] if kind in short else name) for kind, draft, name in named]
    return found if len(set(found)) == len(found) else [f"{at} {one}" for at, one in enumerate(found, 1)]


def ends(paths: Iterable[str]) -> dict[str, str]:
    """Of each path its end, as much as tells them apart."""
    parts = {one: Path(one).parts for one in paths}
    longest = max(map(len, parts.values()), default=0)
    found = ({one: "/".join(its[-count:]) for one, its in parts.items()} for count in range(1, longest + 1))
    return next((short for short in found if len(set(short.values())) == len(parts)), {one: one for one in parts})


def cut(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]


def _steps(profile: Iterable[Record]) -> list[Step]:
    """Medians over all samples at the shortest context."""
    rows = [row for row in profile if row["draft"].startswith(RANDOM) and row["batch"] == 1]
    shortest = min((row["context"] for row in rows), default=0)
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["context"] == shortest:
            times.setdefault(row["draft"].removeprefix(RANDOM), []).append(row["draft_s"] / row["lookahead"])
    shapes = {name: parse(name) for name in times}
    return [Step(name, shapes[name].layers, shapes[name].d_model, median(times[name])) for name in times]
