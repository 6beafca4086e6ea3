"""The cost model against the paper's tables (PAPER.md), and its algebra."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shallowdraft import cost
from shallowdraft.cost import Iteration, Prediction
from shallowdraft.errors import OptionError

TABLE_5 = {  # draft: ms for 7 steps, parity latency in ms, reduction in %
    "OPT-350M": (79.8, 50.6, 36.6),
    "OPT-1.3B": (87.1, 58.7, 32.6),
    "OPT-2.7B": (114.3, 49.8, 56.4),
    "OPT-6.7B": (139.5, 68.2, 51.1),
}
TABLE_7 = {"OPT-125M": 6.23, "OPT-350M": 11.74, "OPT-1.3B": 12.64, "OPT-2.7B": 16.35, "OPT-6.7B": 18.56}  # ms a step

seconds = st.floats(1e-4, 10)
tars = st.floats(1, 9)


@pytest.mark.parametrize("draft", TABLE_5)
def test_table_5_a_draft_at_its_parity_latency_is_as_fast_as_the_smallest(draft: str):
    draft_ms, parity_ms, reduction = TABLE_5[draft]
    smallest, verify_s, tar = Iteration(43.7e-3, 0.1), 0.1, 3.0
    # the paper has no TAR of this draft: take the one that its parity latency implies
    draft_tar = cost.required_tar(cost.throughput(tar, smallest), Iteration(parity_ms * 1e-3, verify_s))
    parity_s = cost.parity_latency(draft_tar, Iteration(draft_ms * 1e-3, verify_s), tar, smallest)
    assert parity_s == pytest.approx(parity_ms * 1e-3)
    assert 100 * (1 - parity_s / (draft_ms * 1e-3)) == pytest.approx(reduction, abs=0.05)


def test_seven_steps_of_table_7_take_as_long_as_table_5_says():
    for draft, (draft_ms, _, _) in TABLE_5.items():
        assert 7 * TABLE_7[draft] == pytest.approx(draft_ms, rel=0.07)
    assert 7 * TABLE_7["OPT-125M"] == pytest.approx(43.7, rel=0.01)


@given(tars, seconds, seconds, tars, seconds, seconds)
def test_parity_latency_and_extra_tar_both_mean_equal_throughput(
    tar: float, draft_s: float, verify_s: float, best_tar: float, best_s: float, best_verify_s: float
):
    iteration, best = Iteration(draft_s, verify_s), Iteration(best_s, best_verify_s)
    tokens_per_s = cost.throughput(best_tar, best)
    enough = tar + cost.extra_tar(tar, iteration, best_tar, best)
    assert enough / iteration.total_s == pytest.approx(tokens_per_s)
    parity_s = cost.parity_latency(tar, iteration, best_tar, best)
    assert tar / (parity_s + verify_s) == pytest.approx(tokens_per_s)
    if verify_s == best_verify_s:  # the paper's form, with one verification time
        assert parity_s == pytest.approx(tar / best_tar * (verify_s + best_s) - verify_s)


def test_an_iteration_yields_one_token_at_least():
    assert cost.throughput(0.5, Iteration(0.1, 0.1)) == cost.throughput(1.0, Iteration(0.1, 0.1)) == 5.0


@given(st.floats(0, 0.999), st.integers(1, 32), st.floats(0, 1))
def test_leviathan(rate: float, lookahead: int, ratio: float):
    expected = (1 - rate ** (lookahead + 1)) / ((1 - rate) * (lookahead * ratio + 1))
    assert cost.independent_speed_up(rate, lookahead, ratio) == pytest.approx(expected)
    assert 1 <= cost.independent_tar(rate, lookahead) <= lookahead + 1


def test_at_full_acceptance_tar_is_lookahead_plus_one():
    assert cost.independent_tar(1.0, 7) == 8


@given(tars, seconds, seconds, st.floats(0, 1), seconds)
def test_the_waterfall_adds_up(tar: float, draft_s: float, verify_s: float, other_s: float, plain_s: float):
    prediction = Prediction(8, tar, Iteration(draft_s, verify_s, other_s), plain_s)
    fall = prediction.waterfall
    assert fall.ideal == pytest.approx(tar)
    assert fall.ideal - fall.drafting - fall.verifying - fall.rest == pytest.approx(fall.actual)
    assert fall.actual == pytest.approx(prediction.speed_up)


def test_verdicts():
    def verdict(tar: float, draft_s: float, lookahead: int = 4) -> str:
        return Prediction(lookahead, tar, Iteration(draft_s, 1.0), plain_s=1.0).verdict

    assert verdict(3.0, 0.5) == "pays 2.00x at lookahead 4; break-even is at TAR 1.50, it has 3.00"
    assert verdict(1.2, 0.5).startswith("does not pay, 0.80x at lookahead 4; break-even is at TAR 1.50")
    assert verdict(1.5, 0.5).startswith("makes no difference")
    assert "cannot pay at lookahead 4" in verdict(3.0, 4.5)  # TAR is capped at d + 1


def test_the_best_lookahead_is_short_if_drafting_takes_time():
    def best_lookahead(step_s: float, longest: int) -> int:
        tars = {d: cost.independent_tar(0.7, d) for d in range(1, longest + 1)}
        times = {d: Iteration(step_s * d, 1.0) for d in tars}
        return cost.best({d: Prediction(d, tars[d], times[d], plain_s=1.0) for d in tars}).lookahead

    assert best_lookahead(0.1, 16) == 4
    assert best_lookahead(0.0, 8) == 8


@pytest.mark.parametrize("wrong", [nan, inf, -1.0])
def test_times_must_be_times(wrong: float):
    with pytest.raises(OptionError, match="must be a time"):
        Iteration(wrong, 1.0)
    with pytest.raises(OptionError, match="verify_s is 0"):
        Iteration(1.0, 0)


def test_times_are_read_as_they_are_written_and_as_earlier_versions_wrote_them():
    times = Iteration(0.1, 1.2, 0.3)
    assert times.to_json() == {"draft_s": 0.1, "verify_s": 1.2, "other_s": 0.3}
    assert Iteration.from_json(times.to_json()) == times
    assert Iteration.from_json({"draft_s": 0.1, "target_s": 1.2, "rest_s": 0.3}) == times
    with pytest.raises(KeyError, match="verify_s"):
        Iteration.from_json({"draft_s": 0.1})
