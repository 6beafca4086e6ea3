"""Predictions: a proposer's acceptance from its replay, times of iterations from a profile."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from shallowdraft.cost import Iteration, Prediction
from shallowdraft.decoding.timing import MachineState
from shallowdraft.decoding.ways import Way
from shallowdraft.profiling.latency import PARTS, Profile
from shallowdraft.replay.replays import Replay
from shallowdraft.replay.walk import Floats
from shallowdraft.study.stalls import Key


def forecast(found: Replay, profile: Profile, sizes: Iterable[int] | None = None) -> dict[int, Prediction]:
    """At every size that was asked for and profiled, on the machine as it was while profiling."""
    context, tars = found.trace.mean_context, found.tar()
    plain_s = profile.plain_s(context)
    return {
        size: _prediction(found.way(size), size, tars[size], _usual(found, profile, size, context), plain_s)
        for size in (found.walk.sizes if sizes is None else sizes)
        if profile.covers(found.way(size))
    }


def interval(found: Replay, prediction: Prediction) -> tuple[float, float]:
    """Of the speed-up: the bootstrap of TAR over prompts."""
    low, high = found.tar_interval()[prediction.size]
    return low / prediction.tar * prediction.speed_up, high / prediction.tar * prediction.speed_up


def forecast_at(found: Replay, profile: Profile, size: int, states: Mapping[Key, Sequence[MachineState]]) -> Prediction:
    """On some prompts, each on the machine as it was there: the mean over the states that were seen."""
    rows = [row for row, output in enumerate(found.trace.outputs) if output.key[:2] in states]
    times, weights, speeds = [], [], []
    for row in rows:
        output = found.trace.outputs[row]
        context, met = len(output.prompt) + len(output.output) / 2, states[output.key[:2]]
        for way, iterations in _lengths(found, size):
            made = [_iteration(profile, way, context, state) for state in met]
            times.append([fmean(getattr(one, part) for one in made) for part in PARTS])
            weights.append(iterations[row])
        speeds.append(fmean(state.plain_s for state in met))
    iterations, emitted = found.walk.at(size)[rows], found.walk.emitted[rows]
    mean = Iteration(*np.average(times, axis=0, weights=weights).tolist())
    tar = float(emitted.sum() / iterations.sum())
    return _prediction(found.way(size), size, tar, mean, float(np.average(speeds, weights=emitted)))


def _prediction(way: Way, size: int, tar: float, iteration: Iteration, plain_s: float) -> Prediction:
    return Prediction(way.lookahead, tar, iteration, plain_s, size if way.tree else 0)


def _usual(found: Replay, profile: Profile, size: int, context: float) -> Iteration:
    """The mean iteration, over how long proposals are."""
    lengths = list(_lengths(found, size))
    made = [_iteration(profile, way, context, None) for way, _ in lengths]
    if len(made) == 1:
        return made[0]
    weights = [iterations.sum() for _, iterations in lengths]
    times = [[getattr(one, part) for part in PARTS] for one in made]
    return Iteration(*np.average(times, axis=0, weights=weights).tolist())


def _lengths(found: Replay, size: int) -> Iterator[tuple[Way, Floats]]:
    """Ways as long as what is proposed, and how many iterations [N] of each output are so."""
    for length, iterations in found.proposed(size).items():
        yield replace(found.way(size), lookahead=length), iterations


def _iteration(profile: Profile, way: Way, context: float, state: MachineState | None) -> Iteration:
    """Where nothing is proposed: a plain token, and the look for a proposal."""
    if way.lookahead:
        return profile.iteration_of(way, context, state=state)
    look = profile.iteration_of(replace(way, lookahead=1), context, state=state)
    return Iteration(look.draft_s, state.plain_s if state else profile.plain_s(context))
