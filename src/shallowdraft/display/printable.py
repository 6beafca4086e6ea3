"""Text for a terminal: control characters in names and messages are shown, not obeyed."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
MOVES = re.compile(r"(?P<before>(?:[\r\n]|\x1b\[A)*)(?P<text>.*?)(?P<after>\r*)", re.DOTALL)  # of progress bars


def printable(text: str) -> str:
    r"""Return the text with control characters as \x1b; line feeds and tabs stay."""
    return text.translate(ESCAPES)


class Printable:
    """A stream that writes printable text; progress bars of libraries may still move the cursor."""

    def __init__(self, stream: Any) -> None:
        self._stream = self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        parts = MOVES.fullmatch(text)
        assert parts
        self._stream.write(parts["before"] + printable(parts["text"]) + parts["after"])
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing() -> Iterator[None]:
    """Make stderr printable, and stdout if it is a terminal; a pipe gets stdout unchanged."""
    out = Printable(sys.stdout) if sys.stdout.isatty() else sys.stdout
    with redirect_stderr(Printable(sys.stderr)), redirect_stdout(out):
        yield
