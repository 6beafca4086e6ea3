"""Results of live runs, from records made by hand: stalls, impossible speed-ups, prompts of another plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from shallowdraft.records import Record, Records
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.runs import profile as profiles
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import KIND
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace
from shallowdraft.studying import live
from shallowdraft.studying.forecast import forecast_in_states
from shallowdraft.studying.live import REPEATS, LiveResults, measured, run_live

SMALL, LARGE, COPIES = Candidate("1x256", 1), Candidate("4x128", 1), Candidate("", 8, "ngram")
PLAIN_S = (0.0020, 0.0022, 0.0021, 0.0025, 0.0023, 0.0024)
TOKENS, ITERATIONS = 60, 40


def outputs(count: int = 6, longest: int = 100) -> list[Output]:
    """The last one's prompt may be longer."""
    return [
        Output(f"books-{at}", "zoo", 0, [1] * (longest if at == count - 1 else 100), [1] * (TOKENS + 1))
        for at in range(count)
    ]


def run(at: int, candidate: Candidate, iteration_s: float, *plain_s: float, **more: object) -> Record:
    """Return a run on a prompt, by the seconds of an iteration and of a plain token before and after."""
    figures = {"emitted": TOKENS, "iterations": ITERATIONS, "seconds": ITERATIONS * iteration_s, "tie": True}
    states = {"states": [asdict(MachineState(seconds)) for seconds in plain_s]}
    return {"set": "zoo", "id": f"books-{at}", "round": 0} | asdict(candidate) | figures | states | more


def calm(candidates: Sequence[Candidate] = (SMALL, LARGE)) -> list[Record]:
    """Every prompt as it is on a machine of one's own: an iteration takes 1.2 or 1.3 plain tokens."""
    ratios = {SMALL: 1.3, LARGE: 1.2, COPIES: 1.1}
    return [
        run(at, candidate, ratios[candidate] * plain_s, plain_s, plain_s)
        for at, plain_s in enumerate(PLAIN_S)
        for candidate in candidates
    ]


def said(path: Path, rows: Sequence[Record], chosen: Sequence[Output]) -> LiveResults:
    file = Records.open(path, KIND, {})
    for row in rows:
        file.append(row)
    return measured(path, chosen, (SMALL, LARGE, COPIES))


def stalled_on_4() -> list[Record]:
    """Return runs of which a plain one on the fifth prompt took 74 ms a token, the runs beside it 29 and 9.7."""
    usual = [row for row in calm() if row["id"] != "books-4"]
    return [*usual, run(4, SMALL, 0.029, 0.0023, 0.074), run(4, LARGE, 0.0097, 0.074, 0.0023)]


def test_a_stalled_prompt_decides_nothing(tmp_path: Path):
    results = said(tmp_path / "stalled", stalled_on_4(), outputs())
    assert results.stalled == [("zoo", "books-4")]
    without = [row for row in calm() if row["id"] != "books-4"]
    rest = [output for output in outputs() if output.id != "books-4"]
    assert results.by_candidate == said(tmp_path / "rest", without, rest).by_candidate
    assert results.by_candidate[SMALL].speed.speed_up == pytest.approx(TOKENS / ITERATIONS / 1.3)
    assert results.by_candidate[LARGE].speed.speed_up > results.by_candidate[SMALL].speed.speed_up
    assert len(list(Records.read(tmp_path / "stalled", KIND))) == 12


def test_predictions_are_for_the_states_of_runs_that_count(tmp_path: Path):
    """A profile in which verification takes as many plain tokens as the state's are slow."""
    file = Records.open(tmp_path / "profile", profiles.KIND, {})
    for plain_s in (0.002, 0.0022, 0.0024, 0.074):
        place = {"drafter": "model", "draft": "1x256", "lookahead": 1, "context": 64, "batch": 1}
        times = {"plain_s": plain_s, "draft_s": 0.0004, "target_s": 0.0024, "rest_s": 0.0}
        file.append(place | times | {"handover_s": 0.0, "arithmetic_s": 0.0, "round": 0, "turn": 0})
    profile = profiles.read_profile(tmp_path / "profile")
    trace = Trace("t", {}, Sampling(), outputs())
    replayed = CountedReplay("1x256", trace, {1: SMALL}, {1: [[ITERATIONS]] * 6}, {1: [[1]] * 6})
    states = said(tmp_path / "stalled", stalled_on_4(), outputs()).by_candidate[SMALL].states
    assert set(states) == {("zoo", f"books-{at}") for at in (0, 1, 2, 3, 5)}
    assert forecast_in_states(replayed, profile, 1, states).break_even_tar > 1


def test_a_run_that_was_taken_again_counts_as_it_was_then(tmp_path: Path):
    again = [row for row in calm() if row["id"] == "books-4"]
    results = said(tmp_path / "again", [*stalled_on_4(), *again, run(4, SMALL, 0.001, 0.0023, 0.0023)], outputs())
    assert results.stalled == []
    calmly = said(tmp_path / "calm", calm(), outputs())
    for candidate in (SMALL, LARGE):
        assert results.by_candidate[candidate].speed.speed_up == pytest.approx(
            calmly.by_candidate[candidate].speed.speed_up
        )


def test_an_undisturbed_run_is_what_its_sums_say(tmp_path: Path):
    rows = calm((SMALL,))
    result = said(tmp_path / "calm", rows, outputs()).by_candidate[SMALL]
    plain = sum(row["emitted"] * fmean(state["plain_s"] for state in row["states"]) for row in rows)
    assert result.speed.speed_up == plain / sum(row["seconds"] for row in rows)
    assert result.speed.tokens_per_s == TOKENS * 6 / sum(row["seconds"] for row in rows)
    assert list(result.states) == [("zoo", f"books-{at}") for at in range(6)]


@pytest.mark.parametrize(
    ("odd", "longest"),
    [
        (run(5, SMALL, 0.0026, 0.002, 0.002, emitted=10, iterations=TOKENS), 100),  # nothing accepted
        (run(5, COPIES, 0.02, 0.002, 0.002, emitted=400), 100),  # much proposed, and accepted
        (run(5, SMALL, 0.0182, 0.014, 0.014), 1000),  # ten times as much text to look at
    ],
)
def test_prompts_that_are_slow_by_nature_are_kept(tmp_path: Path, odd: Record, longest: int):
    rows = [row for row in calm((Candidate.of(odd),)) if row["id"] != "books-5"]
    assert said(tmp_path / "odd", [*rows, odd], outputs(longest=longest)).stalled == []


def test_a_stall_is_seen_where_much_is_accepted(tmp_path: Path):
    """Ten times as long an iteration, of thrice as many tokens, between plain runs that were calm."""
    rows = [row for row in calm((SMALL,)) if row["id"] != "books-5"]
    odd = run(5, SMALL, 0.03, 0.0024, 0.0024, emitted=3 * TOKENS)
    assert said(tmp_path / "odd", [*rows, odd], outputs()).stalled == [("zoo", "books-5")]


def test_where_every_prompt_stalls_nothing_was_measured(tmp_path: Path):
    rows = [run(0, SMALL, 0.002, 0.002, 0.002), run(1, SMALL, 0.2, 0.002, 0.002)]
    rows += [run(0, LARGE, 0.2, 0.002, 0.002), run(1, LARGE, 0.002, 0.002, 0.002)]
    found = said(tmp_path / "both", rows, outputs(2))
    assert (found.by_candidate, found.lossless) == ({}, True)
    assert found.stalled == [("zoo", "books-0"), ("zoo", "books-1")]
    assert said(tmp_path / "wrong", [*rows[:3], rows[3] | {"tie": False}], outputs(2)).lossless is False


def test_one_prompt_that_is_left_says_nothing(tmp_path: Path):
    """Its interval would have no width."""
    rows = [row for row in calm((SMALL,)) if row["id"] == "books-0"]
    assert SMALL in said(tmp_path / "one", rows, outputs(1)).by_candidate
    found = said(tmp_path / "two", [*rows, run(1, SMALL, 0.002, 0.2, 0.002)], outputs(2))
    assert (found.by_candidate, found.stalled) == ({}, [("zoo", "books-1")])


def test_ways_of_another_plan_do_not_count(tmp_path: Path):
    """Nobody takes their stalls again."""
    other = [run(at, Candidate("2x192", 4), 0.5 if at < 2 else 0.003, one, one) for at, one in enumerate(PLAIN_S)]
    assert said(tmp_path / "more", [*other, *calm()], outputs()) == said(tmp_path / "calm", calm(), outputs())


def test_outputs_of_stalled_runs_are_compared_too(tmp_path: Path):
    rows = [row | {"tie": False} if row["id"] == "books-4" else row for row in stalled_on_4()]
    assert not said(tmp_path / "stalled", rows, outputs()).by_candidate[SMALL].speed.lossless


def test_prompts_of_another_plan_do_not_count(tmp_path: Path):
    """And a way that was not run on all prompts of this one has nothing to be compared by."""
    rows = [row for row in calm() if Candidate.of(row) == SMALL or row["id"] == "books-0"]
    found = said(tmp_path / "more", rows, outputs(3))
    few = [row for row in calm((SMALL,)) if row["id"] in ("books-0", "books-1", "books-2")]
    assert found == said(tmp_path / "few", few, outputs(3))
    assert set(found.by_candidate) == {SMALL}


class Machine:
    """Runs nothing, and takes as long as it is told; a plain token takes 1 s, but on some prompts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Output, int], float], slow: Sequence[str] = ()
    ):
        self.times: dict[str, int] = {}
        self.seconds = seconds
        monkeypatch.setattr(
            live, "_plain_state", lambda _, output, __: MachineState(50.0 if output.id in slow else 1.0)
        )
        monkeypatch.setattr(live, "_decode", self.decode)

    def decode(self, target: object, output: Output, *_: object) -> SimpleNamespace:
        before = self.times[output.id] = self.times.get(output.id, -1) + 1
        times = {"total_s": self.seconds(output, before), "prefill_s": 0.0, "draft_s": 0.0, "verify_s": 0.0}
        return SimpleNamespace(stats=SimpleNamespace(emitted=2, iterations=1, **times), token_ids=output.output)

    def run(self, path: Path, chosen: Sequence[Output], rounds: int = 1) -> Iterator[int]:
        options = {("model", SMALL.draft): {}}
        given = {"max_new_tokens": 4, "rounds": rounds, "about": {}}
        return run_live(SimpleNamespace(), options, [SMALL], chosen, path, **given)


def test_what_stalls_is_taken_again_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, lambda output, before: 50.0 if output.id == "books-0" and not before else 1.5)
    assert list(machine.run(tmp_path / "live", outputs())) == [0, 1, 2, 3, 4, 5, 6, 6]
    assert machine.times == {f"books-{at}": int(at == 0) for at in range(6)}
    assert list(machine.run(tmp_path / "live", outputs())) == [6]
    found = measured(tmp_path / "live", outputs(), [SMALL])
    assert (found.stalled, found.by_candidate[SMALL].speed.speed_up) == ([], 2 / 1.5)


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, lambda *_: 1.5)
    steps = machine.run(tmp_path / "live", outputs())
    assert [next(steps) for _ in range(4)] == [0, 1, 2, 3]
    assert list(machine.run(tmp_path / "live", outputs())) == [3, 4, 5, 6]
    assert set(machine.times.values()) == {0}


def test_what_stays_disturbed_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, lambda *_: 1.5, slow=["books-3"])
    for _ in range(2):
        list(machine.run(tmp_path / "live", outputs()))
    assert machine.times["books-3"] == REPEATS
    assert measured(tmp_path / "live", outputs(), [SMALL]).stalled == [("zoo", "books-3")]


def test_what_takes_as_long_every_time_between_calm_runs_is_so_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow_s = [900.0, 50.0, 60.0]
    machine = Machine(monkeypatch, lambda output, before: slow_s[before] if output.id == "books-3" else 1.5)
    list(machine.run(tmp_path / "live", outputs()))
    assert machine.times["books-3"] == REPEATS
    found = measured(tmp_path / "live", outputs(), [SMALL])
    assert (found.stalled, found.by_candidate[SMALL].speed.speed_up) == ([], 12 / (5 * 1.5 + 60))


def test_a_speed_up_above_its_tar_is_no_result(tmp_path: Path):
    """Iterations of 0.95 plain tokens; those of the other way take 1.2."""
    fast = [run(at, SMALL, 0.95 * one, one, one) for at, one in enumerate(PLAIN_S)]
    live_runs = said(tmp_path / "fast", [*fast, *calm((LARGE,))], outputs())
    assert (list(live_runs.by_candidate), list(live_runs.impossible)) == ([LARGE], [SMALL])
    assert live_runs.impossible[SMALL].speed.speed_up > live_runs.impossible[SMALL].speed.tar == TOKENS / ITERATIONS
    assert live_runs.lossless


def test_what_was_too_fast_is_measured_again_and_all_of_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plain token takes 1 s, and an iteration 0.9 s in the first round."""
    machine = Machine(monkeypatch, lambda _, before: 1.5 if before else 0.9)
    assert list(machine.run(tmp_path / "live", outputs())) == [0, 1, 2, 3, 4, 5, 6] + [6] * 6
    assert set(machine.times.values()) == {1}
    assert list(machine.run(tmp_path / "live", outputs())) == [6]
    live_runs = measured(tmp_path / "live", outputs(), [SMALL])
    assert not live_runs.impossible
    assert live_runs.by_candidate[SMALL].speed.speed_up == pytest.approx(2 * 2 / (0.9 + 1.5))


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_stays_too_fast_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int):
    machine = Machine(monkeypatch, lambda *_: 0.9)
    for _ in range(2):
        list(machine.run(tmp_path / "live", outputs(), rounds))
    assert set(machine.times.values()) == {rounds + REPEATS - 1}
    live_runs = measured(tmp_path / "live", outputs(), [SMALL])
    assert (list(live_runs.by_candidate), list(live_runs.impossible)) == ([], [SMALL])


def test_measuring_again_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A round that is not done on all prompts counts for nothing: its prompts would weigh twice."""
    machine = Machine(monkeypatch, lambda _, before: 1.5 if before else 0.9)
    steps = machine.run(tmp_path / "live", outputs())
    assert [next(steps) for _ in range(7 + 3)][-1] == 6
    assert sum(machine.times.values()) == 3
    live_runs = measured(tmp_path / "live", outputs(), [SMALL])
    assert live_runs.impossible[SMALL].speed.speed_up == pytest.approx(2 / 0.9)
    list(machine.run(tmp_path / "live", outputs()))
    assert set(machine.times.values()) == {1}
    assert not measured(tmp_path / "live", outputs(), [SMALL]).impossible
