"""Text that a model wrote itself: the target's, which is what a draft is asked to predict, or the draft's own."""

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
from shallowdraft.files import naming, require_regular
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model

DOMAIN = "generated"
OPENING_SEEDS = 10**6  # openings are drawn with other random numbers than what follows them
GREEDY_SHARE = 4  # one batch in so many is decoded greedily, the others drawn at temperature 1


def share_generated(weights: dict[str, float], share: float) -> dict[str, float]:
    """Weights of domains, so that a share of a batch is the target's own text where there is some beside the corpus."""
    if DOMAIN not in weights or len(weights) == 1:
        return weights
    rest = 1 - weights[DOMAIN]
    return {name: share if name == DOMAIN else (1 - share) * weight / rest for name, weight in weights.items()}


@torch.no_grad()
def continuations(decoder: Decoder, prompts: Tensor, length: int, *, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Token rows [B, P] with what the model writes after them [B, P + length]."""
    if prompts.shape[1] + length > decoder.shape.context:
        raise OptionError(
            f"{prompts.shape[1]} + {length} tokens do not fit the model's context of {decoder.shape.context}"
        )
    with torch.autocast(prompts.device.type, enabled=False):
        rows = generate(
            Model("continuations", decoder, None, ()),
            prompts.tolist(),
            max_new_tokens=length,
            temperature=temperature,
            seed=seed,
        )
    written = torch.tensor([row.token_ids for row in rows], device=prompts.device)
    return torch.cat((prompts, written), 1)


def write_continuations(
    store: TokenStore, target: Decoder, folder: Path, *, tokens: int, prompt: int, length: int, rows: int, seed: int
) -> Iterator[TokenStore | int]:
    """Add a domain of the target's own text to a copy of a store; yields the tokens written so far, then the store.

    Each document is a prompt from the store and what the target writes after it; the first batch, from prompts of the
    validation part, is held out. A target without any text begins where documents do. What was written before a stop
    is kept.
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
            temperature = 0.0 if batch % GREEDY_SHARE == GREEDY_SHARE - 1 else 1.0
            text = continuations(writer, prompts.to(target.device), length, temperature=temperature, seed=seed + batch)
            with naming(file):
                np.save(file.with_suffix(".partial.npy"), text.cpu().numpy())
            file.with_suffix(".partial.npy").replace(file)
        yield (batch + 1) * rows * (prompt + length)
    ENGINES.drop(writer)  # frees the memory of its batches
    first, *rest = (np.pad(_written(file), ((0, 0), (0, 1)), constant_values=store.end).ravel() for file in files)
    yield extend_store(store, folder, DOMAIN, train=np.concatenate(rest), val=first)
    for file in files:
        file.unlink()


def _written(file: Path) -> npt.NDArray[np.int64]:
    """Token rows of a batch that lies on disk."""
    require_regular(file, CorpusError)
    try:
        rows = np.load(file)
        if rows.dtype != np.int64 or rows.ndim != 2:
            raise ValueError(f"{rows.dtype} of {rows.ndim} dimensions")
    except (ValueError, EOFError) as error:
        raise CorpusError(f"{file}: no rows of tokens ({first_line(error)}); remove it, it is written again") from None
    return np.asarray(rows)


def _openings(store: TokenStore, prompt: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Prompts of the validation part, then of the other."""
    held_out, reader = (Batches(store, part=part, rows=rows, sequence=prompt, seed=seed) for part in ("val", "train"))
    yield torch.from_numpy(held_out.next()[:, :prompt])
    while True:
        yield torch.from_numpy(reader.next()[:, :prompt])


def _own_openings(store: TokenStore, writer: Decoder, prompt: int, rows: int, seed: int) -> Iterator[Tensor]:
    """What the target itself begins documents with."""
    for batch in count():
        start = torch.full((rows, 1), store.end, device=writer.device)
        yield continuations(writer, start, prompt, seed=OPENING_SEEDS + seed + batch)[:, 1:]
