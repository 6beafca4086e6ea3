"""Figures: a finding, a chart, the numbers behind it; or a sentence that says what is missing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt

from shallowdraft.reporting.run import Entry

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's, told apart by anyone
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
DASHES = ((1, 0), (6, 2), (2, 2), (8, 2, 2, 2), (4, 4), (10, 4))
SIZE = "lookahead: draft tokens an iteration (trees: nodes)"
SOLID = [1, 0]
OTHERS, GREY = "others", "#8A8A8A"
NEAR = alt.Scale(zero=False, nice=False, padding=14)  # around the data, with room for bars at its edges
INK = "currentColor"  # the page's, light or dark
LABEL_LIMIT = 165  # pixels, enough for the longest label
SHORT_LABEL = 18  # characters
WIDTH = 560  # of a chart outside the page

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

Cell = str | int | float | None
Values = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Table:
    """Numbers with units in the names of their columns."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    @property
    def shown(self) -> list[list[str]]:
        return [[shown(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """A chart with what it says."""

    id: str
    finding: str
    chart: alt.TopLevelMixin
    table: Table
    note: str = ""
    """How to read it."""
    height: int = 300

    def spec(self, *, width: int | None = None) -> dict[str, Any]:
        """Vega-Lite; without a width as wide as the page has room, without a title, which the page has."""
        sized = self.chart.properties(width=width or "container", height=self.height)
        made: dict[str, Any] = sized.to_dict()
        made["config"] = CONFIG | ({"background": "white"} if width else {})
        made["description"] = self.finding
        if width:
            made["title"] = {"text": wrapped(self.finding), "anchor": "start", "fontSize": 13, "offset": 12}
        else:
            made["autosize"] = {"type": "fit-x", "contains": "padding"}
        return made


@dataclass(frozen=True)
class Gap:
    """What is missing, why, and what to do about it."""

    what: str
    sentence: str
    command: str = ""


@dataclass(frozen=True)
class Section:
    """A question and its answers."""

    id: str
    title: str
    parts: list[Figure | Gap] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        return [one for one in self.parts if isinstance(one, Figure)]

    @property
    def shown(self) -> list[Figure | Gap]:
        """What is missing for the same reason is said at once, where the first of it would stand."""
        found: dict[str, Figure | Gap] = {}
        for part in self.parts:
            key = part.id if isinstance(part, Figure) else f"{part.sentence} {part.command}"
            before = found.get(key)
            if isinstance(part, Gap) and isinstance(before, Gap):
                part = replace(part, what=f"{before.what}, {part.what}")
            found[key] = part
        return list(found.values())


def shown(cell: Cell) -> str:
    """A cell as a person reads it."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        size = abs(cell)
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 4
        return f"{cell:,.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def wrapped(text: str, width: int = 80) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def data(rows: Values) -> alt.InlineData:
    return alt.InlineData(values=[dict(row) for row in rows])


def series_of(entries: Sequence[Entry]) -> dict[str, str]:
    """The series of each label: the first few have one each, all others one together."""
    return {one.label: one.label if at < len(COLOURS) else OTHERS for at, one in enumerate(entries)}


def _styled(series: Iterable[str], styles: Sequence[Any], other: Any) -> alt.Scale:
    names = list(dict.fromkeys(series))
    return alt.Scale(domain=names, range=[styles[at] if name != OTHERS else other for at, name in enumerate(names)])


def legend(names: Iterable[str], *, lines: bool = False) -> alt.Legend:
    """In columns, as far as a phone has room for them."""
    columns = 2 if max(map(len, names)) <= SHORT_LABEL else 1
    return alt.Legend(columns=columns, symbolType="stroke", symbolSize=400) if lines else alt.Legend(columns=columns)


def coloured(series: Mapping[str, str], *, lines: bool = False) -> alt.Color:
    scale = _styled(series.values(), (*COLOURS, GREY), GREY)
    return alt.Color("series:N", scale=scale, legend=legend(series.values(), lines=lines))


def shaped(series: Mapping[str, str]) -> alt.Shape:
    scale = _styled(series.values(), (*SHAPES, "circle"), "circle")
    return alt.Shape("series:N", scale=scale, legend=legend(series.values()))


def dashed(series: Mapping[str, str]) -> alt.StrokeDash:
    scale = _styled(series.values(), [*map(list, DASHES), SOLID], SOLID)
    return alt.StrokeDash("series:N", scale=scale, legend=legend(series.values(), lines=True))


def faded() -> Any:
    """All others stand back."""
    return alt.condition(f"datum.series == '{OTHERS}'", alt.value(0.4), alt.value(1))


def chosen(names: Sequence[str]) -> alt.Color:
    """Colours of things that are no proposers."""
    return alt.Color("kind:N", scale=_cycled(names, COLOURS), title=None, legend=legend(names))


def marked(names: Sequence[str]) -> alt.Shape:
    """Shapes of the same things; where colours begin again, shapes are others."""
    moved = [one for at in range(len(SHAPES)) for one in (*SHAPES[at:], *SHAPES[:at])]
    return alt.Shape("kind:N", scale=_cycled(names, moved), title=None, legend=legend(names))


def _cycled(names: Sequence[str], styles: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(names), range=[styles[at % len(styles)] for at in range(len(names))])


def stacked(rows: Values, x: alt.X, kinds: Sequence[str], tooltip: list[alt.Tooltip]) -> Any:
    """Bars of kinds, one behind the other as `order` says; labels as they come."""
    y = alt.Y("label:N", sort=list(dict.fromkeys(row["label"] for row in rows)), title=None)
    return alt.Chart(data(rows)).mark_bar().encode(x=x, y=y, color=chosen(kinds), order="order:Q", tooltip=tooltip)


def rows_high(count: int) -> int:
    """The height of a chart with so many rows."""
    return max(70, 34 * count)


def whole(numbers: Iterable[int]) -> alt.Axis:
    """An axis with ticks at these alone."""
    return alt.Axis(values=sorted(set(numbers)), format="d", labelOverlap="parity")


def percent(share: float) -> str:
    """With a space that does not break."""
    return f"{share:.0%}".replace("%", "\N{NO-BREAK SPACE}%")


def ordinal(number: int) -> str:
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
    return words[number - 1] if number <= len(words) else f"{number}th"


NO_REPLAYS = "No replays were kept; run the same study command again, it reuses all that is there."
UNFINISHED = "The study has not ended; run the same study command again, it goes on where it stopped."
NO_CURVES = (
    "This run has no predictions at every lookahead; run the same study command again, it reuses all that is there."
)
