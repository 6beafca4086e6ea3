"""Confidence intervals of figures measured on a sample of prompts, by a bootstrap over the prompts. No torch here."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95


def bootstrap(
    figure: Callable[[NDArray[np.int64]], NDArray[np.float64]], prompts: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the percentile interval of a figure over resamples of the prompts.

    `figure` takes the numbers of the drawn prompts [resamples, prompts] and returns [resamples] or
    [resamples, figures]. Each draw is of a whole prompt, since its requests, positions and tokens depend on each other.
    """
    # The seed is fixed, so that the same records always give the same interval.
    draws = np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))
    low, high = np.quantile(figure(draws), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), axis=0)
    return low, high
