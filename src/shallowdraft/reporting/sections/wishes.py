"""What would be better: the TAR that a speed-up takes."""

from typing import Any

import altair as alt

from shallowdraft import cost
from shallowdraft.cost import Prediction
from shallowdraft.reporting.figures import (
    INK,
    NEAR,
    UNFINISHED,
    Cell,
    Figure,
    Gap,
    Table,
    coloured,
    dashed,
    data,
    faded,
    series_of,
)
from shallowdraft.reporting.run import Entry, RunView

FURTHEST = 1.25  # of the best speed


def required_tar(run: RunView) -> Figure | Gap:
    """The paper's Figure 11."""
    found = run.predicted
    if not found:
        return Gap("TAR that a speed-up takes", UNFINISHED)
    winner, series = found[0].best, series_of(found)
    speed_ups = [one.best.speed_up for one in found]
    rows = [
        _needs(one, speed_up) | {"series": series[one.label]}
        for one in reversed(found)
        for speed_up in (min(1.0, *speed_ups), FURTHEST * max(speed_ups))
    ]
    here = [
        _needs(one, one.best.speed_up) | {"series": series[one.label], "needed": _needed(one.best, winner.speed_up)}
        for one in reversed(found)
    ]
    x = alt.X("speed_up:Q", title="wanted speed-up", scale=NEAR)
    y = alt.Y("tar:Q", title="TAR that it takes", scale=NEAR)
    style = {"x": x, "y": y, "color": coloured(series, lines=True), "opacity": faded()}
    lines = alt.Chart(data(rows)).mark_line().encode(strokeDash=dashed(series), detail="label:N", **style)
    tooltip = [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
        alt.Tooltip("needed:Q", title="TAR to be as fast as the winner", format=".2f"),
    ]
    points = alt.Chart(data(here)).mark_point(filled=True, size=80).encode(tooltip=tooltip, **style)
    best = alt.Chart(data([{"speed_up": winner.speed_up}])).mark_rule(strokeDash=[4, 4], color=INK).encode(x=x)
    columns = ("proposer", "size", "TAR", "TAR to break even", "TAR to be as fast as the winner")
    table = Table(columns, [_row(one, winner) for one in found])
    note = (
        "By the throughput model. A line is the TAR that a proposer needs for a speed-up, its point where it stands; "
        "the dashed line is the winner."
    )
    return Figure("required", _breaks_even(winner, found[0].label), alt.layer(best, lines, points), table, note, 320)


def _needed(one: Prediction, speed_up: float) -> float:
    return cost.required_tar(speed_up / one.plain_s, one.iteration)


def _needs(one: Entry, speed_up: float) -> dict[str, Any]:
    return {"label": one.label, "name": one.name, "speed_up": speed_up, "tar": _needed(one.best, speed_up)}


def _row(one: Entry, winner: Prediction) -> tuple[Cell, ...]:
    here = one.best
    return one.name, here.where, here.tar, here.break_even_tar, _needed(here, winner.speed_up)


def _breaks_even(one: Prediction, label: str) -> str:
    return f"{label} breaks even at TAR {one.break_even_tar:.2f} and has {one.tar:.2f} {one.where}."
