"""The command line: `shallowdraft VERB …`. Imports that take time are made inside `main`, where Ctrl-C is met."""

import io
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import current_thread, main_thread
from typing import TYPE_CHECKING

from shallowdraft import __version__
from shallowdraft.errors import ShallowdraftError

if TYPE_CHECKING:
    from shallowdraft.commands.options import Command

SPINS = "30000"  # about 50 us, then a waiting thread sleeps
PATIENCE_S = 5.0  # in which torchrun ends this process, if the first has failed too
SAME_CTRL_C_S = 1.0  # in which Ctrl-C, pressed again, says nothing new


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that the user can put right take one line and exit code 2."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Threads that wait for each other without end stand still beside a busy process; see docs/decisions/001.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if arguments == ["--version"]:
        print(f"shallowdraft {__version__}")
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        with _interrupted_once(program=argv is None):
            return _run(arguments)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if _is_first():
            print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def _interrupted_once(*, program: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, as ever, but not again while the first is on its way up.

    After an interrupt the `program` only ends, which another one would turn into a death by signal.
    """
    after = signal.getsignal(signal.SIGINT)
    if after is not signal.default_int_handler or current_thread() is not main_thread():
        yield  # somebody else decides what Ctrl-C does
        return
    last_s = -inf

    def interrupt(*_: object) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s > SAME_CTRL_C_S:
            last_s = now_s
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        after = signal.SIG_IGN if program else after
        raise
    finally:
        signal.signal(signal.SIGINT, after)


def _run(arguments: list[str]) -> int:
    from shallowdraft.commands.terminal import printing
    from shallowdraft.commands.verbs import parse

    try:
        command = parse(arguments, shown=_is_first())
    except SystemExit:
        _let_the_first_speak()
        raise
    with printing():
        return _obey(command)


def _obey(command: "Command") -> int:
    try:
        return command.run()
    except BrokenPipeError:
        raise
    except (ShallowdraftError, OSError) as error:
        if command.debug:
            raise
        advice = "" if isinstance(error, ShallowdraftError) else "; check the path, its permissions and the free space"
        _complain(f"error: {error}{advice}")
        return 2


def _complain(line: str) -> None:
    """Once, where all processes of a torchrun meet the same error; what another one alone meets is its to tell."""
    _let_the_first_speak()
    line = line.replace("\n", "\\n")  # a name may have one
    print(line if _is_first() else f"process {os.environ['RANK']}: {line}", file=sys.stderr)


def _let_the_first_speak() -> None:
    if not _is_first():
        time.sleep(PATIENCE_S)


def _is_first() -> bool:
    """Of the processes that torchrun started, if it did; asked before torch is there."""
    return "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"


if __name__ == "__main__":
    sys.exit(main())
