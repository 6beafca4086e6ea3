"""From a growing list of tokens to text: pieces as they become certain, and where a stop string ends it.

The text of a continuation is what the decoded whole, prompt and new tokens, has beyond the decoded
prompt. Decoders look at little around a token: the first token of all may lose a space, bytes join
to characters, and bytes that stand next to each other may be judged together. So decoding starts a
few tokens back, at one whose own text is beyond doubt.
"""

from collections.abc import Callable, Sequence

from shallowdraft.models.model import Model

Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"  # what bytes decode to that are no character, or not yet


class TextStream:
    """Decodes token by token. A character spread over several tokens, bytes that the next one may
    spoil, and text that may turn out to be the start of a stop string, are held back until it is
    decided.
    """

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        spoiler: int | None = None,
    ) -> None:
        """`spoiler` is the token of a byte that no character has, if there are tokens for bytes."""
        self._decode, self._stops, self._spoiler = decode, tuple(stop_strings), spoiler
        self._tokens = list(prompt[self._safe_start(prompt) :])
        self._context = 0  # decoding starts here, so that a tokenizer sees what its spaces depend on
        self._shown = len(self._tokens)  # tokens whose text is complete
        self._before = decode(self._tokens)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain. Sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        window = self._tokens[self._context :]
        after = self._decode(window)
        new = self._beyond(after)
        if self._stops and self._ends((self._held + new).rstrip(BROKEN)):
            return self._until_stop(self._held + new)
        if not new or not self._is_certain(window, after):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        self._before = self._decode(self._tokens[self._context : self._shown])
        text = self._held + new
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self, tokens: Sequence[int] = ()) -> str:
        """Add the last tokens; the text that is left when no more come."""
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._held + self._beyond(self._decode(self._tokens[self._context :]))
        self._context = self._shown = len(self._tokens)
        self._held = self._before = ""
        return self._until_stop(text)

    def _beyond(self, after: str) -> str:
        """The part of a text that the one before it does not share, which is all of a character that
        the prompt has but begun.
        """
        pairs = enumerate(zip(self._before, after, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), len(self._before))
        return after[shared:]

    def _is_certain(self, tokens: Sequence[int], text: str) -> bool:
        """Whether no further token can change the text of these."""
        if text.endswith(BROKEN):
            return False
        return self._spoiler is None or self._decode([*tokens, self._spoiler]).startswith(text)

    def _safe_start(self, prompt: Sequence[int]) -> int:
        """The place of the last token that shows a character which no token beside it can change.

        Decoded from there on, a text differs from the whole in nothing but its beginning: a first
        token is there, characters begin where they do in the whole, and no row of bytes is cut.
        """
        for place in range(len(prompt) - 1, -1, -1):
            token = prompt[place : place + 1]
            text = self._decode(token)
            if text.strip(BROKEN) and self._is_certain(token, text.rstrip(BROKEN)):
                return place
        return 0

    def _ends(self, text: str) -> list[int]:
        """Where stop strings begin."""
        return [cut for cut in map(text.find, self._stops) if cut >= 0]

    def _until_stop(self, text: str) -> str:
        cuts = self._ends(text)
        self.stopped = bool(cuts)
        return text[: min(cuts, default=len(text))]


def text_stream(model: Model, prompt: Sequence[int], stops: Sequence[str] = ()) -> TextStream:
    """A stream of what the model's tokenizer makes of tokens behind a prompt."""
    return TextStream(model.decode, stops, prompt, model.invalid_byte_token)


def text_after(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to a prompt's."""
    return text_stream(model, prompt).flush(tokens)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
