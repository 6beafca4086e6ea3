"""Times of the parts of an iteration, relative to plain decoding, from the samples of a profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shallowdraft.records import Record
from shallowdraft.runs.candidate import Candidate, DrafterName
from shallowdraft.runs.machine_state import WIDTHS, Columns, MachineState, as_columns, clipped, median_ratio, slopes

PARTS = ("draft_s", "verify_s", "other_s")  # of an iteration; they add up to its total


@dataclass(frozen=True, order=True)
class Point:
    """A subject of timing: a candidate at a context and a batch size."""

    candidate: Candidate
    context: int
    batch: int


TimesKey = tuple[DrafterName, str, str, tuple[int, ...]]
"""A proposer with its own times: a drafter, the digest and precision of its draft, and its tree."""
ALL_DRAFTS: TimesKey = ("model", "", "", ())
"""The key of all draft models together. Verification does not depend on the draft, so its samples are pooled."""
PoolKey = tuple[DrafterName, int]
"""The samples over which slopes are fitted together: a drafter, and for draft models the lookahead."""


def own_key(candidate: Candidate) -> TimesKey:
    return candidate.drafter, candidate.digest, candidate.dtype, candidate.tree


def _pool(key: TimesKey, lookahead: int) -> PoolKey:
    """Return the pool of a key; other drafters have fewer samples, so all their lookaheads share one."""
    return key[0], lookahead if key[0] == "model" else 0


class PartTimes:
    """Ratios of the parts of an iteration to a plain token, by proposer, batch, context and lookahead."""

    def __init__(self, samples: Mapping[Point, Sequence[Record]]) -> None:
        # By proposer and batch, then context, then lookahead: ratios are interpolated over the latter two.
        self._columns: dict[tuple[TimesKey, int], dict[int, dict[int, Columns]]] = {}
        rows: dict[tuple[TimesKey, int, int, int], list[Record]] = {}
        for point, of_point in samples.items():
            own = own_key(point.candidate)
            # Samples of a draft model count twice: for the draft's own times, and for the pool of all drafts.
            for key in (own, ALL_DRAFTS) if point.candidate.drafter == "model" else (own,):
                rows.setdefault((key, point.batch, point.context, point.candidate.lookahead), []).extend(of_point)
        for (key, batch, context, lookahead), of_key in rows.items():
            by_context = self._columns.setdefault((key, batch), {})
            by_context.setdefault(context, {})[lookahead] = as_columns(of_key, (*WIDTHS, *PARTS))
        # The range of each probe over all samples, to which other states are clipped.
        self._all = as_columns([row for of_point in samples.values() for row in of_point], WIDTHS)

    def has(self, key: TimesKey, batch: int) -> bool:
        return (key, batch) in self._columns

    def lookaheads(self, key: TimesKey) -> list[int]:
        """Return the lookaheads that were timed at any context and batch size."""
        lookaheads: set[int] = set()
        for (timed_key, _), by_context in self._columns.items():
            if timed_key == key:
                lookaheads.update(*by_context.values())
        return sorted(lookaheads)

    def lookaheads_at(self, key: TimesKey, context: int, batch: int) -> list[int]:
        """Return the lookaheads that were timed at exactly this context and batch size."""
        return sorted(self._columns.get((key, batch), {}).get(context, {}))

    def nearest_state(self, state: MachineState) -> MachineState:
        """Return the state, moved into the range of states that occurred while profiling."""
        return clipped(state, self._all)

    def ratio(
        self, part: str, key: TimesKey, lookahead: int, context: float, batch: int, state: MachineState | None
    ) -> float:
        """Return a part's ratio to a plain token, on straight lines between timed lookaheads and contexts."""
        # First over lookaheads at each timed context, then over contexts.
        by_context = {}
        for timed_context, timed in self._columns[key, batch].items():
            ratios = {}
            for timed_lookahead, samples in timed.items():
                # Without a state the plain median counts, which needs no slopes.
                slope = self._slopes[part, _pool(key, timed_lookahead)] if state else {}
                ratios[timed_lookahead] = median_ratio(samples, part, state, slope)
            by_context[timed_context] = interpolated(lookahead, ratios)
        return interpolated(context, by_context)

    @cached_property
    def _slopes(self) -> dict[tuple[str, PoolKey], dict[str, float]]:
        """The slope of each part by probe. They are pooled, as a state may hardly occur at one point but at others."""
        groups: dict[tuple[str, PoolKey], list[Columns]] = {}
        for (key, _), by_context in self._columns.items():
            for timed in by_context.values():
                for lookahead, samples in timed.items():
                    for part in _fitted_parts(key):
                        groups.setdefault((part, _pool(key, lookahead)), []).append(samples)
        return {key: slopes(samples, key[0]) for key, samples in groups.items()}


def _fitted_parts(key: TimesKey) -> tuple[str, ...]:
    """Return the parts whose slopes are fitted on samples of this key: verification is fitted on all drafts."""
    if key[0] != "model":
        return PARTS
    return ("verify_s",) if key == ALL_DRAFTS else ("draft_s", "other_s")


def interpolated(where: float, values: Mapping[int, float]) -> float:
    """Return the value on a straight line between neighbours; beyond the ends it is the last one."""
    timed = sorted(values)
    return float(np.interp(where, timed, [values[place] for place in timed]))
