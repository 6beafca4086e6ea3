"""Runs written by hand, without a study."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from shallowdraft.cost import Iteration, Prediction
from shallowdraft.records import Record, Records
from shallowdraft.runs import live, profile, tokens, trace
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import LiveRun
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.replays import ReplayRecord, TarFigures, write_replays
from shallowdraft.runs.servers import KIND
from shallowdraft.runs.study import LiveSpeed, StudyResult, StudyRow, write_study
from shallowdraft.runs.tokens import TokenSources

TARGET = "made/target"
FILES = {
    "trace": trace.KIND,
    "profile": profile.KIND,
    "live": live.KIND,
    "tokens": tokens.KIND,
}


def make_run(
    folder: Path,
    drafts: int = 1,
    *,
    sets: Sequence[str] = ("zoo",),
    lookaheads: int = 4,
    prompts: int = 6,
    prompt: str = "Once upon a time",
    name: str = "made/draft",
    target: str = TARGET,
    shapes: bool = False,
) -> Path:
    """Write a run of drafts, each slower and with a higher TAR than the one before; the best three ran live."""
    folder.mkdir(parents=True)
    names = [f"{name}-{number}" for number in range(drafts)]
    _write(folder, "trace", {"target": target}, [{"set": sets[0], "id": "0", "sample": 0, "output": [1, 2]}])
    about = {"target": target, "target_digest": None}
    replays = [_replay(draft, index, sets, lookaheads) for index, draft in enumerate(names)]
    write_replays(folder / "replays.jsonl", about, replays)
    machine = {"target": target, "shape": "20x256/4h/688", "dtype": "float32", "device": "a processor", "threads": 2}
    _write(folder, "profile", machine, [_sample(names[0], 1)] + (_timed_shapes() if shapes else []))
    runs = [_live(names[0], number).to_json() for number in range(prompts)]
    _write(folder, "live", machine, runs)
    texts = [asdict(_tokens(draft, number, prompt)) for draft in names[:2] for number in range(prompts)]
    _write(folder, "tokens", about, texts)
    rows = [_row(draft, index, lookaheads) for index, draft in enumerate(names)]
    rows.sort(key=lambda row: -row.prediction.speed_up)
    rows[3:] = [replace(row, live=None) for row in rows[3:]]
    write_study(folder / "study.json", StudyResult(tuple(rows), 200.0, lossless=True))
    return folder


def _write(folder: Path, name: str, about: Record, rows: Sequence[Record]) -> None:
    file = Records.open(folder / f"{name}.jsonl", FILES[name], about)
    with file.path.open("a", encoding="utf-8") as lines:  # at once: every append waits for the disk
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def _tar(index: int, lookahead: int) -> float:
    rate = 0.5 + 0.4 * index / (index + 5)
    return sum(rate**kept for kept in range(lookahead + 1))


def prediction(index: int, lookahead: int) -> Prediction:
    times = Iteration(0.0004 * lookahead * (1 + 0.3 * index), 0.005 + 0.0002 * lookahead, 0.0002)
    return Prediction(lookahead, _tar(index, lookahead), times, 0.005)


def _replay(name: str, index: int, sets: Sequence[str], lookaheads: int) -> ReplayRecord:
    tars = {d: _tar(index, d) for d in range(1, lookaheads + 1)}
    rate = 0.5 + 0.4 * index / (index + 5)
    return ReplayRecord(
        name,
        "model",
        name,
        digest=name,
        shape=f"{1 + index}x64/2h/96",
        layers=1 + index,
        parameters=100_000 * (1 + index),
        tar=tars,
        tar_interval=_figures(tars, 1.0).tar_interval,
        sets={set_name: _figures(tars, 1 - 0.03 * number) for number, set_name in enumerate(sets)},
        acceptance_by_position=tuple(rate**place for place in range(1, lookaheads + 1)),
    )


def _figures(tars: dict[int, float], share: float) -> TarFigures:
    scaled = {size: share * tar for size, tar in tars.items()}
    return TarFigures(scaled, {size: (0.95 * tar, 1.05 * tar) for size, tar in scaled.items()})


def _row(name: str, index: int, lookaheads: int) -> StudyRow:
    curve = tuple(prediction(index, d) for d in range(1, lookaheads + 1))
    best = max(curve, key=lambda point: point.tokens_per_s)
    speed_up = best.speed_up
    live = LiveSpeed(
        best.tar, 200 * speed_up, 200.0, 1.01 * speed_up, (0.97 * speed_up, 1.05 * speed_up), lossless=True
    )
    shape, interval = f"{1 + index}x64/2h/96", (0.95 * speed_up, 1.05 * speed_up)
    return StudyRow(name, Candidate(name, best.lookahead), shape, best, interval, live, None, curve)


def _sample(draft: str, lookahead: int, draft_s: float = 0.0004) -> Record:
    point = {"draft": draft, "lookahead": lookahead, "context": 64, "batch": 1, "drafter": "model", "tree": []}
    times = {"plain_s": 0.005, "draft_s": draft_s, "verify_s": 0.005, "other_s": 0.0002}
    return point | times | {"round": 0, "turn": 0, "handover_s": 0.0, "arithmetic_s": 0.0}


def _timed_shapes() -> list[Record]:
    return [
        _sample(f"random:{layers}x{width}/2h/{2 * width}", 4, 4 * (1e-4 + 1e-4 * layers * width / 64))
        for width in (64, 128)
        for layers in (1, 2, 4)
    ]


def make_server(
    path: Path, tar: float | None = None, total_s: float = 1.0, sets: Sequence[str] = ("zoo",), **about: object
) -> None:
    """Write what `bench` writes of a server: three prompts of each set, at concurrency 1 and 2."""
    settings = {"url": "http://made", "model": "m", "max_tokens": 20, "temperature": 0.0, "chat": False}
    file = Records.open(path, KIND, settings | about, engine="made")
    for concurrency in (1, 2):
        for number, set_name in product(range(3), sets):
            counted = None if tar is None else _counted(tar)
            prompt = {"set": set_name, "id": str(number)}
            place = {"concurrency": concurrency, "in_run": 3 * len(sets), "round": 0}
            times = {"arrivals_s": [0.1, total_s * (1 + number / 50)], "total_s": total_s * (1 + number / 50)}
            times["share_s"] = times["total_s"] / concurrency
            file.append(place | prompt | times | {"tokens": 20, "speculation": counted})


def _counted(tar: float) -> Record:
    return {"num_spec_steps": 100, "num_draft_tokens": 200, "num_accepted_draft_tokens": 100 * (tar - 1)}


def _live(draft: str, number: int) -> LiveRun:
    state = MachineState(0.005)
    about = "zoo", str(number), "", 0, Candidate(draft, 2)
    return LiveRun(*about, 20, 10, 0.1, 0.02, 0.07, differs=None, tie=True, states=(state, state))


def _tokens(draft: str, number: int, prompt: str) -> TokenSources:
    curve = [prediction(0 if draft.endswith("-0") else 1, lookahead) for lookahead in range(1, 5)]
    best = max(curve, key=lambda point: point.tokens_per_s)
    tokens = (
        ("The", "own", None),
        (" cat", "accepted", None),
        (" sat", "correction", " <b>sits"),
        (".", "bonus", None),
    )
    candidate = asdict(Candidate(draft, best.lookahead))
    return TokenSources("zoo", str(number), 0, **candidate, tar=1 + number / 10, prompt=prompt, tokens=tokens)
