"""Teacher-forced passes: a model reads a recorded text once, and predicts every token of it.

Shapes: T tokens, C the model's width, V its vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shallowdraft.errors import NumericsError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.runs.trace import Output

CHUNK = 512  # tokens of a pass


@torch.inference_mode()
def predictions(model: Model, output: Output, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits [T, V] for the output's tokens from number `first` on, and these tokens [T], in chunks.

    Logits that are not finite raise NumericsError, as they do in the engine.
    """
    for hidden, tokens in hidden_states(model.decoder, output, first=first):
        logits = model.decoder.head(hidden)
        require_finite(logits.amax(-1), model.name)
        yield logits, tokens


def require_finite(largest: Tensor, models: str) -> None:
    """Refuse models that have a largest logit of NaN or infinity; this waits for the device."""
    if not bool(largest.isfinite().all()):
        raise NumericsError.of(models)


@torch.inference_mode()
def hidden_states(decoder: Decoder, output: Output, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the hidden states [T, C] that predict the output's tokens from number `first` on, and these tokens [T].

    They come in chunks, and end where the model's context does.
    """
    ids = torch.tensor(output.prompt + output.output, device=decoder.device)
    length = min(len(ids) - 1, decoder.shape.context)
    cache = decoder.new_cache(1, length)
    first_position = len(output.prompt) - 1 + first  # its hidden state predicts token `first`
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        positions = torch.arange(start, stop, device=decoder.device)[None]
        hidden = decoder(ids[None, start:stop], positions, cache, stop)[0]
        skipped = max(0, first_position - start)
        if skipped < stop - start:
            yield hidden[skipped:], ids[start + skipped + 1 : stop + 1]
