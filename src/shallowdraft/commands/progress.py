"""A line of progress on stderr for work that can be counted; into a log, a new line now and then."""

import time
from collections.abc import Iterator

LOG_EVERY_S = 30


def follow(name: str, done: Iterator[int], total: int) -> None:
    """Take an iterator of how much is done to its end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shallowdraft.commands.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    said_s = time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(name, total=total)
            for count in done:
                progress.update(task, completed=count)
                if not console.is_terminal and time.monotonic() - said_s > LOG_EVERY_S:
                    said_s = time.monotonic()
                    console.print(f"{name}: {count} of {total}", style="dim")
    except KeyboardInterrupt:
        console.print("what is done is kept; the same command goes on", style="dim")
        raise
