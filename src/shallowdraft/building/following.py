"""Progress of training: an interruption waits for the end of a step, and the state after it is saved."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext

from shallowdraft.display.interruption import noted, obey
from shallowdraft.display.progress import Progress, saying, shown_by
from shallowdraft.distributed import is_first, processes
from shallowdraft.progress import Follow, Say, run_silently, say_nothing


def following_training(progress: Progress) -> Follow:
    """Return what shows training in the first process; Ctrl-C and SIGTERM wait for the end of a step."""

    def follow(name: str, steps: Iterator[int], total: int) -> None:
        if not is_first():
            run_silently(name, steps, total)
            return
        # Several processes must stop after the same step, and none knows which signals the others got.
        waiting: AbstractContextManager[list[int]] = noted() if processes() == 1 else nullcontext([])
        try:
            with waiting as signals, closing(shown_by(progress, name, steps, total)) as showing:
                for _ in showing:
                    if signals:
                        showing.close()
                        obey(signals[0])
        except (KeyboardInterrupt, SystemExit):
            saying(progress)("the same command goes on from the last saved state")
            raise

    return follow


def saying_once(progress: Progress) -> Say:
    """Return what tells the user sentences in the first process only."""
    return saying(progress) if is_first() else say_nothing
