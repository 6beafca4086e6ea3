"""From a growing list of tokens to text: pieces as they become readable, and where a stop string ends it."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Decodes token by token. A character spread over several tokens, and text that may turn out to be the start of a
    stop string, is held back until it is decided.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stop_strings)
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is complete
        self._context = 0  # decoding starts here, so that a tokenizer sees what its spaces depend on
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain. Sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._shown])
        after = self._decode(self._tokens[self._context :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What is left when no more tokens come."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._context : self._shown])
        rest = self._held + self._decode(self._tokens[self._context :])[len(before) :]
        self._held, self._shown = "", len(self._tokens)
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        if cuts := [cut for cut in map(text.find, self._stops) if cut >= 0]:
            self.stopped = True
            return text[: min(cuts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
