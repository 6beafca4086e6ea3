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


class _Place(TypedDict):
    """Where batches stand."""

    step: Count
    cursors: dict[str, Count]
    weights: dict[str, Share]


class Batches:
    """Batches of sequences from a store, drawn by domain, in an order that follows from the seed alone.

    `state` says where it stands; a reader that restores it goes on with the very next batch. Each domain is read in a
    shuffled order of chunks, anew each epoch.
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
        wanted = domains or store.domains
        self._tokens = {
            domain: store.tokens(domain, part) for domain in wanted if store.counts[domain][part] > sequence
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
        """[rows, sequence + 1] token ids."""
        names = list(self._tokens)
        draws = np.random.default_rng([self.seed, 0, self._step]).choice(
            len(names), size=self.rows, p=np.array([self.weights[name] for name in names])
        )
        self._step += 1
        return np.stack([self._chunk(names[draw]) for draw in draws])

    @property
    def state(self) -> dict[str, Any]:
        return {"step": self._step, "cursors": dict(self._cursors), "weights": dict(self.weights)}

    def restore(self, state: dict[str, Any]) -> None:
        require_fields(state, _Place, "where batches stand", CorpusError)
        if state["cursors"].keys() != self._tokens.keys() or state["weights"].keys() != self._tokens.keys():
            raise CorpusError(f"the state is of the domains {', '.join(state['cursors'])}, not of these batches")
        self._step, self._cursors, self.weights = state["step"], dict(state["cursors"]), dict(state["weights"])

    def _chunk(self, domain: str) -> npt.NDArray[np.int64]:
        tokens, cursor = self._tokens[domain], self._cursors[domain]
        chunks = (len(tokens) - 1) // self.sequence
        epoch, index = divmod(cursor, chunks)
        self._cursors[domain] = cursor + 1
        if (domain, epoch) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != domain}
            key = [self.seed, 1 + list(self._tokens).index(domain), epoch]
            self._orders[domain, epoch] = np.random.default_rng(key).permutation(chunks)
        start = int(self._orders[domain, epoch][index]) * self.sequence
        chunk = tokens[start : start + self.sequence + 1].astype(np.int64)
        if int(chunk.max()) >= self.store.vocab:
            raise CorpusError(
                f"{self.store.folder}: token {int(chunk.max()):,} of {domain} is not among its {self.store.vocab:,}; "
                "make a new store from the corpus"
            )
        return chunk
