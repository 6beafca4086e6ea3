"""rich's console, for text that others chose."""

import sys
from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shallowdraft.display.printable import printable


class Console(rich.console.Console):
    """Shows control characters, and takes neither brackets for markup nor :names: for emoji."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        ours: dict[str, Any] = {"file": _beneath(sys.stderr if stderr else sys.stdout), "markup": False, "emoji": False}
        super().__init__(stderr=stderr, **ours | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escaped here, text is measured as it will be shown."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def _beneath(stream: Any) -> IO[str]:
    """The stream under those that escape or, while a bar is drawn, keep others' lines apart from it."""
    while hasattr(stream, "rich_proxied_file"):
        stream = stream.rich_proxied_file
    return stream  # type: ignore[no-any-return]
