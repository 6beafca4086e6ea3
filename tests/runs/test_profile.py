"""Profiles: times read back in every state of the machine, and profiles that are refused."""

from pathlib import Path

import pytest

from shallowdraft.cli import main
from shallowdraft.commands.profile import show
from shallowdraft.errors import RecordError
from shallowdraft.records import Records
from shallowdraft.runs import machine_state, trace
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.profile import KIND, read_profile
from shallowdraft.shapes.notation import parse_shape


def written(path: Path, rows: list[dict]) -> Path:
    file = Records.open(path, KIND, {"target": "t", "device": "elsewhere"})
    for number, row in enumerate(rows):
        base = {"draft": "d", "lookahead": 1, "context": 64, "batch": 1, "round": number, "turn": 0}
        file.append(
            base
            | {"handover_s": 0.0, "arithmetic_s": 0.0, "plain_s": 1.0, "draft_s": 0.1, "target_s": 1.2, "rest_s": 0.1}
            | row
        )
    return path


def test_medians_of_ratios_survive_a_machine_that_slows_down(tmp_path: Path):
    """Twice as slow, and once ten times: what counts is the ratio to the plain token beside."""
    rows = [
        {
            name: factor * value
            for name, value in {"plain_s": 1.0, "draft_s": 0.1, "target_s": 1.2, "rest_s": 0.1}.items()
        }
        for factor in (1, 2, 10)
    ]
    profile = read_profile(written(tmp_path / "p", rows))
    found = profile.iteration("d", 1, 64)
    assert found.total_s / profile.plain_s(64) == pytest.approx(1.4)
    assert profile.spread("d") == pytest.approx(0)


def test_between_what_was_measured_lies_a_straight_line(tmp_path: Path):
    rows = [
        {"lookahead": lookahead, "context": context, "draft_s": 0.1 * lookahead, "plain_s": 1.0 + context / 1000}
        for lookahead in (1, 5)
        for context in (0, 1000)
    ]
    profile = read_profile(written(tmp_path / "p", rows))
    assert profile.plain_s(250) == pytest.approx(1.25)
    ratios = [profile.iteration("d", d, 0).draft_s for d in (1, 3, 5)]
    assert ratios == pytest.approx([0.1, 0.3, 0.5])
    assert [d for d in range(1, 9) if profile.covers(Candidate("d", d))] == [1, 2, 3, 4, 5]
    with pytest.raises(RecordError, match=r"no times of other at lookahead 1, batch 1; .* --drafts other"):
        profile.iteration("other", 1, 64)
    with pytest.raises(RecordError, match=r"no times of d at lookahead 3, batch 4; .* --lookaheads 3 --batches 4"):
        profile.iteration("d", 3, 64, batch=4)
    with pytest.raises(RecordError, match=r"no times of batch 4; .*--batches 4"):
        profile.plain_s(64, batch=4)


def test_a_draft_that_was_not_timed_everywhere_is_left_out_there(tmp_path: Path, capsys):
    rows = [{"draft": "d"}, {"draft": "d", "lookahead": 8}, {"draft": "e", "lookahead": 2}, {"batch": 4}]
    rows.append({"batch": 8, "drafter": "ngram", "draft": "n-gram"})
    profile = read_profile(written(tmp_path / "p", [{"pass_s": 1.0} | row for row in rows]))
    show(profile, parse_shape("1x64/2h/96"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = [line[:-1] for line in lines if line and line[0] in "de" and line[-1].endswith("%")]
    assert cells == [["d", *3 * ("1400.00", "(100.00)")], ["e", "1400.00", "(100.00)"], ["d", "1400.00", "(100.00)"]]
    passes = [" ".join(line) for line in lines if line and line[0] == "context"]
    assert [line.rpartition("tokens: ")[2].count(":") for line in passes if "pass" in line] == [4, 2, 1]


def test_what_is_asked_for_at_a_speed_comes_from_samples_at_that_speed(tmp_path: Path):
    """Two states of a machine: in one memory is slow, in the other computing is. No one ratio holds in both."""
    states = ({"plain_s": 1.5, "draft_s": 0.8, "target_s": 4.0}, {"plain_s": 2.2, "draft_s": 0.6, "target_s": 3.3})
    rows = [
        {name: value * (0.99 + number % 3 / 100) for name, value in states[number % 2].items()} for number in range(24)
    ]
    profile = read_profile(written(tmp_path / "p", rows))
    for state in states:
        found = profile.iteration("d", 1, 64, state=MachineState(state["plain_s"]))
        assert found.draft_s == pytest.approx(state["draft_s"], rel=0.01)
        assert found.verify_s == pytest.approx(state["target_s"], rel=0.01)
    far = profile.iteration("d", 1, 64, state=MachineState(22.0))  # as slow as never: in the ratios of the slower state
    assert far.verify_s == pytest.approx(33.0, rel=0.02)


def test_a_state_that_one_point_has_not_met_is_known_from_the_others(tmp_path: Path):
    """Cores far apart make drafting half as long again; while `d` was timed they stood close together."""
    rows = [
        {"draft": draft, "draft_s": base * (1.5 if far else 1.0), "handover_s": 160e-9 if far else 40e-9}
        for draft, base in (("d", 0.1), ("e", 0.2))
        for far in ((False,) if draft == "d" else (False, True))
        for _ in range(8)
    ]
    profile = read_profile(written(tmp_path / "p", rows))
    found = profile.iteration("d", 1, 64, state=MachineState(1.0, 160e-9))
    assert found.draft_s == pytest.approx(0.15, rel=0.05)


def test_one_disturbed_sample_decides_nothing(tmp_path: Path, monkeypatch):
    """In a state that was hardly met while profiling: the nearest sample is one during which somebody else computed."""
    rows = [{"plain_s": 1.0 + number / 100, "target_s": 1.1 + 1.1 * number / 100} for number in range(12)]
    rows.append({"plain_s": 1.6, "target_s": 44.0})
    profile = read_profile(written(tmp_path / "p", rows))
    assert profile.iteration("d", 1, 64, state=MachineState(1.6)).verify_s == pytest.approx(1.6 * 1.1, rel=0.01)
    monkeypatch.setattr(machine_state, "ENOUGH_SAMPLES", 1)
    assert profile.iteration("d", 1, 64, state=MachineState(1.6)).verify_s == pytest.approx(44.0, rel=0.01)


def test_cores_that_moved_are_another_state(tmp_path: Path):
    """Two placements with plain decoding alike: only the handover between cores tells them apart."""
    placements = ({"handover_s": 55e-9, "target_s": 3.4}, {"handover_s": 340e-9, "target_s": 4.3})
    profile = read_profile(written(tmp_path / "p", [placements[number % 2] for number in range(8)]))
    for placement in placements:
        found = profile.iteration("d", 1, 64, state=MachineState(1.0, placement["handover_s"]))
        assert found.verify_s == pytest.approx(placement["target_s"])
    unknown = profile.iteration("d", 1, 64, state=MachineState(1.0)).verify_s
    assert placements[0]["target_s"] < unknown < placements[1]["target_s"]


def test_verification_is_the_same_for_all_drafts(tmp_path: Path):
    rows = [{"draft": draft, "target_s": seconds} for draft, seconds in (("d", 1.0), ("e", 1.2), ("e", 1.4))]
    profile = read_profile(written(tmp_path / "p", rows))
    assert profile.iteration("d", 1, 64).verify_s == profile.iteration("e", 1, 64).verify_s == pytest.approx(1.2)


def test_other_proposers_leave_the_times_of_drafts_alone(tmp_path: Path):
    """A tree takes longer to verify than a chain as deep; a profile from before there were any is read as it is."""
    tree = (0, 0, 1)
    rows = [{}, {"target_s": 2.0, "drafter": "tree", "tree": tree}, {"drafter": "ngram", "draft": "n-gram"}]
    profile = read_profile(written(tmp_path / "p", rows))
    assert profile.drafts == ["d"]
    state = MachineState(1.0)
    for met in (None, state):
        assert profile.iteration("d", 1, 64, state=met).verify_s == pytest.approx(1.2)
        assert profile.iteration_of(Candidate("d", 1, "tree", tree), 64, state=met).verify_s == pytest.approx(2.0)
    assert profile.verification_s(1, 64) == pytest.approx(1.2)
    with pytest.raises(RecordError, match="no times of other"):
        profile.covers(Candidate("other", 1))


def test_shapes_with_random_weights_are_no_drafts(tmp_path: Path, capsys, monkeypatch):
    """Nobody can load them by their names."""
    profile = read_profile(written(tmp_path / "p", [{}, {"draft": "random:1x64/2h/96"}]))
    assert (profile.drafts, profile.shapes) == (["d"], ["1x64/2h/96"])
    written(tmp_path / "shapes", [{"draft": "random:1x64/2h/96"}])
    make_trace(tmp_path / "t")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "--trace", "t", "--profile", "shapes"]) == 2
    assert "the profile has the times of no draft model; name one with profile --drafts" in capsys.readouterr().err


def make_trace(path: Path) -> None:
    about = {"target": "t", "vocabulary": {"size": 8, "tokens": None, "digest": None}, "sampling": {}}
    output = {"id": "0", "set": "s", "sample": 0, "prompt": [1], "output": [2, 3]}
    Records.open(path, trace.KIND, about).append(output)


@pytest.mark.parametrize("wrong", [{"plain_s": 0.0}, {"verify_s": float("nan")}, {"draft_s": -1.0}])
def test_times_that_cannot_be(tmp_path: Path, wrong: dict):
    with pytest.raises(RecordError, match=r"cannot be, measure it again|verify_s is nan, not a number"):
        read_profile(written(tmp_path / "p", [wrong]))
