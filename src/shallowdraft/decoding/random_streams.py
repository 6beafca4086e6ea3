"""Random numbers made ahead: the host fills a table, an iteration only reads it, and nothing waits for the host.

Each row has a stream of its own, seeded by (seed, stream number): what a row samples does not
depend on the rows beside it. The stream number is the row's index, unless other numbers are given.

Shapes: B rows, N draft tokens of an iteration (the nodes of a tree, else the lookahead).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ITERATIONS_AHEAD = 64  # iterations whose numbers are made at once: one copy to a GPU serves them all


class RandomStreams:
    """Uniform numbers in [0, 1) for each row and iteration: N draws of the drafter, N coins, one draw of the target.

    An iteration with a shorter chain of d tokens uses the first d as draws, the next d as coins,
    and the last.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        self._now = torch.zeros(rows, 2 * nodes + 1, device=device, dtype=torch.float64)
        self._streams: list[np.random.Generator | None] = []
        """None for rows that read no number: greedy and idle ones."""

    @classmethod
    def from_rows(cls, rows: Sequence[tuple["RandomStreams", int]]) -> "RandomStreams":
        """Take over the streams of rows, each named by its owner and index.

        The owners must make numbers for one iteration at a time, so that none is skipped.
        """
        assert all(owner._ahead == 1 for owner, _ in rows)
        first = rows[0][0]
        batch = cls(len(rows), first._now.shape[1] // 2, first._now.device)
        batch.begin(None, 1)
        batch._streams = [owner._streams[index] for owner, index in rows]
        return batch

    def replace_row(self, row: int, owner: "RandomStreams", index: int) -> None:
        """Take over the stream of row `index` of another owner, which must not go on with it."""
        self._streams[row] = owner._streams[index]

    def idle_row(self, row: int) -> None:
        """Draw nothing more for a row."""
        self._streams[row] = None

    def begin(self, seed: int | None, iterations: int, streams: Sequence[int] | None = None) -> None:
        """Start every row's stream anew, for about `iterations` iterations.

        `seed` is None for greedy decoding, which reads no random numbers.
        """
        self._ahead = min(iterations, ITERATIONS_AHEAD)
        self._iteration = 0
        numbers = range(len(self._now)) if streams is None else streams
        assert len(numbers) == len(self._now)
        self._streams = [None if seed is None else _stream(seed, number) for number in numbers]

    def advance(self) -> Tensor:
        """Return the next iteration's numbers [B, 2N + 1], always at the same address, which CUDA graphs rely on."""
        if any(self._streams):
            index = self._iteration % self._ahead
            if index == 0:
                shape = self._ahead, self._now.shape[1]
                blocks = [stream.random(shape) if stream else np.full(shape, 0.5) for stream in self._streams]
                table = torch.from_numpy(np.stack(blocks, axis=1))  # [iterations, B, 2N + 1]
                pinned = table.pin_memory() if self._now.device.type == "cuda" else table
                self._table = pinned.to(self._now.device, non_blocking=True)
            self._now.copy_(self._table[index])
            self._iteration += 1
        return self._now


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
