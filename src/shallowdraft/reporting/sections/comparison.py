"""Several runs side by side, and TAR across their targets."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from shallowdraft.display.tabular import Cell, format_cell
from shallowdraft.reporting.charts import Rows, height_of_rows
from shallowdraft.reporting.figures import BOUNDS, NO_REPLAYS, PROMPT_INTERVALS, UNFINISHED, Figure, Gap, Table
from shallowdraft.reporting.labels import number_if_equal, path_ends, short_labels, shorten
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.reporting.sections.drafts import TAR_MEANING, tar_cell, tar_chart
from shallowdraft.reporting.sections.speed_up import speed_up_chart
from shallowdraft.runs.candidate import ProposerKey

FEW_TARGETS = 3  # a finding can name this many
RUN_HEIGHT = 17  # pixels of a run at a proposer
NamedRuns = Mapping[str, RunView]
Entries = dict[ProposerKey, Entry]
"""The entries of a run."""


def name_runs(runs: Sequence[RunView]) -> dict[str, RunView]:
    """Return runs by name, which is the shortest end of their folders that tells them apart."""
    short = path_ends(str(run.folder.resolve()) for run in runs).values()
    return dict(zip(number_if_equal([shorten(name) for name in short]), runs, strict=True))


def compare_speed_ups(runs: NamedRuns) -> list[Figure | Gap]:
    """Chart the speed-ups of all proposers of all runs, and name the runs that have none yet."""
    finished = {name: run for name, run in runs.items() if run.predicted}
    gaps = [Gap(f"speed-ups of {name}", UNFINISHED) for name in runs if name not in finished]
    return [*([_speed_up_figure(finished)] if len(finished) > 1 else []), *gaps]


def _speed_up_figure(runs: NamedRuns) -> Figure:
    entries = {name: _by_proposer(run.predicted) for name, run in runs.items()}
    labels = _labels(entries.values())
    rows = [
        _speed_up_row(entry, labels[proposer], name)
        for name, of_run in entries.items()
        for proposer, entry in of_run.items()
    ]
    order = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda row: -row["speed_up"])))
    chart = speed_up_chart(rows, order, list(runs), "run")
    columns = ["proposer"]
    for figure in ("speed-up", "TAR", "tokens/s"):
        columns += [f"{figure}, {name}" for name in runs]
    table_rows = []
    for proposer in labels:
        by_run = [(runs[name], of_run.get(proposer)) for name, of_run in entries.items()]
        table_rows.append(_table_row(by_run))
    note = f"A speed-up is measured if the proposer ran live, else predicted. {PROMPT_INTERVALS}"
    height = max(height_of_rows(len(order)), RUN_HEIGHT * len(order) * len(runs))
    return Figure("comparison", _best_of_each(runs), chart, Table(tuple(columns), table_rows), note, height)


def _by_proposer(entries: Sequence[Entry]) -> Entries:
    return {entry.proposer: entry for entry in entries}


def _labels(runs: Iterable[Entries]) -> dict[ProposerKey, str]:
    """Return short names that tell apart all proposers of all runs."""
    names = {proposer: entry.name for entries in runs for proposer, entry in entries.items()}
    labels = short_labels([(*proposer, name) for proposer, name in names.items()])
    return dict(zip(names, labels, strict=True))


def _speed_up_row(entry: Entry, label: str, run_name: str) -> dict[str, Any]:
    low, high = entry.bounds
    about = {"label": label, "name": entry.name, "kind": run_name, "where": entry.best.where}
    return about | {"speed_up": entry.speed_up, "low": low, "high": high}


def _table_row(entries: Sequence[tuple[RunView, Entry | None]]) -> tuple[Cell, ...]:
    name = next(entry.name for _, entry in entries if entry)
    speed_ups = [entry.speed_up if entry else None for _, entry in entries]
    tars = [entry.best.tar if entry else None for _, entry in entries]
    tokens_per_s = [run.tokens_per_s(entry) if entry else None for run, entry in entries]
    return (name, *speed_ups, *tars, *tokens_per_s)


def _best_of_each(runs: NamedRuns) -> str:
    """Return a sentence on the fastest proposer of two runs, or of the best and the worst of several."""

    def fastest(name: str) -> str:
        run, entry = runs[name], runs[name].predicted[0]
        speed = f"{entry.speed_up:.2f} times plain decoding, {format_cell(run.tokens_per_s(entry))} tokens per second"
        return f"{name}: {entry.label} {entry.best.where}, {speed}"

    if len(runs) == 2:
        return "The fastest in " + "; in ".join(map(fastest, runs)) + "."
    ranked = sorted(runs, key=lambda name: -runs[name].predicted[0].speed_up)
    return (
        f"Of {len(runs)} runs, the highest speed-up is that of {fastest(ranked[0])}; "
        f"the lowest is that of {fastest(ranked[-1])}."
    )


def compare_tar(runs: NamedRuns) -> list[Figure | Gap]:
    """Chart each proposer's TAR with each target on each prompt set, like the paper's Table 3."""
    entries = {name: _by_proposer([entry for entry in run.entries if entry.sets]) for name, run in runs.items()}
    gaps = [Gap(f"TAR of {name}", NO_REPLAYS) for name, of_run in entries.items() if not of_run]
    targets = _target_names(runs)
    rows = _tar_rows(runs, entries, targets)
    if not rows:
        return [*gaps]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    names = ("name", "run", "target", "set", "size", "tar", "low", "high")
    columns = ("proposer", "run", "target", "prompt set", "size", "TAR", *BOUNDS)
    table = Table(columns, [tuple(row[name] for name in names) for row in rows])
    note = (
        f"{TAR_MEANING} Each proposer at the longest lookahead, or with the largest tree, at which every run with that "
        "proposer replayed it."
    )
    height = height_of_rows(len({row["label"] for row in rows}))
    chart = tar_chart(rows, sets, lines=2)
    return [Figure("targets", _tar_by_target(rows, targets), chart, table, note, height), *gaps]


def _tar_rows(runs: NamedRuns, entries: Mapping[str, Entries], targets: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row per proposer, run and prompt set, beginning with the proposers that are in most runs."""
    labels = _labels(entries.values())
    run_counts = {proposer: sum(proposer in of_run for of_run in entries.values()) for proposer in labels}
    rows = []
    for proposer in sorted(labels, key=lambda proposer: -run_counts[proposer]):
        size = _largest_common_size([of_run[proposer] for of_run in entries.values() if proposer in of_run])
        for name, of_run in entries.items():
            if proposer in of_run:
                about = {
                    "label": f"{labels[proposer]}\nwith {targets[name]}", "run": name, "target": runs[name].target,
                }  # fmt: skip
                entry = of_run[proposer]
                rows += [tar_cell(entry, set_name, size) | about for set_name in entry.sets]
    return rows


def _target_names(runs: NamedRuns) -> dict[str, str]:
    """Return a short name of each run's target, followed by the run's name if several runs have that target."""
    short = path_ends(run.target for run in runs.values())
    of_runs = [short[run.target] for run in runs.values()]
    names = [
        target if of_runs.count(target) == 1 else f"{target} ({name})"
        for name, target in zip(runs, of_runs, strict=True)
    ]
    return dict(zip(runs, number_if_equal([shorten(name) for name in names]), strict=True))


def _largest_common_size(entries: Sequence[Entry]) -> int:
    """Return the largest size at which all entries were replayed on all of their sets, or 0 if there is none."""
    sizes = [set(tars.tar) for entry in entries for tars in entry.sets.values()]
    return max(set.intersection(*sizes), default=0)


def _tar_by_target(rows: Rows, targets: Mapping[str, str]) -> str:
    """Return a sentence on the first proposer's TAR with each target, or with two if there are many."""
    first = rows[0]["name"]
    tars: dict[str, list[float]] = {}
    for row in rows:
        if row["name"] == first:
            tars.setdefault(targets[row["run"]], []).append(row["tar"])
    ranked = sorted(tars, key=lambda target: fmean(tars[target]))
    named = ranked if len(ranked) <= FEW_TARGETS else [ranked[0], ranked[-1]]
    by_target = ", ".join(f"{_from_to(tars[target])} with {target}" for target in named)
    return f"TAR of {first} by prompt set: {by_target}."


def _from_to(tars: Sequence[float]) -> str:
    low, high = f"{min(tars):.2f}", f"{max(tars):.2f}"
    return low if low == high else f"{low} to {high}"
