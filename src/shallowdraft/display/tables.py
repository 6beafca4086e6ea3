"""Tables, and where they go: the terminal, or a wide page where there is none."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from shallowdraft.display.console import Console

WIDTH = 120  # where there is no terminal


def table_console() -> "Console":
    from shallowdraft.display.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def new_table(*columns: str, title: str | None = None) -> "Table":
    """The first column is a name, the others are figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
