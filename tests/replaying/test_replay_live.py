"""Replay equals live on trained models: accepted counts, iteration by iteration."""

from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.models import zoo
from shallowdraft.prompts import load_prompts
from shallowdraft.replaying.iterations import kept_by_iteration
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.recording import record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace, read_trace

pytestmark = pytest.mark.skipif(not zoo.names(), reason="the zoo is not built")


def recorded(target: sd.Model, count: int, path: Path) -> Trace:
    prompts = load_prompts("zoo")
    chosen = [("zoo", prompts[index * len(prompts) // count]) for index in range(count)]
    for _ in record(target, chosen, path, max_new_tokens=64, sampling=Sampling()):
        pass
    return read_trace(path)


def compare(target: sd.Model, name: str, trace: Trace, lookaheads: list[int]) -> None:
    draft = sd.load_draft(f"zoo:{name}")
    replay = replay_model(draft, trace)
    for lookahead in lookaheads:
        stats = []
        for row, output in enumerate(trace.outputs):
            live = sd.generate(target, output.prompt, draft=draft, lookahead=lookahead, max_new_tokens=64)
            stats.append(live.stats)
            assert live.token_ids == output.output
            assert live.accepted_by_iteration == kept_by_iteration(
                replay.acceptance[row] > 0.5, lookahead, replay.room[row]
            )
        assert replay.tar()[lookahead] == pytest.approx(sd.total(stats, one_batch=False).tar)


def test_some(tmp_path: Path):
    target = sd.load("zoo:target")
    trace = recorded(target, 6, tmp_path / "trace.jsonl")
    for name in ("4x128", "2x192-masks"):
        compare(target, name, trace, [1, 4, 12])


@pytest.mark.slow
def test_every_draft(tmp_path: Path):
    target = sd.load("zoo:target")
    trace = recorded(target, 40, tmp_path / "trace.jsonl")
    for name in zoo.names():
        if name != "target":
            compare(target, name, trace, list(range(1, 13)))
