"""Sliders on the throughput model of `cost.py`, which is written again as Vega expressions.

Drafting and verification take their factors times as long and, as memory bandwidth limits both at batch 1, less with
more bandwidth; the rest of an iteration stays. TAR - 1, the accepted tokens, is scaled too, as far as the lookahead
allows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from shallowdraft.cost import Prediction
from shallowdraft.reporting.charts import (
    REFERENCE_DASH,
    SIZE_TITLE,
    TEXT_COLOUR,
    TIGHT_SCALE,
    TOKENS_PER_S_TITLE,
    WHERE_TOOLTIP,
    chart_of,
    integer_axis,
    series_colour,
    series_dash,
    series_of,
    series_opacity,
)
from shallowdraft.reporting.figures import NO_CURVES, UNFINISHED, Figure, Gap, Table
from shallowdraft.reporting.run import Entry, RunView

SLIDERS = {
    "draft_latency": ("draft latency ×", 0.1, 4.0, 0.05),
    "target_latency": ("target latency ×", 0.1, 4.0, 0.05),
    "acceptance": ("accepted tokens ×", 0.0, 2.0, 0.05),
    "bandwidth": ("memory bandwidth ×", 0.25, 8.0, 0.25),
}
"""The title, least and greatest value and step of each parameter."""
LOOKAHEAD = "lookahead"

EXPRESSIONS = {
    "new_tar": "max(1, min(datum.most_tar, 1 + (datum.tar - 1) * acceptance))",
    "seconds": "(datum.draft_s * draft_latency + datum.verify_s * target_latency) / bandwidth + datum.other_s",
    "tokens_per_s": "datum.new_tar / datum.seconds",
    "speed_up": "datum.tokens_per_s * datum.plain_s * target_latency / bandwidth",
}
"""New fields of each row, in the order in which they are computed."""


def parameters(sizes: Sequence[int]) -> list[alt.Parameter]:
    """Return the sliders; the lookahead is a list if the sizes have gaps."""
    sliders = [
        alt.param(name=name, value=1, bind=alt.binding_range(name=title, min=low, max=high, step=step))
        for name, (title, low, high, step) in SLIDERS.items()
    ]
    gapless = list(range(min(sizes), max(sizes) + 1)) == list(sizes)
    slider = alt.binding_range(name=LOOKAHEAD, min=min(sizes), max=max(sizes), step=1)
    bind = slider if gapless else alt.binding_select(name=LOOKAHEAD, options=list(sizes))
    return [*sliders, alt.param(name=LOOKAHEAD, value=sizes[len(sizes) // 2], bind=bind)]


def what_if(run: RunView) -> Figure | Gap:
    """Chart the predicted throughput at every size, as the sliders change the model's inputs."""
    entries = [entry for entry in run.predicted if entry.curve]
    if not entries:
        return Gap("what if", NO_CURVES if run.verdict else UNFINISHED)
    series = series_of(entries)
    rows = [row | {"series": series[entry.label]} for entry in entries for row in _curve_rows(entry)]
    sizes = sorted({row["size"] for row in rows})
    base = chart_of(rows)
    for name, expression in EXPRESSIONS.items():
        base = base.transform_calculate(**{name: expression})
    x = alt.X("size:Q", title=SIZE_TITLE, axis=integer_axis(sizes), scale=TIGHT_SCALE)
    curves = base.mark_line(point=True).encode(
        x=x,
        y=alt.Y("tokens_per_s:Q", title=TOKENS_PER_S_TITLE, scale=TIGHT_SCALE),
        color=series_colour(series, lines=True),
        strokeDash=series_dash(series),
        opacity=series_opacity(),
        detail="label:N",
        tooltip=[
            alt.Tooltip("label:N", title="proposer"),
            WHERE_TOOLTIP,
            alt.Tooltip("tokens_per_s:Q", title=TOKENS_PER_S_TITLE, format=".1f"),
            alt.Tooltip("speed_up:Q", title="speed-up", format=".2f"),
            alt.Tooltip("new_tar:Q", title="TAR", format=".2f"),
        ],
    )
    selected = chart_of([{}]).transform_calculate(size=LOOKAHEAD)
    layers = [
        selected.mark_rule(strokeDash=REFERENCE_DASH, color=TEXT_COLOUR).encode(x=x),
        curves,
        _fastest_in_words(base, "'best '", -66),
        _fastest_in_words(base.transform_filter(f"datum.size == {LOOKAHEAD}"), "''", -30),
    ]
    columns = ("proposer", "size", "TAR", "draft ms", "verify ms", "rest ms", "plain token ms")
    note = (
        "Move the sliders: the predicted curves and the best choice follow. More memory bandwidth makes drafting, "
        "verification and plain decoding faster alike, as at batch size 1; the rest of an iteration takes as long as "
        "before."
    )
    chart = alt.layer(*layers).add_params(*parameters(sizes))
    table = Table(columns, [_table_row(row) for row in rows])
    return Figure("what-if", _if_drafting_were_faster(entries), chart, table, note, 320)


def _curve_rows(entry: Entry) -> list[dict[str, Any]]:
    return [
        {
            "label": entry.label,
            "where": prediction.where,
            "size": prediction.size,
            "lookahead": prediction.lookahead,
            "tar": prediction.tar,
            "most_tar": prediction.most_tar,
            "plain_s": prediction.plain_s,
            **prediction.iteration.to_json(),
        }
        for prediction in entry.curve
    ]


def _table_row(row: dict[str, Any]) -> tuple[Any, ...]:
    times_ms = (1e3 * row[name] for name in ("draft_s", "verify_s", "other_s", "plain_s"))
    return (row["label"], row["size"], row["tar"], *times_ms)


def _if_drafting_were_faster(entries: Sequence[Entry]) -> str:
    """Return a sentence on the best choice if drafting took half the time."""
    predictions = [(entry.label, prediction) for entry in entries for prediction in entry.curve]
    now = max(prediction.speed_up for _, prediction in predictions)
    faster = [(label, _with_half_draft_time(prediction)) for label, prediction in predictions]
    label, best = max(faster, key=lambda labelled: labelled[1].speed_up)
    return (
        f"If drafting were twice as fast, the best choice would be {label} {best.where}: "
        f"{best.speed_up:.2f} times plain decoding instead of {now:.2f}."
    )


def _with_half_draft_time(prediction: Prediction) -> Prediction:
    return replace(prediction, iteration=replace(prediction.iteration, draft_s=prediction.iteration.draft_s / 2))


def _fastest_in_words(base: alt.Chart, prefix: str, y: int) -> Any:
    """Return a layer with the figures of the fastest row as text, `y` pixels below the top of the chart.

    The prefix is a Vega expression.
    """
    figures = "format(datum.tokens_per_s, ',.3~r') + ' tokens/s, ' + format(datum.speed_up, '.2f') + '×'"
    text = f"{prefix} + datum.where + ': ' + {figures} + '\\n' + datum.label"
    return (
        base.transform_window(rank="row_number()", sort=[alt.SortField("tokens_per_s", "descending")])
        .transform_filter("datum.rank == 1")
        .transform_calculate(words=text)
        .mark_text(align="left", color=TEXT_COLOUR, fontWeight="bold", lineBreak="\n", limit=0)
        .encode(x=alt.value(0), y=alt.value(y), text="words:N")
    )
