"""Runs side by side, and TAR across their targets."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from shallowdraft.reporting.figures import (
    NO_REPLAYS,
    UNFINISHED,
    Cell,
    Figure,
    Gap,
    Table,
    Values,
    rows_high,
    shown,
)
from shallowdraft.reporting.labels import ends, label, numbered, shortened
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.reporting.sections.drafts import TAR, tar_cell, tar_chart
from shallowdraft.reporting.sections.speed_up import speed_up_chart

FEW = 3  # targets that a finding can name
ROW = 17  # pixels of a run at a proposer
Runs = Mapping[str, RunView]
"""By name."""
Key = tuple[str, str]
"""Drafter and draft: who a proposer is in every run."""


def named(runs: Sequence[RunView]) -> dict[str, RunView]:
    """By as much of their folders as tells them apart."""
    short = ends(str(run.folder.resolve()) for run in runs).values()
    return dict(zip(numbered([shortened(one) for one in short]), runs, strict=True))


def side_by_side(runs: Runs) -> list[Figure | Gap]:
    """Speed-ups of all that is in any of them, and which ones have none yet."""
    ended = {name: run for name, run in runs.items() if run.predicted}
    gaps = [Gap(f"speed-ups of {name}", UNFINISHED) for name in runs if name not in ended]
    return [*([_compared(ended)] if len(ended) > 1 else []), *gaps]


def _compared(runs: Runs) -> Figure:
    of_run = {name: _by_key(run.predicted) for name, run in runs.items()}
    labels = _labels(of_run.values())
    rows: list[dict[str, Any]] = [
        {"label": labels[key], "name": one.name, "kind": name, "where": one.best.where, **_bounds(one)}
        for name, found in of_run.items()
        for key, one in found.items()
    ]
    order = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda row: -row["speed_up"])))
    chart = speed_up_chart(rows, order, list(runs), "run")
    columns = ("proposer", *(f"{figure}, {name}" for figure in ("speed-up", "TAR", "tokens/s") for name in runs))
    table = Table(columns, [_row([(runs[name], found.get(key)) for name, found in of_run.items()]) for key in labels])
    note = "Measured where it was run live, else predicted; bars are 95 % intervals over prompts."
    high = max(rows_high(len(order)), ROW * len(order) * len(runs))
    return Figure("comparison", _finding(runs), chart, table, note, high)


def _by_key(entries: Sequence[Entry]) -> dict[Key, Entry]:
    return {(one.drafter, one.draft): one for one in entries}


def _labels(found: Iterable[dict[Key, Entry]]) -> dict[Key, str]:
    """Short names that tell apart all proposers of all runs."""
    entries = {key: one for of_run in found for key, one in of_run.items()}
    return dict(zip(entries, label([(*key, one.name) for key, one in entries.items()]), strict=True))


def _bounds(one: Entry) -> dict[str, float]:
    low, high = one.bounds
    return {"speed_up": one.speed_up, "low": low, "high": high}


def _row(found: Sequence[tuple[RunView, Entry | None]]) -> tuple[Cell, ...]:
    name = next(one.name for _, one in found if one)
    speed_ups = [one.speed_up if one else None for _, one in found]
    tars = [one.best.tar if one else None for _, one in found]
    return (name, *speed_ups, *tars, *(run.tokens_per_s(one) if one else None for run, one in found))


def _finding(runs: Runs) -> str:
    def said(name: str) -> str:
        run, one = runs[name], runs[name].predicted[0]
        speed = f"{one.speed_up:.2f} times, {shown(run.tokens_per_s(one))} tokens a second"
        return f"{name}: {one.label} {one.best.where}, {speed}"

    if len(runs) == 2:
        return "The best of " + "; of ".join(map(said, runs)) + "."
    ranked = sorted(runs, key=lambda name: -runs[name].predicted[0].speed_up)
    return f"Of {len(runs)} runs the best speed-up is that of {said(ranked[0])}; the least that of {said(ranked[-1])}."


def tar_across(runs: Runs) -> list[Figure | Gap]:
    """The paper's Table 3: each proposer with each target on each prompt set, and which runs cannot tell."""
    known = {name: _by_key([one for one in run.entries if one.sets]) for name, run in runs.items()}
    gaps = [Gap(f"TAR of {name}", NO_REPLAYS) for name, found in known.items() if not found]
    targets, labels = _targets(runs), _labels(known.values())
    rows = [
        cell | {"label": f"{short}\nwith {targets[name]}", "run": name, "target": runs[name].target}
        for key, short in sorted(labels.items(), key=lambda one: -sum(one[0] in found for found in known.values()))
        for name, found in known.items()
        if key in found
        for cell in _cells(found[key], _common([its[key] for its in known.values() if key in its]))
    ]
    if not rows:
        return [*gaps]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    names = ("name", "run", "target", "set", "size", "tar", "low", "high")
    columns = ("proposer", "run", "target", "prompt set", "size", "TAR", "from", "to")
    table = Table(columns, [tuple(row[name] for name in names) for row in rows])
    note = f"{TAR} Each proposer at the longest lookahead, or with the largest tree, that all runs have of it."
    high = rows_high(len({row["label"] for row in rows}))
    return [Figure("targets", _spread(rows, targets), tar_chart(rows, sets, lines=2), table, note, high), *gaps]


def _targets(runs: Runs) -> dict[str, str]:
    """Short names of each run's target; with the run's own where several have the same."""
    short = ends(run.target for run in runs.values())
    of_run = [short[run.target] for run in runs.values()]
    found = [
        target if of_run.count(target) == 1 else f"{target} ({name})" for name, target in zip(runs, of_run, strict=True)
    ]
    return dict(zip(runs, numbered([shortened(one) for one in found]), strict=True))


def _common(entries: Sequence[Entry]) -> int:
    """The largest size that all have; 0 where there is none."""
    return max(set.intersection(*(set(tars.tar) for one in entries for tars in one.sets.values())), default=0)


def _cells(one: Entry, size: int) -> list[dict[str, Any]]:
    return [tar_cell(one, name, size) for name in one.sets]


def _spread(rows: Values, targets: Mapping[str, str]) -> str:
    """Of the first proposer, which is in most runs: the least and the most, and what is between if that is little."""
    first, found = rows[0]["name"], dict[str, list[float]]()
    for row in rows:
        if row["name"] == first:
            found.setdefault(targets[row["run"]], []).append(row["tar"])
    ranked = sorted(found, key=lambda target: fmean(found[target]))
    chosen = ranked if len(found) <= FEW else [ranked[0], ranked[-1]]
    said = ", ".join(f"{_from_to(found[target])} with {target}" for target in chosen)
    return f"Tokens an iteration of {first}, by prompt set: {said}."


def _from_to(tars: Sequence[float]) -> str:
    low, high = f"{min(tars):.2f}", f"{max(tars):.2f}"
    return low if low == high else f"{low} to {high}"
