"""Why: where the time of an iteration goes, what it takes of the ideal speed-up, what depth and width cost."""

import shlex
from itertools import accumulate, pairwise
from typing import Any

import altair as alt

from shallowdraft.reporting.figures import (
    INK,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    chosen,
    data,
    percent,
    rows_high,
    stacked,
    whole,
)
from shallowdraft.reporting.run import Entry, RunView, ShapeStep

SEEN = alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0.25, 0.85]))  # on white and on black
ROOM = 1.2  # for numbers behind bars
CHANGES = ("speed-up", "loss", "gain")
PARTS = {"drafting": "draft_s", "verifying": "verify_s", "the rest": "other_s"}


def time_split(run: RunView) -> Figure | Gap:
    """The paper's Figure 3."""
    found = run.predicted
    if not found:
        return Gap("time of an iteration by part", UNFINISHED)
    rows = [row for one in found for row in _parts(one)]
    tooltip = [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("where:N", title="size"),
        alt.Tooltip("kind:N", title="part"),
        alt.Tooltip("ms:Q", format=".3f"),
        alt.Tooltip("share:Q", title="of the iteration", format=".0%"),
    ]
    chart = stacked(rows, alt.X("ms:Q", title="ms an iteration", stack="zero"), list(PARTS), tooltip)
    first = _parts(found[0])
    said = ", ".join(f"{row['kind']} {percent(row['share'])}" for row in first)
    table = Table(
        ("proposer", "size", "part", "ms", "share %"),
        [(row["name"], row["where"], row["kind"], row["ms"], 100 * row["share"]) for row in rows],
    )
    finding = f"Of an iteration with {found[0].label}: {said}."
    return Figure(
        "time",
        finding,
        chart,
        table,
        "Each proposer at its best size, on the machine as it met it.",
        rows_high(len(found)),
    )


def _parts(one: Entry) -> list[dict[str, Any]]:
    times = one.best.iteration
    return [
        {
            "label": one.label,
            "name": one.name,
            "where": one.best.where,
            "kind": kind,
            "order": order,
            "ms": 1e3 * getattr(times, part),
            "share": getattr(times, part) / times.total_s,
        }
        for order, (kind, part) in enumerate(PARTS.items())
    ]


def waterfall(run: RunView) -> Figure | Gap:
    """From the ideal speed-up of the winner, its TAR, to the actual one."""
    if not run.predicted:
        return Gap("from the ideal speed-up to the actual one", UNFINISHED)
    first = run.predicted[0]
    fall = first.best.waterfall
    losses = fall.losses
    levels = list(accumulate((-loss for loss in losses.values()), initial=fall.ideal))
    rows = [_whole("ideal: TAR", fall.ideal)]
    for (step, loss), (before, after) in zip(losses.items(), pairwise(levels), strict=True):
        rows.append(
            {"step": step, "from": before, "to": after, "kind": "loss" if loss >= 0 else "gain", "change": -loss}
        )
    rows.append(_whole("predicted", fall.actual))
    base = alt.Chart(data(rows)).encode(y=alt.Y("step:N", sort=[row["step"] for row in rows], title=None))
    bars = base.mark_bar().encode(
        x=alt.X("from:Q", title="speed-up over plain decoding", scale=alt.Scale(domainMax=ROOM * max(levels))),
        x2="to:Q",
        color=chosen([kind for kind in CHANGES if any(row["kind"] == kind for row in rows)]),
        tooltip=[alt.Tooltip("step:N"), alt.Tooltip("change:Q", format="+.3f")],
    )
    numbers = base.mark_text(align="left", dx=5, color=INK).encode(x="end:Q", text="said:N")
    chart = alt.layer(bars, numbers).transform_calculate(
        end="max(datum.from, datum.to)",
        said="format(datum.change, datum.kind == 'speed-up' ? '.2f' : '+.2f')",
    )
    finding = f"Of {first.label}'s ideal {fall.ideal:.2f}, {fall.losses_text}: {fall.actual:.2f} is left."
    table = Table(("step", "change of the speed-up"), [(row["step"], row["change"]) for row in rows])
    note = "If drafting were free and verifying took as long as one plain token, the speed-up would be TAR."
    return Figure("waterfall", finding, chart, table, note, rows_high(len(rows)))


def _whole(step: str, speed_up: float) -> dict[str, Any]:
    return {"step": step, "from": 0.0, "to": speed_up, "kind": "speed-up", "change": speed_up}


def latency_of_shapes(run: RunView) -> Figure | Gap:
    """The paper's Figure 4."""
    if not run.steps:
        sentence = "No shapes were timed, so that depth and width cannot be told apart; run"
        options = ("--target", run.target, "--shapes", "auto", "--out", f"{run.folder}/profile.jsonl")
        return Gap("latency against depth and width", sentence, shlex.join(("shallowdraft", "profile", *options)))
    rows: list[dict[str, Any]] = [
        {"shape": one.shape, "layers": one.layers, "width": one.d_model, "ms": 1e3 * one.step_s}
        for one in sorted(run.steps, key=lambda one: (one.d_model, one.layers))
    ]
    base = alt.Chart(data(rows)).encode(
        x=alt.X("layers:Q", title="layers", axis=whole(one.layers for one in run.steps)),
        y=alt.Y("ms:Q", title="ms a draft step"),
        color=alt.Color("width:O", scale=SEEN, legend=alt.Legend(title="width", columns=4)),
    )
    tooltip = [alt.Tooltip("shape:N"), alt.Tooltip("ms:Q", format=".4f")]
    chart = alt.layer(base.mark_line(), base.mark_point(filled=True, size=60, opacity=1).encode(tooltip=tooltip))
    table = Table(("shape", "layers", "width", "ms a draft step"), [tuple(row.values()) for row in rows])
    note = "Drafts with random weights: their speed is that of trained ones of the same shape."
    return Figure("latency", _depth(run.steps), chart, table, note)


def _depth(steps: list[ShapeStep]) -> str:
    """Of the width at which most depths were timed."""
    widths = [one.d_model for one in steps]
    most = max(set(widths), key=lambda width: (widths.count(width), width))
    of_width = sorted((one for one in steps if one.d_model == most), key=lambda one: one.layers)
    few, many = of_width[0], of_width[-1]
    if few.layers == many.layers:
        return f"A draft step of {few.shape} takes {1e3 * few.step_s:.2f} ms."
    times = many.step_s / few.step_s
    return f"At width {most}, {many.layers} layers take {times:.1f} times as long a step as {few.layers}."
