"""A line of progress on stderr for work that can be counted; into a log, a new line now and then.

It is drawn only when something is done, never by a thread of its own: nothing may come between what is being timed.
"""

import time
from collections.abc import Iterable, Iterator

LOG_EVERY_S = 30
DRAW_EVERY_S = 0.1


def follow(name: str, done: Iterable[int], total: int) -> None:
    """Take an iterator of how much is done to its end."""
    for _ in shown(name, done, total):
        pass


def shown(name: str, done: Iterable[int], total: int) -> Iterator[int]:
    """Hand on how much is done, and show it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shallowdraft.commands.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    every_s = DRAW_EVERY_S if console.is_terminal else LOG_EVERY_S
    due_s = time.monotonic() + (0 if console.is_terminal else every_s)
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    try:
        with bar as progress:
            task = progress.add_task(name, total=total)
            for count in done:
                due = time.monotonic() >= due_s
                progress.update(task, completed=count, refresh=due)
                if due and not console.is_terminal:
                    console.print(f"{name}: {count} of {total}", style="dim")
                due_s = time.monotonic() + every_s if due else due_s
                yield count
    except KeyboardInterrupt:
        console.print("what is done is kept; the same command goes on", style="dim")
        raise


def notes(lines: Iterable[str]) -> None:
    """What the user should know beside the result: a line each on stderr."""
    from shallowdraft.commands.console import Console

    console = Console(stderr=True, highlight=False)
    for line in lines:
        console.print(line, style="dim", soft_wrap=True)
