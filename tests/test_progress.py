"""The line of progress: into a terminal without a thread, into a log now and then."""

import threading
from collections.abc import Iterator

import pytest

from shallowdraft.display import progress
from shallowdraft.display.progress import follow
from shallowdraft.progress import StepsDone


def test_nothing_is_drawn_between_what_is_done(capsys, monkeypatch: pytest.MonkeyPatch):
    """No thread draws while something may be timed; the line is there as soon as anything is known."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = threading.active_count()

    def steps() -> Iterator[int]:
        assert threading.active_count() == before
        yield 3
        assert "3/4" in capsys.readouterr().err
        assert threading.active_count() == before
        yield 4

    follow("working", steps(), 4)


def test_a_log_has_a_line_now_and_then(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    follow("working", iter([1, 2]), 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0)
    follow("working", iter([1, 2]), 2)
    assert capsys.readouterr().err == "working: 1 of 2\nworking: 2 of 2\n"


def test_figures_of_the_last_step_stay(capsys, monkeypatch: pytest.MonkeyPatch):
    """In a pipe one line at the end, however many steps there were."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    follow("training", iter([StepsDone(number, f"loss {4 - number}") for number in (1, 2, 3)]), 3)
    assert capsys.readouterr().err == "training: 3 of 3, loss 1\n"
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0)
    follow("training", iter([StepsDone(3, "loss 1")]), 3)
    assert capsys.readouterr().err == "training: 3 of 3, loss 1\n"
