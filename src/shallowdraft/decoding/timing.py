"""Iterations timed beside plain ones, with the state of the machine at that time.

The speed of a machine that others use too changes from minute to minute. So each candidate is timed
between two samples of plain decoding, and only their ratio is expected to last.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from shallowdraft.decoding.generate import BatchRun
from shallowdraft.decoding.options import Options, Settings
from shallowdraft.decoding.statistics import PhaseTimes
from shallowdraft.kernels import cpu
from shallowdraft.models.model import Model
from shallowdraft.runs.machine_state import MachineState

Sample = tuple[PhaseTimes, PhaseTimes, MachineState]
"""Times of plain iterations, times of equally many iterations of a candidate, and the machine's state between them."""


def current_state(target: Model, plain_s: float) -> MachineState:
    """Measure the machine's state now; `plain_s` are the seconds per token of plain decoding close to this moment."""
    return MachineState(plain_s, *cpu.probe(torch.get_num_threads() if target.device.type == "cpu" else 1))


def time_beside_plain(
    target: Model,
    prompts: list[list[int]],
    candidates: Sequence[Options],
    *,
    warm_up: int,
    count: int,
    turns: int,
    seed: int | str = 0,
) -> list[list[Sample]]:
    """Time `count` iterations of each candidate between equally many plain ones; return samples by turn.

    The order of the candidates is drawn anew each turn. Every sample begins at the end of the
    prompts, with `warm_up` iterations that do not count, and begins there again when the text or
    the draft's context is full: there must always be room for a whole proposal. One plain sample
    before the first turn counts for nothing: it clears the caches of the machine of what was there
    before.
    """
    runs = [_endless(target, prompts, Settings(**candidate), warm_up + count) for candidate in (Options(), *candidates)]
    steps = [run.iterations() for run in runs]
    for prefill in steps:
        next(prefill)

    def iterate(candidate: int, times: int) -> None:
        for _ in range(times):
            if not runs[candidate].has_room:
                runs[candidate].rewind()
            next(steps[candidate])

    def sample(candidate: int) -> PhaseTimes:
        runs[candidate].rewind()
        iterate(candidate, warm_up)
        # On a GPU results come one iteration late. So the clocks are read while iterations go on, and nothing is
        # waited for in between: after a pause one iteration less would be counted.
        before = runs[candidate].read_clock()
        iterate(candidate, count)
        after = runs[candidate].read_clock()
        return after() - before()

    draws = Random(seed)
    sample(0)
    turns_done: list[list[Sample]] = []
    for _ in range(turns):
        by_candidate: dict[int, Sample] = {}
        plain = sample(0)  # run 0 is plain decoding, the candidates are runs 1, 2, …
        for candidate in draws.sample(range(1, len(runs)), len(candidates)):
            times = sample(candidate)
            state, after = current_state(target, 0.0), sample(0)
            beside = (plain + after).halved()
            by_candidate[candidate] = beside, times, replace(state, plain_s=beside.total_s / count)
            plain = after  # also the sample before the next candidate
        turns_done.append([by_candidate[candidate] for candidate in range(1, len(runs))])
    return turns_done


def _endless(target: Model, prompts: list[list[int]], settings: Settings, iterations: int) -> BatchRun:
    """Create a run in which there is room for this many iterations with whole proposals."""
    room = 1 + (iterations + 2) * (settings.longest_lookahead + 1)
    return BatchRun(target, prompts, replace(settings, max_new_tokens=room, stop_tokens=(), full_proposals=True))
