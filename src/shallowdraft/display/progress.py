"""Progress on stderr: on a terminal one line that is updated, in a pipe a line now and then.

It is drawn only when a step is done, never by a thread of its own: nothing may come between what is being timed.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

from shallowdraft.progress import Follow, Say, StepsDone, run_silently, say_nothing

Progress = bool | Callable[[str, int, int], None]
"""How to show progress: True draws bars on stderr or in the notebook, False shows nothing; a function is called with
the name of the work, the number of steps done and the number of all."""

LOG_EVERY_S = 30
DRAW_EVERY_S = 0.1


def following(progress: Progress) -> Follow:
    """Return what takes the steps of some work to its end and shows them."""
    if progress is True:
        return follow
    if progress is False:
        return run_silently

    def call(name: str, steps: Iterator[int], total: int) -> None:
        for _ in shown_by(progress, name, steps, total):
            pass

    return call


def shown_by(progress: Progress, name: str, steps: Iterator[int], total: int) -> Generator[int, None, None]:
    """Yield the number of steps done, and show it."""
    if progress is True:
        yield from shown(name, steps, total)
        return
    try:
        for done in steps:
            if callable(progress):
                progress(name, done, total)
            yield done
    finally:
        if isinstance(steps, Generator):
            steps.close()


def follow(name: str, steps: Iterable[int], total: int) -> None:
    """Take an iterator of the number of steps done to its end, and show it."""
    try:
        with closing(shown(name, steps, total)) as showing:
            for _ in showing:
                pass
    except KeyboardInterrupt:
        notes(["what is done is kept; the same command goes on"])
        raise


def shown(name: str, steps: Iterable[int], total: int) -> Generator[int, None, None]:
    """Yield the number of steps done, and show it with the figures of the last step where it has some.

    Steps with figures leave a line behind when they end. Closing this iterator closes that of the steps.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shallowdraft.display.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    every_s = DRAW_EVERY_S if console.is_terminal else LOG_EVERY_S
    due_s = time.monotonic() + (0 if console.is_terminal else every_s)
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    figures = line = printed = ""
    try:
        with bar as progress:
            task = None
            for done in steps:
                if task is None:  # not before, for the first step may have something to say
                    task = progress.add_task(name, total=total)
                figures = done.detail if isinstance(done, StepsDone) else ""
                line = f"{name}: {done} of {total}" + (f", {figures}" if figures else "")
                due = time.monotonic() >= due_s
                description = f"{name}: {figures}" if figures else name
                progress.update(task, completed=done, description=description, refresh=due)
                if due and not console.is_terminal:
                    console.print(line, style="dim", soft_wrap=True)
                    printed = line
                due_s = time.monotonic() + every_s if due else due_s
                yield done
    finally:
        if isinstance(steps, Generator):
            steps.close()
    if figures and line != printed:
        console.print(line, style="dim", soft_wrap=True)


def saying(progress: Progress) -> Say:
    """Return what tells the user sentences: on stderr, or nowhere if progress is silent."""
    return say_nothing if progress is False else lambda text: notes([text])


def notes(lines: Iterable[str]) -> None:
    """Print what the user should know beside the result, a line each on stderr."""
    from shallowdraft.display.console import Console

    console = Console(stderr=True, highlight=False)
    for line in lines:
        console.print(line, style="dim", soft_wrap=True)
