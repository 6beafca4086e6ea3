"""The command line: `shallowdraft VERB …`.

Slow imports are inside functions, so that --help is fast and Ctrl-C during an import is handled.
"""

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

SPINS = "30000"  # of a thread at a barrier, about 50 us, before it sleeps
PEER_DELAY_S = 5.0  # torchrun ends this process within it if rank 0 has failed too
REPEATED_INTERRUPT_S = 1.0  # a second Ctrl-C within it is ignored


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after an error that the user can correct, printed in one line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Threads that spin at barriers starve when a busy process shares their cores; see docs/decisions/001.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if arguments == ["--version"]:
        print(f"shallowdraft {__version__}")
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an unencodable character must not stop a command
    try:
        with _interrupted_once(program=argv is None):
            return _run(arguments)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if _is_rank_0():
            print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def _interrupted_once(*, program: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, but ignore a second Ctrl-C while the first is being handled.

    After an interrupt a `program` ignores Ctrl-C, so that it exits with its own code and not by the signal.
    """
    handler_after = signal.getsignal(signal.SIGINT)
    if handler_after is not signal.default_int_handler or current_thread() is not main_thread():
        yield  # the caller handles Ctrl-C
        return
    last_s = -inf

    def interrupt(*_: object) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s > REPEATED_INTERRUPT_S:
            last_s = now_s
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        handler_after = signal.SIG_IGN if program else handler_after
        raise
    finally:
        signal.signal(signal.SIGINT, handler_after)


def _run(arguments: list[str]) -> int:
    from shallowdraft.commands.verbs import parse
    from shallowdraft.display.printable import printing

    try:
        command = parse(arguments, shown=_is_rank_0())
    except SystemExit:
        _wait_unless_rank_0()
        raise
    with printing():
        return _execute(command)


def _execute(command: "Command") -> int:
    """Run a command and print its error."""
    try:
        return command.run()
    except BrokenPipeError:
        raise
    except (ShallowdraftError, OSError) as error:
        if command.debug:
            raise
        advice = "" if isinstance(error, ShallowdraftError) else "; check the path, its permissions and the free space"
        _print_error(f"error: {error}{advice}")
        return 2


def _print_error(line: str) -> None:
    """Print an error once if all processes of a torchrun have it; other ranks report errors that rank 0 has not."""
    _wait_unless_rank_0()
    line = line.replace("\n", "\\n")  # the name of a file may hold a line feed
    print(line if _is_rank_0() else f"process {os.environ['RANK']}: {line}", file=sys.stderr)


def _wait_unless_rank_0() -> None:
    if not _is_rank_0():
        time.sleep(PEER_DELAY_S)


def _is_rank_0() -> bool:
    """Return whether this is the only process, or the first that torchrun started; torch is not imported yet."""
    return "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"


if __name__ == "__main__":
    sys.exit(main())
