"""How long work tells its caller how far it is. No torch here.

The work is an iterator of the number of steps done so far. Whoever wants to show progress takes the iterator to its
end; functions of this package that take a `Follow` never print.
"""

from collections.abc import Callable, Iterator

Follow = Callable[[str, Iterator[int], int], None]
"""Called with a name for the work, an iterator of the number of steps done so far, and the number of all steps.

It must take the iterator to its end, or close it and raise: closing a training run saves its state.
"""

Say = Callable[[str], None]
"""Called with a sentence that the user should read while the work goes on."""


class StepsDone(int):
    """Number of steps done, with figures of the last one to show beside it."""

    detail: str

    def __new__(cls, done: int, detail: str) -> "StepsDone":
        number = super().__new__(cls, done)
        number.detail = detail
        return number


def run_silently(_name: str, steps: Iterator[int], _total: int) -> None:
    """Take the steps and show nothing."""
    for _ in steps:
        pass


def say_nothing(_text: str) -> None:
    """Drop a message."""
