"""What if: the throughput model of `cost.py` as Vega expressions, on sliders.

Drafting and verifying scale with their factors and, being bound by memory at batch 1, against its bandwidth; the rest
of an iteration stays. TAR - 1, the accepted tokens, scales too, as far as the lookahead allows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from shallowdraft.cost import Prediction
from shallowdraft.reporting.figures import (
    INK,
    NEAR,
    NO_CURVES,
    SIZE,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    coloured,
    dashed,
    data,
    faded,
    series_of,
    whole,
)
from shallowdraft.reporting.run import Entry, RunView

SLIDERS = {
    "draft_latency": ("draft latency ×", 0.1, 4.0, 0.05),
    "target_latency": ("target latency ×", 0.1, 4.0, 0.05),
    "acceptance": ("accepted tokens ×", 0.0, 2.0, 0.05),
    "bandwidth": ("memory bandwidth ×", 0.25, 8.0, 0.25),
}
LOOKAHEAD = "lookahead"

EXPRESSIONS = {
    "new_tar": "max(1, min(datum.most_tar, 1 + (datum.tar - 1) * acceptance))",
    "seconds": "(datum.draft_s * draft_latency + datum.verify_s * target_latency) / bandwidth + datum.other_s",
    "tokens_per_s": "datum.new_tar / datum.seconds",
    "speed_up": "datum.tokens_per_s * datum.plain_s * target_latency / bandwidth",
}
"""In the order in which they are computed."""


def params(sizes: Sequence[int]) -> list[alt.Parameter]:
    """Sliders; where sizes have gaps, a list of them."""
    found = [
        alt.param(name=name, value=1, bind=alt.binding_range(name=title, min=low, max=high, step=step))
        for name, (title, low, high, step) in SLIDERS.items()
    ]
    whole = list(range(min(sizes), max(sizes) + 1)) == list(sizes)
    slider = alt.binding_range(name=LOOKAHEAD, min=min(sizes), max=max(sizes), step=1)
    bind = slider if whole else alt.binding_select(name=LOOKAHEAD, options=list(sizes))
    return [*found, alt.param(name=LOOKAHEAD, value=sizes[len(sizes) // 2], bind=bind)]


def what_if(run: RunView) -> Figure | Gap:
    found = [one for one in run.predicted if one.curve]
    if not found:
        return Gap("what if", NO_CURVES if run.verdict else UNFINISHED)
    series = series_of(found)
    rows: list[dict[str, Any]] = [
        {
            "label": one.label,
            "series": series[one.label],
            "where": point.where,
            "size": point.size,
            "lookahead": point.lookahead,
            "tar": point.tar,
            "most_tar": point.most_tar,
            "plain_s": point.plain_s,
            **point.iteration.to_json(),
        }
        for one in found
        for point in one.curve
    ]
    sizes = sorted({row["size"] for row in rows})
    base = alt.Chart(data(rows))
    for name, expression in EXPRESSIONS.items():
        base = base.transform_calculate(**{name: expression})
    x = alt.X("size:Q", title=SIZE, axis=whole(sizes), scale=NEAR)
    y = alt.Y("tokens_per_s:Q", title="tokens a second", scale=NEAR)
    curves = base.mark_line(point=True).encode(
        x=x,
        y=y,
        color=coloured(series, lines=True),
        strokeDash=dashed(series),
        opacity=faded(),
        detail="label:N",
        tooltip=[
            alt.Tooltip("label:N", title="proposer"),
            alt.Tooltip("where:N", title="size"),
            alt.Tooltip("tokens_per_s:Q", title="tokens a second", format=".1f"),
            alt.Tooltip("speed_up:Q", title="speed-up", format=".2f"),
            alt.Tooltip("new_tar:Q", title="TAR", format=".2f"),
        ],
    )
    at = alt.Chart(data([{}])).transform_calculate(size=LOOKAHEAD)
    rule = at.mark_rule(strokeDash=[4, 4], color=INK).encode(x=x)
    layers = [
        rule,
        curves,
        _said(base, "'best '", -66),
        _said(base.transform_filter(f"datum.size == {LOOKAHEAD}"), "''", -30),
    ]
    names = ("label", "size", "tar", "draft_s", "verify_s", "other_s", "plain_s")
    columns = ("proposer", "size", "TAR", "draft ms", "verify ms", "rest ms", "plain token ms")
    table = Table(columns, [tuple(1e3 * row[n] if n.endswith("_s") else row[n] for n in names) for row in rows])
    note = (
        "Move the sliders: the curves and the best choice, as predicted, follow. More bandwidth makes drafting, "
        "verifying and plain decoding faster alike; what else an iteration does stays as it is."
    )
    chart = alt.layer(*layers).add_params(*params(sizes))
    return Figure("what-if", _finding(found), chart, table, note, 320)


def _finding(found: Sequence[Entry]) -> str:
    """What drafts that take half the time would bring."""
    curves = [(one.label, point) for one in found for point in one.curve]
    now = max(point.speed_up for _, point in curves)
    label, best = max(((label, _halved(point)) for label, point in curves), key=lambda one: one[1].speed_up)
    said = f"What if? Were drafting twice as fast, the best would be {label} {best.where}"
    return f"{said}: {best.speed_up:.2f} times plain decoding instead of {now:.2f}."


def _halved(one: Prediction) -> Prediction:
    return replace(one, iteration=replace(one.iteration, draft_s=one.iteration.draft_s / 2))


def _said(base: alt.Chart, begin: str, y: int) -> Any:
    """The fastest of what is there, in words above the chart."""
    number = "format(datum.tokens_per_s, ',.3~r') + ' tokens/s, ' + format(datum.speed_up, '.2f') + '×'"
    text = f"{begin} + datum.where + ': ' + {number} + '\\n' + datum.label"
    return (
        base.transform_window(rank="row_number()", sort=[alt.SortField("tokens_per_s", "descending")])
        .transform_filter("datum.rank == 1")
        .transform_calculate(said=text)
        .mark_text(align="left", color=INK, fontWeight="bold", lineBreak="\n", limit=0)
        .encode(x=alt.value(0), y=alt.value(y), text="said:N")
    )
