"""Random numbers made ahead: the host fills a table, an iteration only reads it, so that nothing waits for the host.

Each row has a stream of its own, drawn from (seed, row): what a row samples does not depend on the rows beside it.
"""

import numpy as np
import torch
from torch import Tensor

ITERATIONS_AHEAD = 256


class Noise:
    """Uniform numbers in [0, 1): `numbers` [B, 2d + 1] of the current iteration are d draft draws, d coins and one draw."""

    def __init__(self, seed: int, rows: int, lookahead: int, device: torch.device) -> None:
        self._streams = [np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, row]))) for row in range(rows)]
        self._width = 2 * lookahead + 1
        self._device = device
        self._iteration = 0
        self._table = torch.empty(0)

    def advance(self) -> Tensor:
        """The numbers of the next iteration, [B, 2d + 1]."""
        index = self._iteration % ITERATIONS_AHEAD
        if index == 0:
            block = np.stack([stream.random((ITERATIONS_AHEAD, self._width)) for stream in self._streams], axis=1)
            self._table = torch.from_numpy(block).to(self._device)
        self._iteration += 1
        return self._table[index]
