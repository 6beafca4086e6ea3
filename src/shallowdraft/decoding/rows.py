"""The rows of a batch on the host: the tokens of each, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shallowdraft.decoding.emitted import NOT_FINITE
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.results import FinishReason, Piece
from shallowdraft.decoding.text import TextStream, text_stream
from shallowdraft.models.model import Model


@dataclass(eq=False)
class GeneratedRow:
    """The continuation of one prompt so far."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    text: TextStream
    spelled: bool
    """Whether every token is turned into text as it comes, for a reader or to look for stop strings."""
    reason_at_limit: FinishReason
    """Why the row ends if nothing stops it before it has max_new_tokens."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    accepted_by_iteration: list[int] = field(default_factory=list)
    proposed_by_iteration: list[int] = field(default_factory=list)
    """Depth of each iteration's proposal in tokens."""
    drafted: int = 0
    finish_reason: FinishReason | None = None
    finite: bool = True
    """Whether all logits that decided its tokens were finite."""

    def add(self, accepted: int, tokens: Sequence[int], nodes: int = 0, *, iteration: bool = True) -> None:
        """Add the emitted tokens, up to the row's end.

        `nodes` is the number of draft tokens of a tree. Prefill emits a token without being an
        iteration.
        """
        if accepted == NOT_FINITE:
            self.finite = False
            return
        for count, token in enumerate(tokens[: accepted + 1], 1):
            self.tokens.append(token)
            if self.spelled:
                self.pieces.append(Piece(self.text.push(token), token, drafted=count <= accepted))
            if token in self.stop_tokens or self.text.stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                self.finish_reason = self.reason_at_limit
            if self.finish_reason:
                self._end_text()
                break
        if iteration:
            depth = len(tokens) - 1
            self.accepted_by_iteration.append(min(accepted, count))  # tokens behind the end do not count
            self.proposed_by_iteration.append(depth)
            self.drafted += depth and (nodes or depth)

    def _end_text(self) -> None:
        if held_back := self.text.flush(() if self.spelled else self.tokens):
            self.pieces.append(Piece(held_back, None, drafted=False))
        if self.text.stopped:
            self.finish_reason = "stop"


def new_row(target: Model, settings: Settings, prefix: Sequence[int], pieces: bool) -> GeneratedRow:
    """Create the row that continues a prompt, or the start token of an encoder–decoder, which is no text."""
    room = target.shape.context - len(prefix)
    if settings.stop:
        target.require_tokenizer()
    return GeneratedRow(
        max_new_tokens=min(settings.max_new_tokens, room),
        stop_tokens=frozenset(target.stop_tokens if settings.stop_tokens is None else settings.stop_tokens),
        text=text_stream(target, () if target.shape.encoder else prefix, settings.stop),
        spelled=pieces or bool(settings.stop),
        reason_at_limit="length" if settings.max_new_tokens <= room else "context",
    )
