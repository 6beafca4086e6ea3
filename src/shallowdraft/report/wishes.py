"""What would be better: the TAR and the latency at which each proposer would be the fastest."""

from typing import Any

import altair as alt

from shallowdraft import cost
from shallowdraft.cost import Iteration, Prediction
from shallowdraft.report.figures import (
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
from shallowdraft.report.run import Entry, Run

FURTHEST = 1.25  # of the best speed


def required_tar(run: Run) -> Figure | Gap:
    """The paper's Figure 11; in the table Figure 7 and Table 5."""
    found = run.predicted
    if not found:
        return Gap("required", UNFINISHED)
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
    columns = ("proposer", "TAR", "needed TAR", "extra TAR", "highest TAR there can be", "draft ms", "parity draft ms")
    table = Table(columns, [_row(one, winner) for one in found])
    note = (
        "By the throughput model. A line is the TAR that a proposer needs for a speed-up, its point where it stands; "
        "the dashed line is the winner. Needed TAR, parity draft ms: the TAR, or else the time of drafting, at which "
        "it would be as fast as the winner; below 0 ms no draft of that TAR can be."
    )
    return Figure("required", _finding(found), alt.layer(best, lines, points), table, note, 320)


def _needed(one: Prediction, speed_up: float) -> float:
    return cost.required_tar(speed_up / one.plain_s, one.iteration)


def _needs(one: Entry, speed_up: float) -> dict[str, Any]:
    return {"label": one.label, "name": one.name, "speed_up": speed_up, "tar": _needed(one.best, speed_up)}


def _row(one: Entry, winner: Prediction) -> tuple[Cell, ...]:
    """Against the winner on the machine as this one met it."""
    here, pace = one.best, one.best.plain_s / winner.plain_s
    best = (winner.tar, Iteration(*(pace * seconds for seconds in vars(winner.iteration).values())))
    extra = cost.extra_tar(here.tar, here.iteration, *best)
    parity = cost.parity_latency(here.tar, here.iteration, *best)
    draft_ms = 1e3 * here.iteration.draft_s
    return one.name, here.tar, here.tar + extra, extra, here.lookahead + 1, draft_ms, 1e3 * parity


def _finding(found: list[Entry]) -> str:
    winner = found[0]
    if len(found) == 1:
        has = f"{winner.best.tar:.2f} {winner.best.where}"
        return f"{winner.label} breaks even at TAR {winner.best.break_even_tar:.2f} and has {has}."
    second = found[1]
    needed = _needed(second.best, winner.best.speed_up)
    said = f"To be as fast as {winner.label}, {second.label} needs TAR {needed:.2f}; it has {second.best.tar:.2f}"
    return f"{said}, which should be enough." if second.best.tar >= needed else f"{said}."
