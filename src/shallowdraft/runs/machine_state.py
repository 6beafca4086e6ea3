"""The state of a shared machine, and how times follow it.

Cores of a virtual machine move and neighbours come and go, and plain decoding and verification do not suffer alike. So
every sample is taken between plain tokens, and three probes tell in which state the machine was. A part of an iteration
is kept as its ratio to a plain token; the ratio in a state is a weighted median of samples near it, corrected by a
regression on the probes (decision 004).

Shapes: N samples, P probes of the state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Columns = Mapping[str, Floats]
"""Samples by field [N]."""

WIDTHS = {"plain_s": 0.04, "handover_s": 0.4, "arithmetic_s": 0.08}
"""Each probe, and the difference of its logarithm at which a state counts as another one: the kernel's width."""
RIDGE = 0.01  # keeps slopes near 0 where a probe hardly varied
ROBUST_STEPS = 5  # of reweighting; the weights settle after two or three
DISTURBED = 3.0  # a ratio this many times the usual is a disturbance: no state of the machine makes that
ENOUGH_SAMPLES = 5  # effective number of samples that a weighted median must rest on


@dataclass(frozen=True)
class MachineState:
    """Probes of the speed of a shared machine; 0 where one is unknown."""

    plain_s: float
    """Seconds per token of plain decoding."""
    handover_s: float = 0.0
    """Seconds in which one core hands a cache line to another; 0 on a GPU."""
    arithmetic_s: float = 0.0
    """Seconds of a fixed piece of arithmetic; 0 on a GPU."""


def as_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Columns:
    """Return each field of the samples as an array [N]."""
    return {name: np.array([row[name] for row in rows]) for name in names}


def slopes(groups: Sequence[Columns], part: str) -> dict[str, float]:
    """Fit how the logarithm of a part's ratio changes with the logarithm of each probe.

    A group holds the samples of one point. The regression sees differences to the median of each group, so that one
    slope serves points of different speeds. It is a ridge regression with Huber weights: samples far off the line count
    less, and disturbed ones not at all.
    """
    x = np.concatenate([_centred_probes(group) for group in groups])  # [N, P]
    y = np.concatenate([_centred_logs(group[part] / group["plain_s"]) for group in groups])  # [N]
    undisturbed = np.abs(y) < np.log(DISTURBED)
    x, y = x[undisturbed], y[undisturbed]
    weights = np.ones(len(y))
    for _ in range(ROBUST_STEPS):
        solution = np.linalg.solve((x.T * weights) @ x + RIDGE * np.eye(len(WIDTHS)), (x.T * weights) @ y)
        residuals = np.abs(y - x @ solution)
        weights = np.minimum(1.0, 1.5 * np.median(residuals) / np.maximum(residuals, 1e-12))
    return dict(zip(WIDTHS, solution.tolist(), strict=True))


def _centred_probes(group: Columns) -> Floats:
    """Return the centred logarithms of all probes [N, P]."""
    return np.stack([_centred_logs(group[name]) for name in WIDTHS], 1)


def _centred_logs(values: Floats) -> Floats:
    """Return logarithms relative to their median; unknown values (0) count as the median."""
    measured = values > 0
    logs = np.log(np.where(measured, values, 1.0))
    return np.where(measured, logs - np.median(logs[measured]) if measured.any() else 0.0, 0.0)


def median_ratio(samples: Columns, part: str, state: MachineState | None, slope: Mapping[str, float]) -> float:
    """Return the median ratio of a part to a plain token, of samples taken near a state.

    Each sample is first moved to the state along the slopes; its weight falls with its distance from the state, as a
    Gaussian of WIDTHS. In a state that was hardly met while profiling the nearest sample may be a disturbed one, so the
    Gaussian is widened until enough samples count.
    """
    ratios = samples[part] / samples["plain_s"]
    if state is None:
        return float(np.median(ratios))
    distances = np.zeros(len(ratios))
    for name, width in WIDTHS.items():
        target = getattr(state, name)
        measured = (samples[name] > 0) & (target > 0)
        offsets = np.where(measured, np.log(np.where(measured, samples[name], 1.0) / (target or 1.0)), 0.0)
        distances += (offsets / width) ** 2
        ratios = ratios * np.exp(-slope[name] * offsets)
    distances -= distances.min()
    weights = np.exp(-distances / 2)
    # Kish's effective number of samples is (sum of weights)^2 / sum of squared weights.
    while weights.sum() ** 2 < min(ENOUGH_SAMPLES, len(weights) / 2) * (weights**2).sum():
        distances /= 2
        weights = np.exp(-distances / 2)
    order = np.argsort(ratios)
    shares = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()  # the weight below each sample's middle
    return float(np.interp(0.5, shares, ratios[order]))


def clipped(state: MachineState, samples: Columns) -> MachineState:
    """Return the state, each probe moved into the range of the samples; unknown probes stay unknown."""
    probes = {}
    for name in WIDTHS:
        value = getattr(state, name)
        low, high = samples[name].min(), samples[name].max()
        probes[name] = float(np.clip(value, low, high)) if value else 0.0
    return MachineState(**probes)
