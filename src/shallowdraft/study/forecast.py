"""Predictions: a draft's acceptance from its replay, times of iterations from a profile."""

from collections.abc import Iterable, Mapping

import numpy as np

from shallowdraft import cost
from shallowdraft.cost import Iteration, Prediction
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


def forecast_at(found: Replay, profile: Profile, lookahead: int, plain_s: Mapping[Key, float]) -> Prediction:
    """On some prompts, each on the machine as it was when plain decoding took so many seconds a token there."""
    rows = [row for row, output in enumerate(found.trace.outputs) if output.key[:2] in plain_s]
    outputs = [found.trace.outputs[row] for row in rows]
    speeds = [plain_s[output.key[:2]] for output in outputs]
    contexts = [len(output.prompt) + len(output.output) / 2 for output in outputs]
    iterations = found.walk.iterations[rows, LOOKAHEADS.index(lookahead)]
    emitted = found.walk.emitted[rows]
    times = [
        profile.iteration(found.draft, lookahead, context, plain_s=speed)
        for context, speed in zip(contexts, speeds, strict=True)
    ]
    mean = (np.average([getattr(one, part) for one in times], weights=iterations) for part in PARTS)
    tar = float(emitted.sum() / iterations.sum())
    return Prediction(lookahead, tar, Iteration(*map(float, mean)), float(np.average(speeds, weights=emitted)))
