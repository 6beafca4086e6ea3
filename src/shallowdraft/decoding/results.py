"""The results of generation."""

from dataclasses import dataclass
from typing import Literal

from shallowdraft.decoding.statistics import Statistics

FinishReason = Literal["stop", "length", "context"]
"""A stop token or stop string; max_new_tokens; the end of the model's context."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    text: str
    token_ids: list[int]
    """New tokens only, a stop token included."""
    stats: Statistics
    finish_reason: FinishReason
    accepted_by_iteration: list[int]
    """Draft tokens accepted in each iteration."""


@dataclass(frozen=True)
class Piece:
    """A token as it is emitted, with the text that has become certain by it."""

    text: str
    token_id: int | None
    """None for text that was held back until the end."""
    drafted: bool
    """Whether it is an accepted draft token rather than the target's own."""
