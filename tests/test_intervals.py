"""The intervals that every published figure comes with: do they cover the truth as often as they say?

Data sets are drawn from a known distribution. Each has a ratio of sums over prompts, like tokens per second, whose
numerator and denominator depend on each other: long outputs take longer.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from shallowdraft import intervals
from shallowdraft.intervals import CONFIDENCE, bootstrap

Floats = NDArray[np.float64]
Interval = tuple[float, float]

DATA_SETS = 600
MEAN_TOKENS, TOKEN_S, TOKEN_SPREAD = 64.0, 0.02, 0.15
TRUE_RATIO = 1 / TOKEN_S  # the ratio of the two means, tokens per second

# The number of intervals that cover the truth is binomial: over 600 data sets their share has a standard deviation of
# 0.9 %, and that of a correct interval is off by 4 of them once in 16,000 times. For few prompts a percentile bootstrap
# is known to be too narrow: at 30 by sqrt(29/30), since it divides by n and not n - 1, and by 1.96/2.05, since it knows
# nothing of Student's t. A normal interval 6 % too narrow covers 93.5 %. So 2 % less is allowed there.
TOLERANCE = 4 * (CONFIDENCE * (1 - CONFIDENCE) / DATA_SETS) ** 0.5
SMALL_SAMPLE = {30: 0.02, 200: 0.0}


def drawn(rng: np.random.Generator, prompts: int) -> tuple[Floats, Floats]:
    """Return the tokens and the seconds of each prompt."""
    tokens = rng.gamma(4.0, MEAN_TOKENS / 4.0, prompts)
    seconds = tokens * TOKEN_S * rng.gamma(TOKEN_SPREAD**-2, TOKEN_SPREAD**2, prompts)
    return tokens, seconds


def of_prompts(tokens: Floats, seconds: Floats) -> Interval:
    """Return the interval as the package computes it: a prompt is drawn with its tokens and its seconds."""
    low, high = bootstrap(lambda draws: tokens[draws].sum(1) / seconds[draws].sum(1), len(tokens))
    return float(low), float(high)


def half_as_wide(tokens: Floats, seconds: Floats) -> Interval:
    low, high = of_prompts(tokens, seconds)
    return (3 * low + high) / 4, (low + 3 * high) / 4


def drawn_apart(tokens: Floats, seconds: Floats) -> Interval:
    """Return the interval if tokens and seconds are drawn from different prompts."""
    low, high = bootstrap(lambda draws: tokens[draws].sum(1) / seconds[draws[::-1]].sum(1), len(tokens))
    return float(low), float(high)


def coverage(interval: Callable[[Floats, Floats], Interval], prompts: int) -> float:
    """Return the share of data sets whose interval holds the true ratio."""
    rng = np.random.default_rng(prompts)
    intervals_of_data = (interval(*drawn(rng, prompts)) for _ in range(DATA_SETS))
    return float(np.mean([low <= TRUE_RATIO <= high for low, high in intervals_of_data]))


def covers_as_stated(share: float, prompts: int) -> bool:
    return CONFIDENCE - TOLERANCE - SMALL_SAMPLE[prompts] <= share <= CONFIDENCE + TOLERANCE


@pytest.mark.parametrize("prompts", SMALL_SAMPLE)
def test_an_interval_covers_the_truth_as_often_as_it_says(prompts: int):
    share = coverage(of_prompts, prompts)
    assert covers_as_stated(share, prompts), share


@pytest.mark.parametrize("prompts", SMALL_SAMPLE)
@pytest.mark.parametrize(("wrong", "shares"), [(half_as_wide, (0.6, 0.75)), (drawn_apart, (0.99, 1.0))])
def test_the_check_fails_for_a_wrong_interval(wrong: Callable[..., Interval], shares: Interval, prompts: int):
    """Half of 1.96 standard deviations covers 67 %; without their dependence the parts vary too much for a ratio."""
    share = coverage(wrong, prompts)
    assert not covers_as_stated(share, prompts), share
    assert shares[0] <= share <= shares[1], share


def test_the_same_data_give_the_same_interval():
    tokens, seconds = drawn(np.random.default_rng(1), 30)
    assert of_prompts(tokens, seconds) == of_prompts(tokens, seconds)


def test_several_figures_have_an_interval_each():
    tokens, seconds = drawn(np.random.default_rng(2), 30)
    both = np.stack([tokens, seconds], axis=1)
    low, high = bootstrap(lambda draws: both[draws].mean(1), len(tokens))
    assert low.shape == high.shape == (2,)
    assert np.all(low < both.mean(0))
    assert np.all(both.mean(0) < high)


def test_one_prompt_has_an_interval_without_width():
    low, high = bootstrap(lambda draws: np.ones(len(draws)), 1)
    assert (low, high) == (1, 1)
    assert intervals.RESAMPLES >= 1000  # the 2.5 % quantile is that of 25 resamples or more
