"""What generation returns."""

from dataclasses import dataclass
from typing import Literal

from shallowdraft.decoding.statistics import Statistics

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt."""

    text: str
    token_ids: list[int]
    """New tokens only, a stop token included."""
    stats: Statistics
    finish_reason: FinishReason
    """A stop token or stop string; max_new_tokens; the end of the model's context."""
    accepted_by_iteration: list[int]
    """Draft tokens kept in each iteration."""


@dataclass(frozen=True)
class Piece:
    """A token as it is emitted, with the text that has become readable by it."""

    text: str
    token_id: int | None
    """None for text that was held back until the end."""
    drafted: bool
    """Whether it is an accepted draft token rather than the target's own."""
