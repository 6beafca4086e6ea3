"""Random numbers made ahead: the host fills a table, an iteration only reads it, so that nothing waits for the host.

Each row has a stream of its own, drawn from (seed, number): what a row samples does not depend on
the rows beside it. The number is the row's, unless others are given.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ITERATIONS_AHEAD = 64


class RandomStreams:
    """Uniform numbers in [0, 1): for each row and iteration d draft draws, d coins and one draw of the target."""

    def __init__(self, rows: int, lookahead: int, device: torch.device) -> None:
        self._now = torch.zeros(rows, 2 * lookahead + 1, device=device, dtype=torch.float64)
        self._streams: list[np.random.Generator | None] = []
        """None of rows that read no number, as greedy ones do."""

    @classmethod
    def of(cls, parts: Sequence[tuple["RandomStreams", int]]) -> "RandomStreams":
        """A row each of others that make one iteration's numbers at a time, so that none is left unread."""
        assert all(random_streams._ahead == 1 for random_streams, _ in parts)
        first = parts[0][0]
        batch = cls(len(parts), first._now.shape[1] // 2, first._now.device)
        batch.begin(None, 1)
        batch._streams = [random_streams._streams[row] for random_streams, row in parts]
        return batch

    def put(self, row: int, part: tuple["RandomStreams", int]) -> None:
        """Instead of a row another, likewise."""
        other, place = part
        self._streams[row] = other._streams[place]

    def rest(self, row: int) -> None:
        """It reads no number any more."""
        self._streams[row] = None

    def begin(self, seed: int | None, iterations: int, streams: Sequence[int] | None = None) -> None:
        """Streams of this seed by their numbers, for about so many iterations.

        Without a seed: greedy decoding reads no random number.
        """
        self._ahead = min(iterations, ITERATIONS_AHEAD)
        self._iteration = 0
        numbers = range(len(self._now)) if streams is None else streams
        assert len(numbers) == len(self._now)
        self._streams = [None if seed is None else _stream(seed, number) for number in numbers]

    def advance(self) -> Tensor:
        """The numbers of the next iteration, [B, 2d + 1], always in the same place."""
        if any(self._streams):
            index = self._iteration % self._ahead
            if index == 0:
                shape = self._ahead, self._now.shape[1]
                blocks = [stream.random(shape) if stream else np.full(shape, 0.5) for stream in self._streams]
                made = torch.from_numpy(np.stack(blocks, axis=1))
                pinned = made.pin_memory() if self._now.device.type == "cuda" else made
                self._table = pinned.to(self._now.device, non_blocking=True)
            self._now.copy_(self._table[index])
            self._iteration += 1
        return self._now


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
