"""Ctrl-C and SIGTERM that wait for the end of a step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn

AFTER_THIS_STEP = b"ending after this step; once more ends at once\n"


@contextmanager
def noted() -> Iterator[list[int]]:
    """Yield a list to which SIGINT and SIGTERM are added instead of being obeyed, each of them once.

    Outside the main thread, which alone may ask for that, they are obeyed as ever.
    """
    told: list[int] = []
    if current_thread() is not main_thread():
        yield told
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def note(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        signal.signal(number, heeded[signal.Signals(number)])
        os.write(2, AFTER_THIS_STEP)  # a stream may be in use just now

    try:
        for number in heeded:
            signal.signal(number, note)
        yield told
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def obey(number: int) -> NoReturn:
    """End as the signal would have ended the program."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
