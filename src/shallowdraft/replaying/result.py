"""Results of replaying a trace with a proposer: tokens per iteration at each size, with intervals over prompts.

The size of a proposal is its lookahead, or the number of nodes of a tree. Shapes: N outputs of the trace.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shallowdraft.cost import Silence
from shallowdraft.intervals import bootstrap
from shallowdraft.replaying.iterations import Floats, IterationCounts, iteration_starts, kept_at_starts
from shallowdraft.runs.candidate import Candidate, DrafterName
from shallowdraft.runs.replays import PromptTar, ReplayRecord, TarFigures
from shallowdraft.runs.trace import Trace


@dataclass(frozen=True)
class Stretch:
    """The iterations that propose the same number of tokens, and the part of each output that they decode."""

    lookahead: int
    """Tokens that each of them proposes; 0 where the draft's context is full."""
    iterations: Floats
    """[N] Iterations."""
    emitted: Floats
    """[N] New tokens in this part of the output."""
    context: Floats
    """[N] Tokens before a new one, on average over this part of the output."""


@dataclass(frozen=True)
class Replay(ABC):
    """The acceptance of one proposer on a trace, at every size.

    A draft model's is known by the acceptance probability of each token (`ModelReplay`); other proposers' by the number
    of tokens that an iteration keeps at each position (`CountedReplay`).
    """

    draft: str
    trace: Trace = field(repr=False)

    @property
    @abstractmethod
    def counts(self) -> IterationCounts:
        """Iterations of every output at every size."""

    @abstractmethod
    def candidate(self, size: int) -> Candidate:
        """Return the proposer at a size."""

    @abstractmethod
    def greedy_iterations(self, row: int, size: int) -> list[tuple[int, int]]:
        """Return how many draft tokens each iteration of an output keeps, and how many it proposes."""

    def silent_from(self, size: int) -> int | None:
        """Return the length of text from which on a full context allows no proposal; None if there is none."""
        return None

    def silence(self, size: int, rows: Sequence[int] | slice = slice(None)) -> Silence | None:
        """Return the part of some outputs that is decoded without proposals; None if there is none."""
        begins, silent = self.silent_from(size), self.counts.silent_at(size)[rows].sum()
        if begins is None or not silent:
            return None
        # A silent iteration yields one token, so the same number is counted in iterations and in tokens.
        shares = silent / self.counts.at(size)[rows].sum(), silent / self.counts.emitted[rows].sum()
        return Silence(begins, *map(float, shares))

    def iterations_by_length(self, size: int) -> dict[int, Floats]:
        """Return the iterations [N] for each number of tokens that an iteration proposes, counted along a path."""
        iterations, silent = self.counts.at(size), self.counts.silent_at(size)
        depth = self.candidate(size).lookahead
        return {depth: iterations} if self.silent_from(size) is None else {depth: iterations - silent, 0: silent}

    def stretches(self, size: int) -> list[Stretch]:
        """Return the iterations by the number of tokens that they propose; numbers that never occur are left out.

        A silent part lies at the end of each output. Proposals of all other lengths are spread over the rest.
        """
        outputs, begins, emitted = self.trace.outputs, self.silent_from(size), self.counts.emitted
        prompts = np.array([len(output.prompt) for output in outputs], dtype=float)  # [N]
        ends = np.array([len(output.output) for output in outputs], dtype=float)  # [N]
        # [N] new tokens until the draft's context is full
        full = ends if begins is None else np.clip(begins - prompts, 0, ends)
        silent = np.zeros(len(outputs)) if begins is None else self.counts.silent_at(size)
        stretches = []
        for length, iterations in self.iterations_by_length(size).items():
            if length == 0 and begins is not None:
                stretch = Stretch(length, iterations, silent, prompts + (full + ends) / 2)
            else:
                stretch = Stretch(length, iterations, emitted - silent, prompts + full / 2)
            stretches.append(stretch)
        return [stretch for stretch in stretches if stretch.iterations.any()] or stretches[:1]

    def tar(self, prompt_set: str | None = None) -> dict[int, float]:
        """Return tokens per iteration by size, of one prompt set or of all."""
        return dict(zip(self.counts.sizes, self.counts.tar(self._rows(prompt_set)).tolist(), strict=True))

    def tar_interval(self, prompt_set: str | None = None) -> dict[int, tuple[float, float]]:
        """Return the 95 % interval of each TAR, by a bootstrap over prompts; samples of a prompt stay together."""
        groups: dict[tuple[str, str], list[int]] = {}
        for row in self._rows(prompt_set):
            groups.setdefault(self.trace.outputs[row].prompt_key, []).append(int(row))
        emitted = np.array([self.counts.emitted[group].sum() for group in groups.values()])  # [prompts]
        iterations = np.array([self.counts.iterations[group].sum(0) for group in groups.values()])  # [prompts, sizes]

        def tars(draws: np.ndarray) -> Floats:
            """Return TAR [resamples, sizes] over drawn prompts [resamples, prompts]."""
            return np.asarray(emitted[draws].sum(1)[:, None] / np.maximum(iterations[draws].sum(1), 1e-9))

        low, high = bootstrap(tars, len(groups))
        return dict(zip(self.counts.sizes, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def _rows(self, prompt_set: str | None) -> np.ndarray[Any, np.dtype[np.int64]]:
        outputs = self.trace.outputs
        return np.array([row for row, output in enumerate(outputs) if prompt_set is None or output.set == prompt_set])

    def record(self, drafter: DrafterName) -> ReplayRecord:
        """Return all figures as a record of a run."""
        prompts = []
        for row, output in enumerate(self.trace.outputs):
            tars = self.counts.tar(np.array([row])).tolist()
            by_size = dict(zip(self.counts.sizes, tars, strict=True))
            prompts.append(PromptTar(output.set, output.id, output.sample, by_size))
        return ReplayRecord(
            self.draft,
            drafter,
            self.draft,
            tar=self.tar(),
            tar_interval=self.tar_interval(),
            sets={name: TarFigures(self.tar(name), self.tar_interval(name)) for name in self.trace.sets},
            acceptance_by_position=tuple(self.counts.acceptance_by_position(max(self.counts.sizes)).tolist()),
            silence={size: silence for size in self.counts.sizes if (silence := self.silence(size))},
            prompts=tuple(prompts),
        )


@dataclass(frozen=True)
class CountedReplay(Replay):
    """A replay of greedy decoding, known by the number of draft tokens that an iteration keeps at each position.

    Positions are those behind an output's first token. Which of them iterations start at follows from the counts.
    """

    candidates: Mapping[int, Candidate] = field(repr=False)
    """The proposer at each size."""
    kept: Mapping[int, Sequence[Sequence[int]]] = field(repr=False)
    """Draft tokens that an iteration keeps if it starts at a position, by size, output and position."""
    proposed: Mapping[int, Sequence[Sequence[int]]] | None = field(default=None, repr=False)
    """Draft tokens that it proposes, by the same; None if all iterations propose the candidate's lookahead."""
    context: int | None = None
    """The longest text that a draft model reads; None without a draft model."""

    def candidate(self, size: int) -> Candidate:
        return self.candidates[size]

    def silent_from(self, size: int) -> int | None:
        return None if self.context is None else self.context - self.candidate(size).lookahead + 1

    def kept_by_iteration(self, size: int) -> list[list[int]]:
        """Return the number of draft tokens that each iteration keeps, by output."""
        return [kept_at_starts(kept_at) for kept_at in self.kept[size]]

    def greedy_iterations(self, row: int, size: int) -> list[tuple[int, int]]:
        kept, depth = self.kept[size][row], self.candidate(size).lookahead
        proposed = self.proposed[size][row] if self.proposed else [depth] * len(kept)
        return [(kept[start], proposed[start]) for start in iteration_starts(kept)]

    @cached_property
    def counts(self) -> IterationCounts:
        sizes, deepest = tuple(self.kept), max(candidate.lookahead for candidate in self.candidates.values())
        outputs = self.trace.outputs
        iterations = np.zeros((len(outputs), len(sizes)))  # [N, D]
        keeping, proposing = (np.zeros((*iterations.shape, deepest)) for _ in range(2))  # [N, D, K]
        for row in range(len(outputs)):
            for column, size in enumerate(sizes):
                of_output = self.greedy_iterations(row, size)
                iterations[row, column] = len(of_output)
                keeping[row, column] = _at_least([kept for kept, _ in of_output], deepest)
                proposing[row, column] = _at_least([proposed for _, proposed in of_output], deepest)
        emitted = np.array([len(output.output) - 1 for output in outputs], dtype=float)
        return IterationCounts(sizes, emitted, iterations, keeping, proposing)

    def iterations_by_length(self, size: int) -> dict[int, Floats]:
        if self.proposed is None:
            return super().iterations_by_length(size)
        lengths = [  # by output and iteration
            [proposed_at[start] for start in iteration_starts(kept_at)]
            for kept_at, proposed_at in zip(self.kept[size], self.proposed[size], strict=True)
        ]
        distinct = sorted({self.candidate(size).lookahead}.union(*lengths))
        return {length: np.array([row.count(length) for row in lengths], dtype=float) for length in distinct}


def _at_least(counts: Sequence[int], deepest: int) -> list[int]:
    """Return how many of the counts are at least 1, 2, … `deepest`."""
    return [sum(count >= depth for count in counts) for depth in range(1, deepest + 1)]
