"""Intervals of what was measured on some prompts: a bootstrap over them. No torch here."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95


def bootstrap(
    figure: Callable[[NDArray[np.int64]], NDArray[np.float64]], prompts: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bounds of a figure, which is given rows of drawn prompt numbers [RESAMPLES, prompts] and has one value a row."""
    draws = np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))
    low, high = np.quantile(figure(draws), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), axis=0)
    return low, high
