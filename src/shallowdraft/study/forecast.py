"""Predictions: a proposer's acceptance from its replay, times of iterations from a profile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from shallowdraft.cost import Iteration, Prediction, mean_iteration
from shallowdraft.decoding.candidate import Candidate
from shallowdraft.decoding.timing import MachineState
from shallowdraft.profiling.latency import Profile
from shallowdraft.replay.result import Replay, Stretch
from shallowdraft.study.stalls import Key


def forecast(found: Replay, profile: Profile, sizes: Iterable[int] | None = None) -> dict[int, Prediction]:
    """At every size that was asked for and profiled, on the machine as it was while profiling."""
    tars = found.tar()
    return {
        size: _usual(found, profile, size, tars[size])
        for size in (found.walk.sizes if sizes is None else sizes)
        if profile.covers(found.candidate(size))
    }


def interval(found: Replay, prediction: Prediction) -> tuple[float, float]:
    """Of the speed-up: the bootstrap of TAR over prompts."""
    low, high = found.tar_interval()[prediction.size]
    return low / prediction.tar * prediction.speed_up, high / prediction.tar * prediction.speed_up


def forecast_at(found: Replay, profile: Profile, size: int, states: Mapping[Key, Sequence[MachineState]]) -> Prediction:
    """On some prompts, each on the machine as it was there: the mean over the states that were seen."""
    rows = [row for row, output in enumerate(found.trace.outputs) if output.key[:2] in states]
    made, weights, speeds = [], [], []
    stretches = found.stretches(size)
    for row in rows:
        output = found.trace.outputs[row]
        context, met = len(output.prompt) + len(output.output) / 2, states[output.key[:2]]
        for stretch in stretches:
            there = float(stretch.context[row])
            pace = profile.plain_s(there) / profile.plain_s(context)  # states are known of the whole text
            seen = [replace(state, plain_s=pace * state.plain_s) for state in met]
            here = [_iteration(profile, _way(found, size, stretch), there, state) for state in seen]
            made.append(mean_iteration(here, [1.0] * len(here)))
            weights.append(float(stretch.iterations[row]))
        speeds.append(fmean(state.plain_s for state in met))
    iterations, emitted = found.walk.at(size)[rows], found.walk.emitted[rows]
    tar = float(emitted.sum() / iterations.sum())
    plain_s = float(np.average(speeds, weights=emitted))
    return _prediction(found, size, tar, mean_iteration(made, weights), plain_s, rows)


def _usual(found: Replay, profile: Profile, size: int, tar: float) -> Prediction:
    """For all prompts together: each stretch of the texts at its mean context."""
    stretches = found.stretches(size)
    emitted = [float(stretch.emitted.sum()) for stretch in stretches]
    contexts = [
        float(np.average(stretch.context, weights=stretch.emitted)) if tokens else found.trace.mean_context
        for stretch, tokens in zip(stretches, emitted, strict=True)
    ]
    candidates = [_way(found, size, stretch) for stretch in stretches]
    made = [
        _iteration(profile, candidate, context, None) for candidate, context in zip(candidates, contexts, strict=True)
    ]
    plain_s = np.average([profile.plain_s(context) for context in contexts], weights=emitted if any(emitted) else None)
    iteration = mean_iteration(made, [float(stretch.iterations.sum()) for stretch in stretches])
    return _prediction(found, size, tar, iteration, float(plain_s), slice(None))


def _prediction(
    found: Replay, size: int, tar: float, iteration: Iteration, plain_s: float, rows: Sequence[int] | slice
) -> Prediction:
    candidate = found.candidate(size)
    nodes = size if candidate.tree else 0
    return Prediction(candidate.lookahead, tar, iteration, plain_s, nodes, found.silence(size, rows))


def _way(found: Replay, size: int, stretch: Stretch) -> Candidate:
    return replace(found.candidate(size), lookahead=stretch.lookahead)


def _iteration(profile: Profile, candidate: Candidate, context: float, state: MachineState | None) -> Iteration:
    """Where nothing is proposed: a plain token, and of n-grams the look for a proposal."""
    if candidate.lookahead:
        return profile.iteration_of(candidate, context, state=state)
    plain_s = state.plain_s if state else profile.plain_s(context)
    if candidate.drafter != "ngram":
        return Iteration(0.0, plain_s)
    return Iteration(profile.iteration_of(replace(candidate, lookahead=1), context, state=state).draft_s, plain_s)
