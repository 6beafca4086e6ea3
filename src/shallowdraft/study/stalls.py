"""Stalls: live runs during which somebody else had the machine, seen from all runs of the same prompts.

A run stalled if a plain run beside it took far longer a token than plain runs usually do. It seems to have stalled if
its iterations took far longer than those of its way usually do. Where copies are proposed an iteration takes long by
nature if they are long, and a token if they are refused, so both must have; where both are so it takes as long again.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Literal

from shallowdraft.decoding.candidate import Candidate
from shallowdraft.records import Record

FAR = 4.0  # times as long as usual; placements of the cores make 1.5 (decision 004)
OF_ANY_LENGTH = ("ngram",)  # what these propose; the others do the same work every time

Key = tuple[str, str]
"""Set and id of a prompt."""
Stall = Literal["", "seeming", "sure"]


def key_of(row: Record) -> Key:
    return row["set"], row["id"]


def stalled(rows: Sequence[Record], contexts: Mapping[Key, float]) -> list[Stall]:
    """Of live runs, whether each did; contexts are the tokens before a new one."""
    found: list[Stall] = ["sure" if far else "" for far in _far(rows, _plain_s, contexts)]
    by_way: dict[Candidate, list[int]] = {}
    for number, row in enumerate(rows):
        by_way.setdefault(Candidate.of(row), []).append(number)
    for candidate, numbers in by_way.items():
        own = [rows[number] for number in numbers]
        figures = (_iteration_s, _token_s) if candidate.drafter in OF_ANY_LENGTH else (_iteration_s,)
        far = zip(*(_far(own, figure, contexts) for figure in figures), strict=True)
        for number, both in zip(numbers, far, strict=True):
            if all(both) and not found[number]:
                found[number] = "seeming"
    return found


def _far(rows: Sequence[Record], figure: Callable[[Record], float], contexts: Mapping[Key, float]) -> list[bool]:
    """Usual is the median over prompts of the least that each took; a longer context may take as much longer."""
    least: dict[Key, float] = {}
    for row in rows:
        least[key_of(row)] = min(figure(row), least.get(key_of(row), float("inf")))
    if not least:
        return []
    usual, context = median_low(least.values()), median_low(contexts[key] for key in least)
    return [figure(row) > FAR * usual * max(1.0, contexts[key_of(row)] / context) for row in rows]


def _plain_s(row: Record) -> float:
    return float(max(state["plain_s"] for state in row["states"]))


def _token_s(row: Record) -> float:
    return float(row["seconds"] / max(1, row["emitted"]))


def _iteration_s(row: Record) -> float:
    return float(row["seconds"] / max(1, row["iterations"]))
