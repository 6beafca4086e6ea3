"""A draft in exactly as many token ids as its target has: engines compare the sizes, not what the ids mean."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.model import Model
from shallowdraft.models.vocabulary import compare, vocabulary_of


def fitted(draft: Model, tokenizer: Any | None, size: int) -> Model:
    """The draft with the target's tokenizer and number of ids, its tail cut or padded."""
    maps = vocabulary_of(tokenizer), vocabulary_of(draft.tokenizer)
    compare(*maps, size, draft.shape.vocab).require()
    decoder = draft.decoder
    if decoder.shape.vocab != size:
        state = decoder.dense_state()
        tables = {name: _resized(state[name], size) for name in ("embed.weight", "head.weight") if name in state}
        decoder = assemble(replace(decoder.shape, vocab=size), state | tables)
    return replace(draft, decoder=decoder, tokenizer=tokenizer)


def _resized(table: Tensor, size: int) -> Tensor:
    """New rows are the mean of the others: their logit is the mean of all logits, never the largest."""
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table[:size], mean.expand(max(0, size - len(table)), -1)])
