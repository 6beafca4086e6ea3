"""Random numbers made ahead: the host fills a table, an iteration only reads it, so that nothing waits for the host.

Each row has a stream of its own, drawn from (seed, row): what a row samples does not depend on the rows beside it.
"""

import numpy as np
import torch
from torch import Tensor

from shallowdraft.decoding.sampling import Sampling

ITERATIONS_AHEAD = 64


class Noise:
    """Uniform numbers in [0, 1): for each row and iteration d draft draws, d coins and one draw of the target."""

    def __init__(self, sampling: Sampling, rows: int, lookahead: int, iterations: int, device: torch.device) -> None:
        self._width = 2 * lookahead + 1
        self._ahead = min(iterations, ITERATIONS_AHEAD)
        self._device = device
        self._iteration = 0
        self._table = torch.zeros(1, rows, self._width, device=device)  # greedy decoding reads no number
        self._streams = [] if sampling.greedy else [_stream(sampling.seed, row) for row in range(rows)]

    def advance(self) -> Tensor:
        """The numbers of the next iteration, [B, 2d + 1]."""
        if not self._streams:
            return self._table[0]
        index = self._iteration % self._ahead
        if index == 0:
            blocks = [stream.random((self._ahead, self._width)) for stream in self._streams]
            made = torch.from_numpy(np.stack(blocks, axis=1))
            pinned = made.pin_memory() if self._device.type == "cuda" else made
            self._table = pinned.to(self._device, non_blocking=True)
        self._iteration += 1
        return self._table[index]


def _stream(seed: int, row: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, row])))
