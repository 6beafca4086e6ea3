"""Predictions: a draft's acceptance from its replay, times of iterations from a profile."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from shallowdraft import cost
from shallowdraft.cost import Iteration, Prediction
from shallowdraft.decoding.timing import MachineState
from shallowdraft.profiling.latency import PARTS, Profile
from shallowdraft.replay.acceptance import LOOKAHEADS, Replay
from shallowdraft.study.live import Key


def forecast(found: Replay, profile: Profile, lookaheads: Iterable[int] = LOOKAHEADS) -> dict[int, Prediction]:
    """At every lookahead that was asked for and profiled, on the machine as it was while profiling."""
    context = found.trace.mean_context
    times = {d: one for d, one in profile.iterations(found.draft, context).items() if d in set(lookaheads)}
    return cost.predictions(found.tar(), times, profile.plain_s(context))


def interval(found: Replay, prediction: Prediction) -> tuple[float, float]:
    """Of the speed-up: the bootstrap of TAR over prompts."""
    low, high = found.tar_interval()[prediction.lookahead]
    return low / prediction.tar * prediction.speed_up, high / prediction.tar * prediction.speed_up


def forecast_at(
    found: Replay, profile: Profile, lookahead: int, states: Mapping[Key, Sequence[MachineState]]
) -> Prediction:
    """On some prompts, each on the machine as it was there: the mean over the states that were seen."""
    rows = [row for row, output in enumerate(found.trace.outputs) if output.key[:2] in states]
    times, speeds = [], []
    for output in (found.trace.outputs[row] for row in rows):
        context, met = len(output.prompt) + len(output.output) / 2, states[output.key[:2]]
        made = [profile.iteration(found.draft, lookahead, context, state=state) for state in met]
        times.append([fmean(getattr(one, part) for one in made) for part in PARTS])
        speeds.append(fmean(state.plain_s for state in met))
    iterations, emitted = found.walk.iterations[rows, LOOKAHEADS.index(lookahead)], found.walk.emitted[rows]
    mean = np.average(times, axis=0, weights=iterations)
    tar = float(emitted.sum() / iterations.sum())
    return Prediction(lookahead, tar, Iteration(*mean.tolist()), float(np.average(speeds, weights=emitted)))
