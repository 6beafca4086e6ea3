"""Batches of token sequences for training, drawn from a token store by domain weights."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from shallowdraft.building.corpus import Part
from shallowdraft.building.token_store import TokenStore
from shallowdraft.errors import CorpusError
from shallowdraft.files import (
    Count,
    Share,
    require_fields,
)


class _BatchesState(TypedDict):
    """Position of a reader in the text."""

    step: Count
    """Batches read."""
    cursors: dict[str, Count]
    """Chunks read of each domain, over all epochs."""
    weights: dict[str, Share]
    """Probability of each domain."""


class Batches:
    """Batches of sequences from a store, drawn by domain, in an order that follows from the seed alone.

    A reader that restores another's `state` continues with the very next batch. Each domain is read in a shuffled
    order of chunks, shuffled anew each epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        part: Part = "train",
        rows: int,
        sequence: int,
        seed: int,
        domains: Sequence[str] | None = None,
    ) -> None:
        self.store, self.part, self.rows, self.sequence, self.seed = store, part, rows, sequence, seed
        self._tokens = {
            domain: store.tokens(domain, part)
            for domain in domains or store.domains
            if store.counts[domain][part] > sequence
        }
        if not self._tokens:
            raise CorpusError(
                f"no domain has {sequence + 1:,} tokens of {part} text; use more text or shorter sequences"
            )
        sizes = np.array([len(tokens) for tokens in self._tokens.values()], dtype=np.float64)
        self.weights = dict(zip(self._tokens, (sizes / sizes.sum()).tolist(), strict=True))
        self._cursors = dict.fromkeys(self._tokens, 0)
        self._step = 0
        self._orders: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

    def next(self) -> npt.NDArray[np.int64]:
        """Return the token ids [rows, sequence + 1] of the next batch."""
        names = list(self._tokens)
        # Drawn from (seed, step), so that no generator's state has to be saved.
        draws = np.random.default_rng([self.seed, 0, self._step]).choice(
            len(names), size=self.rows, p=np.array([self.weights[name] for name in names])
        )
        self._step += 1
        return np.stack([self._chunk(names[draw]) for draw in draws])

    @property
    def state(self) -> dict[str, Any]:
        """Position in the text, as JSON has it."""
        return {"step": self._step, "cursors": dict(self._cursors), "weights": dict(self.weights)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from another reader's state."""
        require_fields(state, _BatchesState, "the position in the text", CorpusError)
        if state["cursors"].keys() != self._tokens.keys() or state["weights"].keys() != self._tokens.keys():
            raise CorpusError(f"the state is of the domains {', '.join(state['cursors'])}, not of these batches")
        self._step, self._cursors, self.weights = state["step"], dict(state["cursors"]), dict(state["weights"])

    def _chunk(self, domain: str) -> npt.NDArray[np.int64]:
        """Return the next chunk [sequence + 1] of a domain; the last token is the label of the one before."""
        tokens, cursor = self._tokens[domain], self._cursors[domain]
        chunks = (len(tokens) - 1) // self.sequence
        epoch, index = divmod(cursor, chunks)
        self._cursors[domain] = cursor + 1
        # Orders follow from (seed, domain, epoch), so a resumed reader finds its place; one per domain is kept.
        if (domain, epoch) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != domain}
            key = [self.seed, 1 + list(self._tokens).index(domain), epoch]
            self._orders[domain, epoch] = np.random.default_rng(key).permutation(chunks)
        # Neighbouring chunks share one token: the last label of one is the first input of the next.
        start = int(self._orders[domain, epoch][index]) * self.sequence
        chunk = tokens[start : start + self.sequence + 1].astype(np.int64)
        if int(chunk.max()) >= self.store.vocab:
            raise CorpusError(
                f"{self.store.folder}: token {int(chunk.max()):,} of {domain} is not among its {self.store.vocab:,}; "
                "make a new store from the corpus"
            )
        return chunk
