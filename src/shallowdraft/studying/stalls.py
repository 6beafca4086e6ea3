"""Stalls: live runs during which another process had the machine, found by comparing all runs of the same prompts.

A run surely stalled if a plain run beside it took far longer per token than plain runs usually do. It seems to have
stalled if its iterations took far longer than those of its candidate usually do. n-gram proposals vary in length, so
long ones make an iteration long and rejected ones a token; both must be far from usual to count.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median_low
from typing import Literal

from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import LiveRun
from shallowdraft.runs.trace import PromptKey

FAR = 4.0  # times as long as usual; where the cores lie makes 1.5 (decision 004)
VARIABLE_LENGTH = ("ngram",)  # drafters whose proposals vary in length; the others do the same work every time

Stall = Literal["", "seeming", "sure"]


def find_stalls(runs: Sequence[LiveRun], contexts: Mapping[PromptKey, float]) -> list[Stall]:
    """Return for each run whether it stalled; `contexts` are the mean tokens before a new one of each prompt."""
    # Plain runs are the same work whatever the candidate, so those of all candidates are compared with each other.
    stalls: list[Stall] = ["sure" if far else "" for far in _far(runs, _plain_s, contexts)]
    numbers_by_candidate: dict[Candidate, list[int]] = {}
    for number, run in enumerate(runs):
        numbers_by_candidate.setdefault(run.candidate, []).append(number)
    for candidate, numbers in numbers_by_candidate.items():
        own = [runs[number] for number in numbers]
        figures = (_iteration_s, _token_s) if candidate.drafter in VARIABLE_LENGTH else (_iteration_s,)
        far_by_figure = [_far(own, figure, contexts) for figure in figures]
        for number, far in zip(numbers, zip(*far_by_figure, strict=True), strict=True):
            if all(far) and not stalls[number]:
                stalls[number] = "seeming"
    return stalls


def _far(
    runs: Sequence[LiveRun], figure: Callable[[LiveRun], float], contexts: Mapping[PromptKey, float]
) -> list[bool]:
    """Return for each run whether its figure is far above the usual one.

    Usual is the median over prompts of the least figure of each; a longer context may take proportionally longer.
    """
    # The least of each prompt is undisturbed if any of its runs was; the median over prompts evens out the prompts.
    least: dict[PromptKey, float] = {}
    for run in runs:
        least[run.prompt_key] = min(figure(run), least.get(run.prompt_key, inf))
    if not least:
        return []
    usual, usual_context = median_low(least.values()), median_low(contexts[key] for key in least)
    return [figure(run) > FAR * usual * max(1.0, contexts[run.prompt_key] / usual_context) for run in runs]


def _plain_s(run: LiveRun) -> float:
    return max(state.plain_s for state in run.states)


def _token_s(run: LiveRun) -> float:
    return run.seconds / max(1, run.emitted)


def _iteration_s(run: LiveRun) -> float:
    return run.seconds / max(1, run.iterations)
