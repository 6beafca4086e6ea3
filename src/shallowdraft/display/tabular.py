"""Results that show themselves as a table: in a terminal, in a notebook, as a data frame."""

from abc import abstractmethod
from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import Any

Cell = str | int | float | None

WIDTH = 160  # characters of a line of `repr`
MOST_ROWS = 40  # shown; data frames have all of them


class Tabular:
    """A result with a caption and rows; its subclasses are frozen dataclasses with `repr=False`."""

    @property
    @abstractmethod
    def caption(self) -> str:
        """A line that says what this is."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, with units."""

    @property
    @abstractmethod
    def cells(self) -> Sequence[tuple[Cell, ...]]:
        """The rows."""

    def data_frame(self) -> Any:
        """Return the rows as a pandas.DataFrame; pandas must be installed."""
        import pandas as pd

        return pd.DataFrame([list(row) for row in self.cells], columns=list(self.columns))

    def __repr__(self) -> str:
        from shallowdraft.display.console import Console
        from shallowdraft.display.tables import new_table

        table = new_table(*self.columns)
        for row in self.cells[:MOST_ROWS]:
            table.add_row(*map(format_cell, row))
        text = StringIO()
        Console(file=text, width=WIDTH, highlight=False, color_system=None).print(table)
        lines = [self.caption, *(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))]
        return "\n".join([*lines, *self._left_out()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = ("".join(f"<td>{escape(format_cell(cell))}</td>" for cell in row) for row in self.cells[:MOST_ROWS])
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(f"<p>{escape(line)}</p>" for line in self._left_out())
        return f"<p>{escape(self.caption)}</p><table><tr>{head}</tr>{body}</table>{notes}"

    def _left_out(self) -> list[str]:
        hidden = len(self.cells) - MOST_ROWS
        return [f"… and {hidden:,} more rows"] if hidden > 0 else []


def format_cell(cell: Cell) -> str:
    """Return a cell as a person reads it: three or four digits, and a dash for None."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        size = abs(cell)
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 4
        return f"{cell:,.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
