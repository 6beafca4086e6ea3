"""The result of an iteration: packed into one tensor on the device, and read on the host.

Shapes: B rows, d lookahead.
"""

import torch
from torch import Tensor

from shallowdraft.decoding.verification import Verdict

NOT_FINITE = -1
"""Marks a row with NaN or infinite logits, in place of its number of accepted tokens."""

Emitted = list[list[int]]
"""For each row: the number of accepted draft tokens, or NOT_FINITE; then d + 1 tokens, void behind the accepted and
one more."""


def pack(verdict: Verdict) -> Tensor:
    """Pack a verdict into one tensor [B, d + 2], as `Emitted` describes it."""
    accepted = torch.where(verdict.finite, verdict.accepted, NOT_FINITE)
    return torch.cat((accepted[:, None], verdict.tokens), 1)


class Transfer:
    """A packed result on its way to the host.

    On a GPU it is copied on a stream of its own, so that no iteration waits for the copy.
    """

    def __init__(self, packed: Tensor, side: torch.cuda.Stream | None) -> None:
        self.tokens = packed.shape[1] - 1
        """The most tokens that a row may have emitted."""
        self._packed = packed
        self._arrived: torch.cuda.Event | None = None
        if side is not None:
            # A clone, because the next replay of the graph overwrites `packed`.
            self._packed, self._arrived = _copy_to_host(packed.clone(), side)

    def read(self) -> Emitted:
        """Wait until the result has arrived, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: Emitted = self._packed.tolist()
        return rows


def _copy_to_host(packed: Tensor, side: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy to pinned memory on the side stream; return the copy and the event of its arrival."""
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(packed.device))
    with torch.cuda.stream(side):
        pinned.copy_(packed, non_blocking=True)
        packed.record_stream(side)
        arrived = torch.cuda.Event()
        arrived.record()
    return pinned, arrived
