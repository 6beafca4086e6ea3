"""Expected iterations against the plainest way to count them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shallowdraft.replaying.iterations import count_iterations, kept_at_starts, kept_by_iteration


def silent(kept: list[int], lookahead: int, room: int) -> int:
    """Return the number of iterations that start where a proposal does not fit."""
    starts = itertools.accumulate((count + 1 for count in kept[:-1]), initial=0) if kept else ()
    return sum(start + lookahead > room for start in starts)


bits = st.lists(st.booleans(), min_size=0, max_size=40)


@given(st.lists(bits, min_size=1, max_size=5), st.integers(0, 50))
def test_with_certain_acceptance_it_counts_what_greedy_iterations_keep(rows: list[list[bool]], room: int):
    lookaheads = [1, 2, 5, 12]
    counts = count_iterations([np.array(row, dtype=float) for row in rows], lookaheads, [room] * len(rows))
    for column, lookahead in enumerate(lookaheads):
        kept = [kept_by_iteration(row, lookahead, room) for row in rows]
        assert counts.iterations[:, column].tolist() == [len(row) for row in kept]
        assert counts.silent_at(lookahead).tolist() == [silent(row, lookahead, room) for row in kept]
        for position in range(1, lookahead + 1):
            assert counts.keeping[:, column, position - 1].tolist() == [sum(n >= position for n in row) for row in kept]
        drafting = [sum(start + lookahead <= room for start in begun(row)) for row in kept]
        assert counts.proposing[:, column, :lookahead].tolist() == [[count] * lookahead for count in drafting]
        assert not counts.proposing[:, column, lookahead:].any()
        emitted, iterations = sum(map(len, rows)), sum(map(len, kept))
        assert counts.tar()[column] == pytest.approx(emitted / iterations if iterations else 1.0)


def begun(kept: list[int]) -> list[int]:
    """Return the tokens at which iterations start."""
    return [0, *itertools.accumulate(count + 1 for count in kept)][: len(kept)]


@pytest.mark.parametrize("lookahead", [1, 2, 3, 6])
@pytest.mark.parametrize("room", [3, 100])
def test_expectation_over_every_outcome(lookahead: int, room: int):
    chances = np.array([0.9, 0.2, 0.5, 0.7, 1.0, 0.3])
    expected = kept_some = without = proposing = 0.0
    for outcome in itertools.product((False, True), repeat=len(chances)):
        weight = np.prod(np.where(outcome, chances, 1 - chances))
        kept = kept_by_iteration(outcome, lookahead, room)
        expected += weight * len(kept)
        kept_some += weight * sum(n >= 1 for n in kept)
        proposing += weight * sum(start + lookahead <= room for start in begun(kept))
        without += weight * silent(kept, lookahead, room)
    counts = count_iterations([chances], [lookahead], [room])
    assert counts.iterations[0, 0] == pytest.approx(expected)
    assert counts.keeping[0, 0, 0] == pytest.approx(kept_some)
    assert counts.silent_at(lookahead)[0] == pytest.approx(without)
    assert counts.acceptance_by_position(lookahead)[0] == pytest.approx(kept_some / proposing if proposing else 0.0)


@given(bits, st.integers(1, 6))
def test_what_is_kept_from_each_place_on_tells_the_same(row: list[bool], lookahead: int):
    kept = [next((n for n, right in enumerate(row[at:]) if not right), len(row) - at) for at in range(len(row))]
    assert kept_at_starts([min(count, lookahead) for count in kept]) == kept_by_iteration(row, lookahead, 1000)


def test_full_acceptance_gives_lookahead_plus_one():
    assert count_iterations([np.ones(60)], [4], [100]).tar().tolist() == [5.0]


def test_sequences_count_by_their_tokens():
    """A mean of quotients would say (2 + 1) / 2."""
    counts = count_iterations([np.ones(2), np.zeros(8)], [1], [100, 100])
    assert counts.tar().tolist() == [10 / 9]


def test_a_row_of_one_token_has_no_iteration():
    assert count_iterations([np.zeros(0)], [3], [10]).tar().tolist() == [1.0]
