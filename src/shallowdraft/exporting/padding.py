"""A draft with exactly as many token ids as its target: engines compare the sizes, not the tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.model import Model
from shallowdraft.models.vocabulary import compare, vocabulary_of


def with_vocabulary(draft: Model, tokenizer: Any | None, size: int) -> Model:
    """Return the draft with the target's tokenizer and number of ids; the last ids are cut or padded."""
    vocabularies = vocabulary_of(tokenizer), vocabulary_of(draft.tokenizer)
    compare(*vocabularies, size, draft.shape.vocab).require()
    decoder = draft.decoder
    if decoder.shape.vocab != size:
        state = decoder.dense_state()
        tables = {name: _resized(state[name], size) for name in ("embed.weight", "head.weight") if name in state}
        decoder = assemble(replace(decoder.shape, vocab=size), state | tables)
    return replace(draft, decoder=decoder, tokenizer=tokenizer)


def _resized(table: Tensor, size: int) -> Tensor:
    """Cut or pad a table [vocab, d_model] to `size` rows.

    New rows are the mean of the others, so that their logit is the mean of all logits and never the largest.
    """
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table[:size], mean.expand(max(0, size - len(table)), -1)])
