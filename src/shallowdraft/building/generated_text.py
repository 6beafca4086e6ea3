"""Text that a model wrote itself: the target's, which a draft is to predict, or the draft's own.

Shapes: B batch rows, P tokens of a prompt.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shallowdraft.building.batches import Batches
from shallowdraft.building.token_store import TokenStore, extend_store
from shallowdraft.decoding.engine_cache import ENGINES
from shallowdraft.decoding.generate import generate
from shallowdraft.errors import CorpusError, OptionError, first_line
from shallowdraft.files import path_in_errors, replacing, require_regular
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model

DOMAIN = "generated"
OPENING_SEEDS = 10**6  # added to the seed: prompts are drawn with other random numbers than what follows them
GREEDY_EVERY = 4  # every fourth batch is decoded greedily, the others are drawn at temperature 1


def share_generated(weights: dict[str, float], share: float) -> dict[str, float]:
    """Return domain weights under which this share of a batch is the target's own text, if there is some.

    A store that holds nothing else keeps its weights.
    """
    if DOMAIN not in weights or len(weights) == 1:
        return weights
    corpus = 1 - weights[DOMAIN]
    return {name: share if name == DOMAIN else (1 - share) * weight / corpus for name, weight in weights.items()}


@torch.no_grad()
def continuations(decoder: Decoder, prompts: Tensor, length: int, *, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Return prompts [B, P] with the tokens that the model writes after them [B, P + length]."""
    if prompts.shape[1] + length > decoder.shape.context:
        raise OptionError(
            f"{prompts.shape[1]} + {length} tokens do not fit the model's context of {decoder.shape.context}"
        )
    with torch.autocast(prompts.device.type, enabled=False):
        results = generate(
            Model("continuations", decoder, None, ()),
            prompts.tolist(),
            max_new_tokens=length,
            temperature=temperature,
            seed=seed,
        )
    written = torch.tensor([result.token_ids for result in results], device=prompts.device)
    return torch.cat((prompts, written), 1)


def write_continuations(
    store: TokenStore, target: Decoder, folder: Path, *, tokens: int, prompt: int, length: int, rows: int, seed: int
) -> Iterator[int]:
    """Make a store in `folder` that has the target's own text as one more domain; yield the tokens written so far.

    Each document is a prompt of `prompt` tokens from the store and `length` tokens that the target writes after it.
    The first batch, from prompts of the validation part, is held out. Where the store has no text, the target writes
    its own prompts. Batches that were written before an interruption are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = assemble(target.shape, target.dense_state()).pack()
    openings = (
        _openings(store, prompt, rows, seed) if store.domains else _own_openings(store, writer, prompt, rows, seed)
    )
    files = [folder / f"{batch}.npy" for batch in range(max(2, -(-tokens // (rows * (prompt + length)))))]
    for batch, file in enumerate(files):
        prompts = next(openings)
        if not file.exists():
            temperature = 0.0 if batch % GREEDY_EVERY == GREEDY_EVERY - 1 else 1.0
            text = continuations(writer, prompts.to(target.device), length, temperature=temperature, seed=seed + batch)
            with path_in_errors(file), replacing(file) as partial, partial.open("wb") as stream:
                np.save(stream, text.cpu().numpy())
        yield (batch + 1) * rows * (prompt + length)
    ENGINES.drop(writer)  # frees the memory of its batches
    held_out, *training = (_with_end_tokens(file, store.end) for file in files)
    extend_store(store, folder, DOMAIN, train=np.concatenate(training), val=held_out)
    for file in files:
        file.unlink()


def _with_end_tokens(file: Path, end: int) -> npt.NDArray[np.int64]:
    """Read a batch from disk as one row of documents, an end token after each."""
    return np.pad(_read_batch(file), ((0, 0), (0, 1)), constant_values=end).ravel()


def _read_batch(file: Path) -> npt.NDArray[np.int64]:
    require_regular(file, CorpusError)
    try:
        rows = np.load(file)
        if rows.dtype != np.int64 or rows.ndim != 2:
            raise ValueError(f"{rows.dtype} of {rows.ndim} dimensions")
    except (ValueError, EOFError) as error:
        raise CorpusError(f"{file}: no rows of tokens ({first_line(error)}); remove it, it is written again") from None
    return np.asarray(rows)


def _openings(store: TokenStore, prompt: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield one batch of prompts from the validation part, then batches from the training part."""
    held_out, reader = (Batches(store, part=part, rows=rows, sequence=prompt, seed=seed) for part in ("val", "train"))
    yield torch.from_numpy(held_out.next()[:, :prompt])
    while True:
        yield torch.from_numpy(reader.next()[:, :prompt])


def _own_openings(store: TokenStore, writer: Decoder, prompt: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of prompts that the target draws itself, each after an end token."""
    for batch in count():
        start = torch.full((rows, 1), store.end, device=writer.device)
        yield continuations(writer, start, prompt, seed=OPENING_SEEDS + seed + batch)[:, 1:]
