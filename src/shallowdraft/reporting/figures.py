"""Figures: a finding, a chart and the numbers behind it; or a gap, which says what is missing and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt

from shallowdraft.display.tabular import Cell, format_cell
from shallowdraft.reporting.charts import CONFIG

NO_REPLAYS = "The run has no replays. Run the same study command again; it reuses the records that exist."
UNFINISHED = "The study has not finished. Run the same study command again; it continues where it stopped."
NO_CURVES = (
    "The run has no predictions at every lookahead. Run the same study command again; it reuses the records that exist."
)
PROMPT_INTERVALS = "Bars are 95\N{NO-BREAK SPACE}% intervals over prompts."
BOUNDS = ("95 % from", "95 % to")
"""Columns of an interval."""


@dataclass(frozen=True)
class Table:
    """The numbers of a chart; the names of the columns have their units."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    @property
    def formatted_rows(self) -> list[list[str]]:
        """The rows as a person reads them."""
        return [[format_cell(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """A chart and what it says."""

    id: str
    """Its anchor on the page and the name of its files."""
    finding: str
    """A sentence with what the data say; it is the title."""
    chart: alt.TopLevelMixin
    table: Table
    note: str = ""
    """Explanation of how to read the chart."""
    height: int = 300
    """Pixels."""

    def spec(self, *, width: int | None = None) -> dict[str, Any]:
        """Return the Vega-Lite specification.

        Without a width, in pixels, the chart fills the page and has no title, as the page shows the finding. With one
        it stands alone: on white, under the finding.
        """
        sized = self.chart.properties(width=width or "container", height=self.height)
        spec: dict[str, Any] = sized.to_dict()
        spec["config"] = CONFIG | ({"background": "white"} if width else {})
        spec["description"] = self.finding
        if width:
            spec["title"] = {"text": wrap(self.finding), "anchor": "start", "fontSize": 13, "offset": 12}
        else:
            spec["autosize"] = {"type": "fit-x", "contains": "padding"}
        return spec


@dataclass(frozen=True)
class Gap:
    """Something that the run lacks, why, and how to add it."""

    what: str
    sentence: str
    command: str = ""
    """A command line that adds it."""


@dataclass(frozen=True)
class Section:
    """A question and its answers."""

    id: str
    title: str
    parts: list[Figure | Gap] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        """The answers that the run has."""
        return [part for part in self.parts if isinstance(part, Figure)]

    @property
    def merged_parts(self) -> list[Figure | Gap]:
        """The parts, where gaps with the same reason are one gap in the place of the first."""
        merged: dict[str, Figure | Gap] = {}
        for part in self.parts:
            key = part.id if isinstance(part, Figure) else f"{part.sentence} {part.command}"
            before = merged.get(key)
            if isinstance(part, Gap) and isinstance(before, Gap):
                merged[key] = replace(part, what=f"{before.what}, {part.what}")
            else:
                merged[key] = part
        return list(merged.values())


def percent(share: float) -> str:
    """Return a share in percent, with a space that does not break."""
    return f"{share:.0%}".replace("%", "\N{NO-BREAK SPACE}%")


def interval(bounds: tuple[float, float]) -> str:
    """Return a 95 % interval as part of a sentence."""
    low, high = bounds
    return f"95\N{NO-BREAK SPACE}%: {low:.2f} to {high:.2f}"


def ordinal(number: int) -> str:
    """Return "first", "second" and so on."""
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
    return words[number - 1] if number <= len(words) else f"{number}th"


def wrap(text: str, width: int = 80) -> list[str]:
    """Break a text into lines of fewer characters than the width."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
