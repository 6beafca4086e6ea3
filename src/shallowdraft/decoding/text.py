"""Text of a growing list of tokens: pieces as they become certain, up to a stop string.

The text of a continuation is the decoded prompt with its new tokens, less the decoded prompt. How a
token decodes depends on few tokens around it: the very first one may lose its space, bytes join to
characters, and adjacent bytes may be judged together. So decoding starts a few tokens back, at a
token whose own text is certain.
"""

from collections.abc import Callable, Sequence

from shallowdraft.models.model import Model

Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet


class TextStream:
    """Decodes token by token.

    Held back until they are certain: a character of several tokens, bytes that the next one may
    change, and text that may be the start of a stop string.
    """

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        invalid_byte_token: int | None = None,
    ) -> None:
        """`invalid_byte_token` is that of a byte which is part of no character, if the tokenizer has any."""
        self._decode, self._stops, self._invalid_byte_token = decode, tuple(stop_strings), invalid_byte_token
        self._tokens = list(prompt[self._safe_start(prompt) :])
        self._context = 0  # decoding starts at this token, because spaces depend on tokens before them
        self._shown = len(self._tokens)  # tokens whose text is complete
        self._before = decode(self._tokens)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain now; set `stopped` if a stop string is complete."""
        self._tokens.append(token)
        window = self._tokens[self._context :]
        after = self._decode(window)
        new = self._beyond(after)
        if self._stops and self._stop_starts((self._held + new).rstrip(BROKEN)):
            return self._until_stop(self._held + new)
        if not new or not self._is_certain(window, after):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        self._before = self._decode(self._tokens[self._context : self._shown])
        text = self._held + new
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self, tokens: Sequence[int] = ()) -> str:
        """Add the last tokens and return the text that was held back."""
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._held + self._beyond(self._decode(self._tokens[self._context :]))
        self._context = self._shown = len(self._tokens)
        self._held = self._before = ""
        return self._until_stop(text)

    def _beyond(self, after: str) -> str:
        """Return the part of a text behind what it shares with the text before the token.

        A character that the prompt has only begun is new as a whole.
        """
        pairs = enumerate(zip(self._before, after, strict=False))
        shared = next((index for index, (a, b) in pairs if a != b), len(self._before))
        return after[shared:]

    def _is_certain(self, tokens: Sequence[int], text: str) -> bool:
        """Tell whether no further token can change the text of these tokens."""
        if text.endswith(BROKEN):
            return False
        return self._invalid_byte_token is None or self._decode([*tokens, self._invalid_byte_token]).startswith(text)

    def _safe_start(self, prompt: Sequence[int]) -> int:
        """Return the index of the last token with a character that no adjacent token can change.

        Decoding from this token on gives the end of the whole prompt's text: no sequence of bytes
        is cut, and only the first token may lose its space.
        """
        for index in range(len(prompt) - 1, -1, -1):
            token = prompt[index : index + 1]
            text = self._decode(token)
            if text.strip(BROKEN) and self._is_certain(token, text.rstrip(BROKEN)):
                return index
        return 0

    def _stop_starts(self, text: str) -> list[int]:
        """Return where the stop strings in a text begin."""
        return [start for start in map(text.find, self._stops) if start >= 0]

    def _until_stop(self, text: str) -> str:
        starts = self._stop_starts(text)
        self.stopped = bool(starts)
        return text[: min(starts, default=len(text))]


def text_stream(model: Model, prompt: Sequence[int], stops: Sequence[str] = ()) -> TextStream:
    """Create the stream that decodes the tokens behind a prompt with the model's tokenizer."""
    return TextStream(model.decode, stops, prompt, model.invalid_byte_token)


def text_after(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt's."""
    return text_stream(model, prompt).flush(tokens)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
