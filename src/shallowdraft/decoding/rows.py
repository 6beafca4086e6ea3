"""The rows of a batch on the host: the tokens of each, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shallowdraft.decoding.engine import UNSOUND
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.results import FinishReason, Piece
from shallowdraft.decoding.text import TextStream, text_stream
from shallowdraft.models.model import Model


@dataclass(eq=False)
class Row:
    """One prompt on the host: what was kept of each iteration, and when to stop."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    text: TextStream
    followed: bool
    """Whether stop strings or a reader need text as it comes."""
    full: FinishReason
    """Why the row ends if nothing stops it."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    accepted_by_iteration: list[int] = field(default_factory=list)
    proposed_by_iteration: list[int] = field(default_factory=list)
    """How many tokens deep."""
    drafted: int = 0
    finish_reason: FinishReason | None = None
    sound: bool = True
    """Whether the models gave it numbers only."""

    def take(self, accepted: int, tokens: Sequence[int], nodes: int = 0, *, iteration: bool = True) -> None:
        """Keep what was emitted, up to where the row ends; a tree proposed `nodes`. Prefill is no iteration."""
        if accepted == UNSOUND:
            self.sound = False
            return
        for kept, token in enumerate(tokens[: accepted + 1], 1):
            self.tokens.append(token)
            if self.followed:
                self.pieces.append(Piece(self.text.push(token), token, drafted=kept <= accepted))
            if token in self.stop_tokens or self.text.stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                self.finish_reason = self.full
            if self.finish_reason:
                self._end_text()
                break
        if iteration:
            chain = len(tokens) - 1
            self.accepted_by_iteration.append(min(accepted, kept))  # tokens that were cut off do not count
            self.proposed_by_iteration.append(chain)
            self.drafted += chain and (nodes or chain)

    def _end_text(self) -> None:
        if rest := self.text.flush(() if self.followed else self.tokens):
            self.pieces.append(Piece(rest, None, drafted=False))
        if self.text.stopped:
            self.finish_reason = "stop"


def new_row(target: Model, settings: Settings, begun: Sequence[int], pieces: bool) -> Row:
    """`begun` is the prompt; of an encoder–decoder the start token, which is no text."""
    room = target.shape.context - len(begun)
    if settings.stop:
        target.require_tokenizer()
    return Row(
        max_new_tokens=min(settings.max_new_tokens, room),
        stop_tokens=frozenset(target.stop_tokens if settings.stop_tokens is None else settings.stop_tokens),
        text=text_stream(target, () if target.shape.encoder else begun, settings.stop),
        followed=pieces or bool(settings.stop),
        full="length" if settings.max_new_tokens <= room else "context",
    )
