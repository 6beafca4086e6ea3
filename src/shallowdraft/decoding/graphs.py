"""Whole iterations as CUDA graphs."""

from collections.abc import Callable

import torch
from torch import Tensor


class IterationGraphs:
    """The captured iterations of one engine, one for each kind of iteration.

    The first iteration of a kind runs eagerly, which compiles its kernels; the second is captured;
    from then on it is replayed.
    """

    def __init__(self) -> None:
        self._captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, kind: tuple[int, bool], iteration: Callable[[], Tensor]) -> Tensor:
        """Run an iteration of a kind: its lookahead, and whether all rows are greedy."""
        if kind not in self._captured:
            self._captured[kind] = None
            return iteration()
        captured = self._captured[kind]
        if captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                packed = iteration()
            captured = self._captured[kind] = graph, packed
        graph, packed = captured
        graph.replay()
        return packed
