"""Runs written by hand: the records of a study that never was."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from shallowdraft.cost import Iteration, Prediction
from shallowdraft.records import Record, Records
from shallowdraft.report.reading import FILES
from shallowdraft.runs.servers import KIND

TARGET = "made/target"


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
    """Of so many drafts, each a little slower and a little better than the one before; the best three live."""
    folder.mkdir(parents=True)
    names = [f"{name}-{number}" for number in range(drafts)]
    _write(folder, "trace", {"target": target}, [{"set": sets[0], "id": "0", "sample": 0, "output": [1, 2]}])
    _write(folder, "replays", {"target": target}, [_replay(n, at, sets, lookaheads) for at, n in enumerate(names)])
    machine = {"target": target, "shape": "20x256/4h/688", "dtype": "float32", "device": "a processor", "threads": 2}
    _write(folder, "profile", machine, [_sample(names[0], 1)] + (_timed_shapes() if shapes else []))
    _write(folder, "live", machine, [_live(names[0], number) for number in range(prompts)])
    inside = [_inside(one, number, prompt) for one in names[:2] for number in range(prompts)]
    _write(folder, "inside", {"target": target}, inside)
    rows = sorted(
        (_row(one, at, lookaheads) for at, one in enumerate(names)), key=lambda row: -row["predicted_speed_up"]
    )
    for row in rows[3:]:
        row["live"] = None
    best = rows[0]
    study = {
        "verdict": f"speculation pays: {best['name']} at lookahead {best['lookahead']} is "
        f"{best['live']['speed_up']:.2f}x as fast",
        "plain_tokens_per_s": 200.0,
        "rows": rows,
        "failed": {},
    }
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def _write(folder: Path, name: str, about: Record, rows: Sequence[Record]) -> None:
    file = Records.open(folder / f"{name}.jsonl", FILES[name], about)
    with file.path.open("a", encoding="utf-8") as lines:  # at once: every append waits for the disk
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def _tar(at: int, lookahead: int) -> float:
    rate = 0.5 + 0.4 * at / (at + 5)
    return sum(rate**kept for kept in range(lookahead + 1))


def prediction(at: int, lookahead: int) -> Prediction:
    times = Iteration(0.0004 * lookahead * (1 + 0.3 * at), 0.005 + 0.0002 * lookahead, 0.0002)
    return Prediction(lookahead, _tar(at, lookahead), times, 0.005)


def _replay(name: str, at: int, sets: Sequence[str], lookaheads: int) -> Record:
    tars = {str(d): _tar(at, d) for d in range(1, lookaheads + 1)}
    figures = {"tar": tars, "tar_interval": {d: [0.95 * tar, 1.05 * tar] for d, tar in tars.items()}}
    return {
        "name": name,
        "drafter": "model",
        "draft": name,
        "shape": f"{1 + at}x64/2h/96",
        "layers": 1 + at,
        "parameters": 100_000 * (1 + at),
        **figures,
        "acceptance_by_position": [(0.5 + 0.4 * at / (at + 5)) ** place for place in range(1, lookaheads + 1)],
        "sets": {of_set: _scaled(figures, 1 - 0.03 * number) for number, of_set in enumerate(sets)},
        "prompts": [],
    }


def _scaled(figures: Record, share: float) -> Record:
    tars = {size: share * tar for size, tar in figures["tar"].items()}
    return {"tar": tars, "tar_interval": {size: [0.95 * tar, 1.05 * tar] for size, tar in tars.items()}}


def _row(name: str, at: int, lookaheads: int) -> Record:
    curve = [prediction(at, d) for d in range(1, lookaheads + 1)]
    best = max(curve, key=lambda one: one.tokens_per_s)
    live = {
        "tar": best.tar,
        "tokens_per_s": 200 * best.speed_up,
        "plain_tokens_per_s": 200.0,
        "speed_up": 1.01 * best.speed_up,
        "interval": [0.97 * best.speed_up, 1.05 * best.speed_up],
        "lossless": True,
    }
    return {
        "name": name,
        "draft": name,
        "lookahead": best.lookahead,
        "drafter": "model",
        "tree": [],
        "nodes": 0,
        "shape": f"{1 + at}x64/2h/96",
        "tar": best.tar,
        "predicted_speed_up": best.speed_up,
        "predicted_interval": [0.95 * best.speed_up, 1.05 * best.speed_up],
        "break_even_tar": best.break_even_tar,
        "iteration": best.iteration.to_json(),
        "waterfall": asdict(best.waterfall),
        "live": live,
        "curve": [
            {"size": one.size, "lookahead": one.lookahead, "nodes": 0, "tar": one.tar, "plain_s": one.plain_s}
            | one.iteration.to_json()
            for one in curve
        ],
    }


def _sample(draft: str, lookahead: int, draft_s: float = 0.0004) -> Record:
    place = {"draft": draft, "lookahead": lookahead, "context": 64, "batch": 1, "drafter": "model", "tree": []}
    return place | {"plain_s": 0.005, "draft_s": draft_s, "target_s": 0.005, "rest_s": 0.0002, "round": 0, "turn": 0}


def _timed_shapes() -> list[Record]:
    return [
        _sample(f"random:{layers}x{width}/2h/{2 * width}", 4, 4 * (1e-4 + 1e-4 * layers * width / 64))
        for width in (64, 128)
        for layers in (1, 2, 4)
    ]


def make_server(
    path: Path, tar: float | None = None, total_s: float = 1.0, sets: Sequence[str] = ("zoo",), **about: object
) -> None:
    """What `bench` would have written of a server: three prompts of each set, one and two at once."""
    asked = {"url": "http://made", "model": "m", "max_tokens": 20, "temperature": 0.0, "chat": False}
    file = Records.open(path, KIND, asked | about, engine="made")
    for many in (1, 2):
        for number, of_set in product(range(3), sets):
            counted = None if tar is None else _counted(tar)
            place = {"concurrency": many, "in_run": 3 * len(sets), "round": 0, "set": of_set, "id": str(number)}
            times = {"arrivals_s": [0.1, total_s * (1 + number / 50)], "total_s": total_s * (1 + number / 50)}
            times["share_s"] = times["total_s"] / many
            file.append(place | times | {"tokens": 20, "speculation": counted})


def _counted(tar: float) -> Record:
    return {"num_spec_steps": 100, "num_draft_tokens": 200, "num_accepted_draft_tokens": 100 * (tar - 1)}


def _live(draft: str, number: int) -> Record:
    return {"set": "zoo", "id": str(number), "draft": draft, "lookahead": 2, "differs": None, "tie": True}


def _inside(draft: str, number: int, prompt: str) -> Record:
    best = max((prediction(0 if draft.endswith("-0") else 1, d) for d in range(1, 5)), key=lambda one: one.tokens_per_s)
    tokens = [
        ["The", "own", None],
        [" cat", "accepted", None],
        [" sat", "correction", " <b>sits"],
        [".", "bonus", None],
    ]
    about = {"set": "zoo", "id": str(number), "sample": 0, "draft": draft, "lookahead": best.lookahead}
    return about | {"drafter": "model", "tree": [], "tar": 1 + number / 10, "prompt": prompt, "tokens": tokens}
