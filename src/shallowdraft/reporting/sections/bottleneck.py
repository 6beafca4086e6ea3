"""The bottleneck: the parts of an iteration's time, their cost in speed-up, and the cost of depth and width."""

import shlex
from itertools import accumulate, pairwise
from typing import Any

import altair as alt

from shallowdraft.reporting.charts import (
    PROPOSER_TOOLTIP,
    TEXT_COLOUR,
    WHERE_TOOLTIP,
    chart_of,
    height_of_rows,
    integer_axis,
    kind_colour,
    stacked_bars,
)
from shallowdraft.reporting.figures import UNFINISHED, Figure, Gap, Table, percent
from shallowdraft.reporting.run import Entry, RunView, ShapeStep

WIDTH_COLOURS = alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0.25, 0.85]))  # visible on white and on black
NUMBER_ROOM = 1.2  # times the longest bar: the axis, so that a number fits after the bar
CHANGES = ("speed-up", "loss", "gain")
PARTS = {"drafting": "draft_s", "verification": "verify_s", "the rest": "other_s"}


def time_split(run: RunView) -> Figure | Gap:
    """Chart the parts of an iteration's time, like the paper's Figure 3."""
    entries = run.predicted
    if not entries:
        return Gap("time of an iteration by part", UNFINISHED)
    rows = [row for entry in entries for row in _part_rows(entry)]
    tooltip = [
        PROPOSER_TOOLTIP,
        WHERE_TOOLTIP,
        alt.Tooltip("kind:N", title="part"),
        alt.Tooltip("ms:Q", format=".3f"),
        alt.Tooltip("share:Q", title="of the iteration", format=".0%"),
    ]
    chart = stacked_bars(rows, alt.X("ms:Q", title="ms per iteration", stack="zero"), list(PARTS), tooltip)
    parts = ", ".join(f"{row['kind']} {percent(row['share'])}" for row in _part_rows(entries[0]))
    table = Table(
        ("proposer", "size", "part", "ms", "share %"),
        [(row["name"], row["where"], row["kind"], row["ms"], 100 * row["share"]) for row in rows],
    )
    note = (
        "Each proposer at its best size, at the machine's speed during its live runs, or while profiling if it did "
        "not run live."
    )
    finding = f"The time of an iteration with {entries[0].label}: {parts}."
    return Figure("time", finding, chart, table, note, height_of_rows(len(entries)))


def _part_rows(entry: Entry) -> list[dict[str, Any]]:
    times = entry.best.iteration
    return [
        {
            "label": entry.label,
            "name": entry.name,
            "where": entry.best.where,
            "kind": part,
            "order": order,
            "ms": 1e3 * getattr(times, field),
            "share": getattr(times, field) / times.total_s,
        }
        for order, (part, field) in enumerate(PARTS.items())
    ]


def waterfall(run: RunView) -> Figure | Gap:
    """Chart the losses of the fastest proposer between the ideal speed-up, its TAR, and the predicted one."""
    if not run.predicted:
        return Gap("from the ideal speed-up to the predicted one", UNFINISHED)
    fastest = run.predicted[0]
    steps = fastest.best.waterfall
    levels = list(accumulate((-loss for loss in steps.losses.values()), initial=steps.ideal))
    rows = [_speed_up_step("ideal: TAR", steps.ideal)]
    for (step, loss), (before, after) in zip(steps.losses.items(), pairwise(levels), strict=True):
        kind = "loss" if loss >= 0 else "gain"
        rows.append({"step": step, "from": before, "to": after, "kind": kind, "change": -loss})
    rows.append(_speed_up_step("predicted", steps.actual))
    base = chart_of(rows).encode(y=alt.Y("step:N", sort=[row["step"] for row in rows], title=None))
    scale = alt.Scale(domainMax=NUMBER_ROOM * max(levels))
    bars = base.mark_bar().encode(
        x=alt.X("from:Q", title="speed-up over plain decoding", scale=scale),
        x2="to:Q",
        color=kind_colour([kind for kind in CHANGES if any(row["kind"] == kind for row in rows)]),
        tooltip=[alt.Tooltip("step:N"), alt.Tooltip("change:Q", title="change of the speed-up", format="+.3f")],
    )
    numbers = base.mark_text(align="left", dx=5, color=TEXT_COLOUR).encode(x="end:Q", text="number:N")
    chart = alt.layer(bars, numbers).transform_calculate(
        end="max(datum.from, datum.to)",
        number="format(datum.change, datum.kind == 'speed-up' ? '.2f' : '+.2f')",
    )
    finding = (
        f"Of the ideal speed-up of {fastest.label}, {steps.ideal:.2f}, {steps.losses_text}: {steps.actual:.2f} is left."
    )
    table = Table(("step", "change of the speed-up"), [(row["step"], row["change"]) for row in rows])
    note = "If drafting were free and verifying took as long as one plain token, the speed-up would be TAR."
    return Figure("waterfall", finding, chart, table, note, height_of_rows(len(rows)))


def _speed_up_step(step: str, speed_up: float) -> dict[str, Any]:
    return {"step": step, "from": 0.0, "to": speed_up, "kind": "speed-up", "change": speed_up}


def latency_of_shapes(run: RunView) -> Figure | Gap:
    """Chart the time of a draft step against depth and width, like the paper's Figure 4."""
    if not run.steps:
        sentence = "No shapes were timed, so the cost of depth cannot be told from the cost of width; run"
        options = ("--target", run.target, "--shapes", "auto", "--out", f"{run.folder}/profile.jsonl")
        return Gap("latency against depth and width", sentence, shlex.join(("shallowdraft", "profile", *options)))
    rows: list[dict[str, Any]] = [
        {"shape": step.shape, "layers": step.layers, "width": step.d_model, "ms": 1e3 * step.step_s}
        for step in sorted(run.steps, key=lambda step: (step.d_model, step.layers))
    ]
    base = chart_of(rows).encode(
        x=alt.X("layers:Q", title="layers", axis=integer_axis(step.layers for step in run.steps)),
        y=alt.Y("ms:Q", title="ms per draft step"),
        color=alt.Color("width:O", scale=WIDTH_COLOURS, legend=alt.Legend(title="width", columns=4)),
    )
    tooltip = [alt.Tooltip("shape:N"), alt.Tooltip("ms:Q", title="ms per draft step", format=".4f")]
    chart = alt.layer(base.mark_line(), base.mark_point(filled=True, size=60, opacity=1).encode(tooltip=tooltip))
    table = Table(("shape", "layers", "width", "ms per draft step"), [tuple(row.values()) for row in rows])
    note = "The drafts have random weights; trained drafts of the same shape are as fast."
    return Figure("latency", _cost_of_depth(run.steps), chart, table, note)


def _cost_of_depth(steps: list[ShapeStep]) -> str:
    """Compare the shallowest and the deepest shape of the width at which most depths were timed."""
    widths = [step.d_model for step in steps]
    width = max(set(widths), key=lambda width: (widths.count(width), width))
    of_width = sorted((step for step in steps if step.d_model == width), key=lambda step: step.layers)
    shallow, deep = of_width[0], of_width[-1]
    if shallow.layers == deep.layers:
        return f"A draft step of {shallow.shape} takes {1e3 * shallow.step_s:.2f} ms."
    compared = f"{deep.step_s / shallow.step_s:.1f} times as long with {deep.layers} layers as with {shallow.layers}"
    return f"At width {width}, a draft step takes {compared}."
