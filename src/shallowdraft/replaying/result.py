"""What every replay of a trace knows: tokens an iteration at each size of a proposal, with intervals over prompts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shallowdraft.cost import Silence
from shallowdraft.intervals import bootstrap
from shallowdraft.replaying.iterations import Floats, Walk, places, steps
from shallowdraft.runs.candidate import Candidate, DrafterName
from shallowdraft.runs.replays import PromptTar, ReplayRecord, TarFigures
from shallowdraft.runs.trace import Trace


@dataclass(frozen=True)
class Stretch:
    """Iterations that propose equally many tokens, and the stretches of the texts that they are in."""

    lookahead: int
    iterations: Floats
    """Of each output [N]."""
    emitted: Floats
    """Of each output [N], the new tokens of that stretch."""
    context: Floats
    """Of each output [N], the tokens before a new one, on average over the stretch."""


@dataclass(frozen=True)
class Replay(ABC):
    """Of one proposer; sizes are lookaheads or, of proposals that branch, how many nodes they have."""

    draft: str
    trace: Trace = field(repr=False)

    @property
    @abstractmethod
    def walk(self) -> Walk:
        """Iterations at every size."""

    @abstractmethod
    def candidate(self, size: int) -> Candidate:
        """How to propose at a size."""

    @abstractmethod
    def iterations_in(self, row: int, size: int) -> list[tuple[int, int]]:
        """Of one output, decoded greedily: the draft tokens that each iteration keeps, and how many it proposes."""

    def silent_from(self, size: int) -> int | None:
        """Tokens of text from which on nothing is proposed, as the draft's context is full; None: it never is."""
        return None

    def silence(self, size: int, rows: Sequence[int] | slice = slice(None)) -> Silence | None:
        """The share of iterations and of tokens in some outputs where that was so; None if it was nowhere."""
        begins, silent = self.silent_from(size), self.walk.silent_at(size)[rows].sum()
        if begins is None or not silent:
            return None
        shares = silent / self.walk.at(size)[rows].sum(), silent / self.walk.emitted[rows].sum()
        return Silence(begins, *map(float, shares))

    def proposed(self, size: int) -> dict[int, Floats]:
        """Of each output [N], iterations by how many tokens deep they propose."""
        iterations, silent = self.walk.at(size), self.walk.silent_at(size)
        depth = self.candidate(size).lookahead
        return {depth: iterations} if self.silent_from(size) is None else {depth: iterations - silent, 0: silent}

    def stretches(self, size: int) -> list[Stretch]:
        """Iterations by how many tokens deep they propose, without lengths of which there are none."""
        outputs, begins, emitted = self.trace.outputs, self.silent_from(size), self.walk.emitted
        prompts = np.array([len(output.prompt) for output in outputs], dtype=float)
        ends = np.array([len(output.output) for output in outputs], dtype=float)
        full = ends if begins is None else np.clip(begins - prompts, 0, ends)  # the draft's context, from there on
        silent = np.zeros(len(outputs)) if begins is None else self.walk.silent_at(size)
        stretches = [
            Stretch(depth, iterations, silent, prompts + (full + ends) / 2)
            if depth == 0 and begins is not None
            else Stretch(depth, iterations, emitted - silent, prompts + full / 2)
            for depth, iterations in self.proposed(size).items()
        ]
        return [stretch for stretch in stretches if stretch.iterations.any()] or stretches[:1]

    def tar(self, of_set: str | None = None) -> dict[int, float]:
        return dict(zip(self.walk.sizes, self.walk.tar(self._rows(of_set)).tolist(), strict=True))

    def tar_interval(self, of_set: str | None = None) -> dict[int, tuple[float, float]]:
        """Bootstrap over prompts, whose samples stay together."""
        rows = self._rows(of_set)
        groups: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            groups.setdefault(self.trace.outputs[row].key[:2], []).append(int(row))
        emitted = np.array([self.walk.emitted[group].sum() for group in groups.values()])
        iterations = np.array([self.walk.iterations[group].sum(0) for group in groups.values()])
        low, high = bootstrap(
            lambda draws: emitted[draws].sum(1)[:, None] / np.maximum(iterations[draws].sum(1), 1e-9), len(groups)
        )
        return dict(zip(self.walk.sizes, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def _rows(self, of_set: str | None) -> np.ndarray[Any, np.dtype[np.int64]]:
        outputs = self.trace.outputs
        return np.array([row for row, output in enumerate(outputs) if of_set is None or output.set == of_set])

    def record(self, drafter: DrafterName) -> ReplayRecord:
        """Return all figures as a record of a run."""
        prompts = []
        for row, output in enumerate(self.trace.outputs):
            tars = self.walk.tar(np.array([row])).tolist()
            by_size = dict(zip(self.walk.sizes, tars, strict=True))
            prompts.append(PromptTar(output.set, output.id, output.sample, by_size))
        return ReplayRecord(
            self.draft,
            drafter,
            self.draft,
            tar=self.tar(),
            tar_interval=self.tar_interval(),
            sets={name: TarFigures(self.tar(name), self.tar_interval(name)) for name in self.trace.sets},
            acceptance_by_position=tuple(self.walk.acceptance_by_position(max(self.walk.sizes)).tolist()),
            silence={size: silence for size in self.walk.sizes if (silence := self.silence(size))},
            prompts=tuple(prompts),
        )


@dataclass(frozen=True)
class Counted(Replay):
    """Known from what an iteration keeps that begins at each place of an output, as it is under greedy decoding."""

    candidates: Mapping[int, Candidate] = field(repr=False)
    """By size."""
    kept: Mapping[int, Sequence[Sequence[int]]] = field(repr=False)
    """By size, of every output and each token behind its first: how many draft tokens are kept from there on."""
    offered: Mapping[int, Sequence[Sequence[int]]] | None = field(default=None, repr=False)
    """Likewise, how many are proposed; None: as many as the way says."""
    context: int | None = None
    """Of a draft: the longest text that it reads."""

    def candidate(self, size: int) -> Candidate:
        return self.candidates[size]

    def silent_from(self, size: int) -> int | None:
        return None if self.context is None else self.context - self.candidate(size).lookahead + 1

    def iterations(self, size: int) -> list[list[int]]:
        """For each output, the draft tokens that each iteration keeps."""
        return [steps(row) for row in self.kept[size]]

    def iterations_in(self, row: int, size: int) -> list[tuple[int, int]]:
        kept, depth = self.kept[size][row], self.candidate(size).lookahead
        offered = self.offered[size][row] if self.offered else [depth] * len(kept)
        return [(kept[at], offered[at]) for at in places(kept)]

    @cached_property
    def walk(self) -> Walk:
        sizes, deepest = tuple(self.kept), max(candidate.lookahead for candidate in self.candidates.values())
        rows = range(len(self.trace.outputs))
        met = [[self.iterations_in(row, size) for size in sizes] for row in rows]  # by output and size
        iterations = np.array([[len(some) for some in of_row] for of_row in met], dtype=float)
        reached, tried = (
            np.array(
                [[_reached([one[which] for one in some], deepest) for some in of_row] for of_row in met], dtype=float
            )
            for which in (0, 1)
        )
        emitted = np.array([len(output.output) - 1 for output in self.trace.outputs], dtype=float)
        return Walk(sizes, emitted, iterations, reached, tried)

    def proposed(self, size: int) -> dict[int, Floats]:
        if self.offered is None:
            return super().proposed(size)
        rows = zip(self.kept[size], self.offered[size], strict=True)
        lengths = [[offered[at] for at in places(kept)] for kept, offered in rows]
        met = sorted({self.candidate(size).lookahead, *(count for row in lengths for count in row)})
        return {count: np.array([row.count(count) for row in lengths], dtype=float) for count in met}


def _reached(counts: Sequence[int], deepest: int) -> list[int]:
    """How many of these counts are at least 1, 2, …"""
    return [sum(count >= depth for count in counts) for depth in range(1, deepest + 1)]
