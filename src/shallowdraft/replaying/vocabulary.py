"""Vocabularies: the check that a draft's tokens are those of a trace."""

import hashlib
from typing import Any

from shallowdraft.errors import VocabularyError
from shallowdraft.models.model import Model
from shallowdraft.models.vocabulary import sizes_only_reason, vocabulary_of, warn_sizes_only
from shallowdraft.records import Record
from shallowdraft.runs.trace import Trace


def vocabulary(tokenizer: Any | None, size: int) -> Record:
    """Return the properties that a draft's tokenizer must match, as a trace records them (runs.trace.Vocabulary)."""
    names = vocabulary_of(tokenizer)
    added = {} if tokenizer is None else dict(tokenizer.get_added_vocab())
    return {"size": size, "tokens": len(names) if names else None, "digest": _digest(names, None), "added": added}


def fits(recorded: Record, draft: Model) -> bool:
    """Return whether a draft's tokens are those recorded; either may have more at the end."""
    names = vocabulary_of(draft.tokenizer)
    if names is None or recorded["digest"] is None:
        return bool(draft.shape.vocab == recorded["size"])
    end = max(names.values(), default=-1)
    beyond = {name: index for name, index in recorded.get("added", {}).items() if index > end}
    return bool(_digest(names | beyond, recorded["tokens"]) == recorded["digest"])


def require_vocabulary(trace: Trace, draft: Model) -> None:
    """Refuse a draft with other tokens than the trace."""
    if not fits(trace.vocabulary, draft):
        raise VocabularyError(
            f"{draft.name} does not have the tokenizer of {trace.target}, which wrote the trace; "
            "use a draft with the target's tokenizer"
        )
    if reason := sizes_only_reason(trace.vocabulary["digest"], draft.tokenizer):
        warn_sizes_only(trace.target, draft.name, reason)


def _digest(names: dict[str, int] | None, limit: Any) -> str | None:
    """Return the digest of the map from ids below the limit to tokens."""
    if names is None:
        return None
    pairs = sorted((index, token) for token, index in names.items() if limit is None or index < limit)
    return hashlib.sha256(repr(pairs).encode()).hexdigest()
