"""Styles that the charts share: colours, shapes, dashes, scales, axes and tooltips.

A series is a proposer; a kind is anything else that is told apart by colour: parts of an iteration, servers, runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from shallowdraft.reporting.run import Entry

Rows = Sequence[Mapping[str, Any]]
"""The data of a chart, one mark each."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's, told apart by anyone
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
DASHES = ([1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4])
OTHERS, GREY, SOLID = "others", "#8A8A8A", [1, 0]
TEXT_COLOUR = "currentColor"  # the page's, light or dark
REFERENCE_DASH = [4, 4]  # of lines that are no data: plain decoding, equality, the fastest proposer
LABEL_LIMIT = 165  # pixels, enough for the longest label
SHORT_LABEL = 18  # characters
ROW_HEIGHT, LEAST_HEIGHT = 34, 70  # pixels

SIZE_TITLE = "lookahead: draft tokens (trees: nodes)"
TAR_TITLE = "TAR: tokens per iteration"
TOKENS_PER_S_TITLE = "tokens per second"

TIGHT_SCALE = alt.Scale(zero=False, nice=False, padding=14)  # around the data, with room for marks at its ends
PROPOSER_TOOLTIP = alt.Tooltip("name:N", title="proposer")
WHERE_TOOLTIP = alt.Tooltip("where:N", title="size")

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridOpacity": 0.5},
    "axisQuantitative": {"tickCount": 6},
    "axisY": {"labelLimit": LABEL_LIMIT},
    "rule": {"strokeWidth": 1.5},
    "legend": {"orient": "bottom", "labelFontSize": 12, "labelLimit": LABEL_LIMIT, "title": None},
    "text": {"fontSize": 12},
}


def chart_of(rows: Rows) -> alt.Chart:
    """Return a chart without marks that holds its data."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def series_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the series of each label: the first entries have one each, all others share one."""
    return {entry.label: entry.label if number < len(COLOURS) else OTHERS for number, entry in enumerate(entries)}


def series_colour(series: Mapping[str, str], *, lines: bool = False) -> alt.Color:
    """Return the colours of series; `lines` draws lines in the legend too."""
    scale = _series_scale(series, (*COLOURS, GREY), GREY)
    return alt.Color("series:N", scale=scale, legend=_legend(series.values(), lines=lines))


def series_shape(series: Mapping[str, str]) -> alt.Shape:
    """Return the shapes of series."""
    scale = _series_scale(series, (*SHAPES, "circle"), "circle")
    return alt.Shape("series:N", scale=scale, legend=_legend(series.values()))


def series_dash(series: Mapping[str, str]) -> alt.StrokeDash:
    """Return the dashes of series."""
    scale = _series_scale(series, (*DASHES, SOLID), SOLID)
    return alt.StrokeDash("series:N", scale=scale, legend=_legend(series.values(), lines=True))


def series_opacity() -> Any:
    """Return the opacity of series: the one that many proposers share is faint."""
    return alt.condition(f"datum.series == '{OTHERS}'", alt.value(0.4), alt.value(1))


def _series_scale(series: Mapping[str, str], styles: Sequence[Any], others: Any) -> alt.Scale:
    names = list(dict.fromkeys(series.values()))
    return alt.Scale(
        domain=names, range=[others if name == OTHERS else style for name, style in zip(names, styles, strict=False)]
    )


def _legend(names: Iterable[str], *, lines: bool = False) -> alt.Legend:
    """Return a legend with as many columns as a phone has room for."""
    columns = 2 if max(map(len, names)) <= SHORT_LABEL else 1
    return alt.Legend(columns=columns, symbolType="stroke", symbolSize=400) if lines else alt.Legend(columns=columns)


def kind_colour(kinds: Sequence[str]) -> alt.Color:
    """Return the colours of kinds."""
    return alt.Color("kind:N", scale=_cycling_scale(kinds, COLOURS), title=None, legend=_legend(kinds))


def kind_shape(kinds: Sequence[str]) -> alt.Shape:
    """Return the shapes of kinds; where the colours begin again, the shapes are shifted, so that each pair is new."""
    shifted = [shape for start in range(len(SHAPES)) for shape in (*SHAPES[start:], *SHAPES[:start])]
    return alt.Shape("kind:N", scale=_cycling_scale(kinds, shifted), title=None, legend=_legend(kinds))


def _cycling_scale(kinds: Sequence[str], styles: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(kinds), range=[styles[number % len(styles)] for number in range(len(kinds))])


def stacked_bars(rows: Rows, x: alt.X, kinds: Sequence[str], tooltip: list[alt.Tooltip]) -> Any:
    """Return one bar per label, in the order of the rows, made of kinds in the order of the field `order`."""
    y = alt.Y("label:N", sort=list(dict.fromkeys(row["label"] for row in rows)), title=None)
    return chart_of(rows).mark_bar().encode(x=x, y=y, color=kind_colour(kinds), order="order:Q", tooltip=tooltip)


def height_of_rows(count: int) -> int:
    """Return the height in pixels of a chart with this number of labels."""
    return max(LEAST_HEIGHT, ROW_HEIGHT * count)


def integer_axis(numbers: Iterable[int]) -> alt.Axis:
    """Return an axis with ticks at these numbers only."""
    return alt.Axis(values=sorted(set(numbers)), format="d", labelOverlap="parity")
