"""Where tables go: the terminal, or a wide page where there is none."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # where there is no terminal


def table_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
