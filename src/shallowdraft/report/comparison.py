"""Two runs side by side."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from shallowdraft.report.figures import INK, NEAR, UNFINISHED, Cell, Figure, Gap, Table, chosen, data, legend, rows_high
from shallowdraft.report.run import Entry, Run


def compare(first: Run, second: Run) -> Figure | Gap:
    """Speed-ups of all that is in either."""
    if not (first.predicted and second.predicted):
        which = first if not first.predicted else second
        return Gap("comparison", f"{which.folder.name}: {UNFINISHED}")
    names = run_names(first, second)
    of_run = [{(one.drafter, one.draft): one for one in run.predicted} for run in (first, second)]
    keys = list(dict.fromkeys([*of_run[0], *of_run[1]]))
    rows: list[dict[str, Any]] = [
        {"label": found[key].label, "name": found[key].name, "kind": kind, **_bounds(run, found[key])}
        for kind, run, found in zip(names, (first, second), of_run, strict=True)
        for key in keys
        if key in found
    ]
    order = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda row: -row["speed_up"])))
    base = alt.Chart(data(rows)).encode(
        y=alt.Y("label:N", sort=order, title=None),
        yOffset=alt.YOffset("kind:N", sort=list(names)),
        color=chosen(names),
    )
    tooltip = [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("kind:N", title="run"),
        alt.Tooltip("speed_up:Q", title="speed-up", format=".3f"),
        alt.Tooltip("tokens_per_s:Q", title="tokens a second", format=".1f"),
    ]
    marks = alt.Scale(domain=list(names), range=["circle", "diamond"])
    shape = alt.Shape("kind:N", title=None, scale=marks, legend=legend(names))
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=alt.X("speed_up:Q", title="speed-up over plain decoding", scale=NEAR), shape=shape, tooltip=tooltip
    )
    bars = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=NEAR), x2="high:Q")
    even = alt.Chart(data([{"even": 1}])).mark_rule(strokeDash=[4, 4], color=INK).encode(x="even:Q")
    figures = ("speed-up", "TAR", "tokens/s")
    columns = ("proposer", *(f"{figure}, {name}" for figure in figures for name in names))
    table = Table(columns, [_row([(first, of_run[0].get(key)), (second, of_run[1].get(key))]) for key in keys])
    note = "Measured where it was run live, else predicted; bars are 95 % intervals over prompts."
    chart = alt.layer(even, bars, points)
    return Figure("comparison", _finding((first, second), names), chart, table, note, rows_high(len(order)))


def run_names(first: Run, second: Run) -> tuple[str, str]:
    """The folders' names, or A and B before them where they are the same."""
    one, other = first.folder.resolve().name, second.folder.resolve().name
    return (one, other) if one != other else (f"A: {one}", f"B: {other}")


def _bounds(run: Run, one: Entry) -> dict[str, float]:
    low, high = one.bounds
    return {"speed_up": one.speed_up, "low": low, "high": high, "tokens_per_s": run.tokens_per_s(one)}


def _row(pair: Sequence[tuple[Run, Entry | None]]) -> tuple[Cell, ...]:
    name = next(one.name for _, one in pair if one)
    speed_ups = [one.speed_up if one else None for _, one in pair]
    tars = [one.best.tar if one else None for _, one in pair]
    return (name, *speed_ups, *tars, *(run.tokens_per_s(one) if one else None for run, one in pair))


def _finding(runs: Sequence[Run], names: Sequence[str]) -> str:
    said = (
        f"{name}: {one.label} {one.best.where}, {one.speed_up:.2f} times, {run.tokens_per_s(one):.0f} tokens a second"
        for name, run, one in zip(names, runs, (run.predicted[0] for run in runs), strict=True)
    )
    return "The best of " + "; of ".join(said) + "."
