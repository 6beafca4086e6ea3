"""Replay of every proposer that is no chain of a draft model equals the live engine, iteration by iteration."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_replay_live import recorded

import shallowdraft as sd
from shallowdraft.decoding.candidate import options_of
from shallowdraft.errors import OptionError
from shallowdraft.models import zoo
from shallowdraft.models.heads import Heads, fresh_heads
from shallowdraft.replaying.medusa import replay_medusa
from shallowdraft.replaying.ngram import replay_ngram
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.replaying.skip import replay_skip
from shallowdraft.replaying.tree import replay_tree
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace

pytestmark = pytest.mark.skipif(not zoo.names(), reason="the zoo is not built")

SKIPS = (8, 9, 10, 11, 13)


@pytest.fixture(scope="module")
def target() -> sd.Model:
    return sd.load("zoo:target")


@pytest.fixture(scope="module")
def trace(target: sd.Model, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(target, 3, tmp_path_factory.mktemp("trace") / "trace.jsonl")


@pytest.fixture(scope="module")
def heads(target: sd.Model) -> Heads:
    """Barely moved from where training begins: they are right now and then."""
    heads = fresh_heads(target.decoder, 3)
    torch.nn.init.normal_(heads.inner.weight, std=0.02, generator=torch.Generator().manual_seed(2))
    return heads.requires_grad_(False)


def compare(target: sd.Model, replay: CountedReplay, options: dict[str, object]) -> None:
    candidates = {(candidate.drafter, candidate.draft): options for candidate in replay.candidates.values()}
    for size, candidate in replay.candidates.items():
        stats = []
        for row, output in enumerate(replay.trace.outputs):
            live = sd.generate(target, output.prompt, max_new_tokens=64, **options_of(candidate, candidates))
            assert live.token_ids == output.output
            assert live.accepted_by_iteration == replay.kept_by_iteration(size)[row]
            stats.append(live.stats)
            nodes = len(candidate.tree) or None
            proposed = {
                nodes or length: iterations[row] for length, iterations in replay.iterations_by_length(size).items()
            }
            assert live.stats.drafted == sum(length * iterations for length, iterations in proposed.items())
        whole = sd.total(stats, one_batch=False)
        assert replay.tar()[size] == pytest.approx(whole.tar)
        shares = replay.counts.acceptance_by_position(size)[: candidate.lookahead]
        assert shares.tolist() == pytest.approx(list(whole.acceptance_by_position[: len(shares)]))


def test_copied_text(target: sd.Model, trace: Trace):
    replay = replay_ngram(trace, (1, 3, 8))
    compare(target, replay, {"drafter": "ngram"})
    assert max(replay.tar().values()) > 1.1
    whole = replay_ngram(trace, (3,), whole=True)  # as on a GPU
    assert whole.tar()[3] >= replay.tar()[3]
    assert list(whole.iterations_by_length(3)) == [3]


def test_heads(target: sd.Model, trace: Trace, heads: Heads):
    replay = replay_medusa(target, heads, "heads", trace, (2, 9))
    compare(target, replay, {"drafter": "medusa", "heads": heads})
    assert replay.tar()[9] > 1.05


def test_trees(target: sd.Model, trace: Trace):
    draft = sd.load_draft("zoo:4x128")
    compare(target, replay_tree(draft, trace, (6,)), {"draft": draft, "drafter": "tree"})


def test_skipped_parts_and_that_they_are_tried_once(target: sd.Model, trace: Trace, tmp_path: Path, monkeypatch):
    path = tmp_path / "skips.jsonl"
    replay = replay_skip(target, SKIPS, trace, (1, 4), path)
    compare(target, replay, {"drafter": "skip", "skips": SKIPS})
    assert replay.tar()[4] > 2
    monkeypatch.setattr("shallowdraft.replaying.skip.drafted_right", None)
    again = replay_skip(target, SKIPS, trace, (2, 4), path)
    assert again.tar()[4] == replay.tar()[4]
    with pytest.raises(TypeError):
        replay_skip(target, SKIPS, trace, (5,), path)  # what was tried is too short


def test_a_trace_that_was_sampled_is_refused(target: sd.Model, trace: Trace):
    drawn = Trace(trace.target, trace.vocabulary, Sampling(1.0), trace.outputs)
    with pytest.raises(OptionError, match="was sampled"):
        replay_ngram(drawn, (1,))


def test_figures_are_those_of_iterations(trace: Trace):
    replay = replay_ngram(trace, (1, 4))
    figures = replay.record("ngram")
    emitted = sum(len(output.output) - 1 for output in trace.outputs)
    assert figures.tar[4] == pytest.approx(emitted / sum(map(len, replay.kept_by_iteration(4))))
    low, high = figures.tar_interval[4]
    assert low <= figures.tar[4] <= high
    assert np.isclose(
        sum(iterations.sum() for iterations in replay.iterations_by_length(4).values()), replay.counts.at(4).sum()
    )
