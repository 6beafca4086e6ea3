"""Iterations timed beside plain ones, with the state that the machine was in."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from shallowdraft.decoding.generate import Run
from shallowdraft.decoding.options import Options, Settings
from shallowdraft.decoding.statistics import Times
from shallowdraft.kernels import cpu
from shallowdraft.models.model import Model
from shallowdraft.runs.machine_state import MachineState


def state_of(target: Model, plain_s: float) -> MachineState:
    """The state now, beside plain decoding that took so long a token."""
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
) -> list[list[tuple[Times, Times, MachineState]]]:
    """Seconds of `count` iterations in each way and of as many plain ones beside them, and the machine's state then.

    By turn and way; the order in which ways run is drawn anew each turn. Plain decoding runs before and after each. All
    begin where the prompt ends, with `warm_up` iterations more, and again where the text, or the draft's context, is
    full: a draft must have room for one proposal. Before it all plain decoding runs once and counts for nothing, so
    that what was written before disturbs no sample.
    """
    runs = [_endless(target, prompts, Settings(**candidate), warm_up + count) for candidate in (Options(), *candidates)]
    steps = [run.iterations() for run in runs]
    for one in steps:
        next(one)

    def iterate(candidate: int, times: int) -> None:
        for _ in range(times):
            if not runs[candidate].goes_on:
                runs[candidate].rewind()
            next(steps[candidate])

    def sample(candidate: int) -> Times:
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
    samples: list[list[tuple[Times, Times, MachineState]]] = []
    for _ in range(turns):
        by_way: dict[int, tuple[Times, Times, MachineState]] = {}
        plain = sample(0)
        for candidate in draws.sample(range(1, len(runs)), len(candidates)):
            times = sample(candidate)
            state, after = state_of(target, 0.0), sample(0)
            beside = (plain + after).halved()
            by_way[candidate] = beside, times, replace(state, plain_s=beside.total_s / count)
            plain = after
        samples.append([by_way[candidate] for candidate in range(1, len(runs))])
    return samples


def _endless(target: Model, prompts: list[list[int]], settings: Settings, iterations: int) -> Run:
    """A run that has not ended after so many iterations, each with a whole proposal."""
    most = 1 + (iterations + 2) * (settings.longest_lookahead + 1)
    return Run(target, prompts, replace(settings, max_new_tokens=most, stop_tokens=(), whole=True))
