"""Forecasts: the speed of a proposer, from the acceptance of its replay and the times of a profile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from shallowdraft.cost import Iteration, Prediction, mean_iteration
from shallowdraft.replaying.result import Replay, Stretch
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.profile import Profile
from shallowdraft.runs.trace import PromptKey


def forecast(replay: Replay, profile: Profile, sizes: Iterable[int] | None = None) -> dict[int, Prediction]:
    """Predict every size that the profile covers, on the machine as it was while profiling."""
    tars = replay.tar()
    return {
        size: _at_mean_contexts(replay, profile, size, tars[size])
        for size in (replay.counts.sizes if sizes is None else sizes)
        if profile.covers(replay.candidate(size))
    }


def interval(replay: Replay, prediction: Prediction) -> tuple[float, float]:
    """Return the 95 % interval of the speed-up: TAR's bootstrap over prompts."""
    low, high = replay.tar_interval()[prediction.size]
    return low / prediction.tar * prediction.speed_up, high / prediction.tar * prediction.speed_up


def forecast_in_states(
    replay: Replay, profile: Profile, size: int, states: Mapping[PromptKey, Sequence[MachineState]]
) -> Prediction:
    """Predict a size on some prompts, each on the machine as it was then: the mean over its states there."""
    rows = [row for row, output in enumerate(replay.trace.outputs) if output.prompt_key in states]
    iterations, weights, plain_times = [], [], []
    # Every output is predicted at its own contexts and states; outputs weigh by their iterations.
    stretches = replay.stretches(size)
    for row in rows:
        output = replay.trace.outputs[row]
        own_states = states[output.prompt_key]
        for stretch in stretches:
            context = float(stretch.context[row])
            # A state's plain_s is the mean over the whole text; the stretch lies at another context.
            scale = profile.plain_s(context) / profile.plain_s(output.mean_context)
            scaled = [replace(state, plain_s=scale * state.plain_s) for state in own_states]
            candidate = _candidate(replay, size, stretch)
            times = [_iteration(profile, candidate, context, state) for state in scaled]
            iterations.append(mean_iteration(times, [1.0] * len(times)))
            weights.append(float(stretch.iterations[row]))
        plain_times.append(fmean(state.plain_s for state in own_states))
    count, emitted = replay.counts.at(size)[rows], replay.counts.emitted[rows]
    tar = float(emitted.sum() / count.sum())
    plain_s = float(np.average(plain_times, weights=emitted))
    return _prediction(replay, size, tar, mean_iteration(iterations, weights), plain_s, rows)


def _at_mean_contexts(replay: Replay, profile: Profile, size: int, tar: float) -> Prediction:
    """Predict all prompts together, each stretch of the texts at its mean context."""
    stretches = replay.stretches(size)
    emitted = [float(stretch.emitted.sum()) for stretch in stretches]
    contexts = [
        float(np.average(stretch.context, weights=stretch.emitted)) if tokens else replay.trace.mean_context
        for stretch, tokens in zip(stretches, emitted, strict=True)
    ]
    times = [
        _iteration(profile, _candidate(replay, size, stretch), context, None)
        for stretch, context in zip(stretches, contexts, strict=True)
    ]
    plain_s = np.average([profile.plain_s(context) for context in contexts], weights=emitted if any(emitted) else None)
    iteration = mean_iteration(times, [float(stretch.iterations.sum()) for stretch in stretches])
    return _prediction(replay, size, tar, iteration, float(plain_s), slice(None))


def _prediction(
    replay: Replay, size: int, tar: float, iteration: Iteration, plain_s: float, rows: Sequence[int] | slice
) -> Prediction:
    candidate = replay.candidate(size)
    nodes = size if candidate.tree else 0
    return Prediction(candidate.lookahead, tar, iteration, plain_s, nodes, replay.silence(size, rows))


def _candidate(replay: Replay, size: int, stretch: Stretch) -> Candidate:
    return replace(replay.candidate(size), lookahead=stretch.lookahead)


def _iteration(profile: Profile, candidate: Candidate, context: float, state: MachineState | None) -> Iteration:
    """Return the seconds of an iteration; without a proposal it is a plain token, for n-grams with their search."""
    if candidate.lookahead:
        return profile.iteration_of(candidate, context, state=state)
    plain_s = state.plain_s if state else profile.plain_s(context)
    if candidate.drafter != "ngram":
        return Iteration(0.0, plain_s)
    search_s = profile.iteration_of(replace(candidate, lookahead=1), context, state=state).draft_s
    return Iteration(search_s, plain_s)
