"""Prompts as token ids."""

from collections.abc import Sequence
from numbers import Integral

from shallowdraft.errors import PromptError
from shallowdraft.models.model import Model

Prompt = str | Sequence[int]


def is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Tell whether this is one prompt rather than a list of prompts.

    One prompt is text, or token ids as integers, an array or a tensor of one dimension.
    """
    if not hasattr(prompt, "__len__"):
        raise PromptError(f"the prompt is {prompt!r}; give text, token ids, or a list of either")
    if isinstance(prompt, str) or not len(prompt):
        return isinstance(prompt, str)
    return isinstance(prompt[0], Integral) or getattr(prompt[0], "ndim", None) == 0


def encode(target: Model, prompt: Prompt) -> list[int]:
    """Encode a prompt, and refuse one that leaves no room for new tokens."""
    ids = token_ids(target, prompt)
    if encoder := target.shape.encoder:
        if len(ids) > encoder.context:
            raise PromptError(
                f"the prompt has {len(ids):,} tokens and {target.name} reads {encoder.context:,}; shorten the prompt"
            )
    elif len(ids) >= target.shape.context:
        raise PromptError(
            f"the prompt has {len(ids):,} tokens and {target.name} a context of {target.shape.context:,}; "
            "shorten the prompt so that there is room for new tokens"
        )
    return ids


def token_ids(target: Model, prompt: Prompt) -> list[int]:
    """Encode a prompt of any length."""
    if not len(prompt):
        raise PromptError("the prompt is empty; give at least one token")
    ids = target.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt has no tokens; give text that the tokenizer knows")
    if outside := [token for token in ids if not 0 <= token < target.shape.vocab]:
        raise PromptError(f"token id {outside[0]} is outside the target's vocabulary of {target.shape.vocab:,}")
    return ids
