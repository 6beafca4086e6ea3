"""Replay of token trees equals the live engine, iteration by iteration."""

import json
from pathlib import Path

import pytest
from test_replay_live import recorded

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import OptionError
from shallowdraft.models.tree import Tree
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.tree import TokenRanks, replay_ranks
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace

CHAIN = Tree((0, 1, 2))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    return path, recorded(sd.load("zoo:target"), 6, path)


def test_every_iteration_of_a_tree_is_known(trace):
    target, draft = sd.load("zoo:target"), sd.load_draft("zoo:4x128")
    found = replay_ranks(draft, trace[1])
    chosen = found.tree(10)
    assert len(chosen.parents) == 10
    for tree in (chosen, Tree((0, 0, 1)), CHAIN):
        options = {"draft": draft, "drafter": "tree", "tree": tree, "max_new_tokens": 64}
        for output, kept in zip(trace[1].outputs, found.kept_by_iteration(tree), strict=True):
            live = sd.generate(target, output.prompt, **options)
            assert live.token_ids == output.output
            assert live.accepted_by_iteration == kept
    assert found.tar(CHAIN) == pytest.approx(replay_model(draft, trace[1]).tar()[3])
    assert found.tar(chosen) > found.tar(CHAIN)


def test_beyond_the_drafts_context_nothing_is_kept():
    assert TokenRanks("draft", [[0] * 8], [5]).kept_by_iteration(CHAIN) == [[3, 0, 0, 0, 0]]


def test_the_command_writes_a_tree_that_generate_takes(trace, tmp_path: Path, capsys):
    tree, command = str(tmp_path / "tree.json"), ["replay", "--trace", str(trace[0]), "--drafts", "zoo:4x128"]
    assert main([*command, "--nodes", "6", "--out", tree, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["drafts"][0]["tree"]
    assert len(said["parents"]) == 6
    generate = ["generate", "--target", "zoo:target", "--prompt", "One", "--max-new-tokens", "8", "--tree"]
    assert main([*generate, tree, "--draft", "zoo:4x128", "--drafter", "tree"]) == 0
    assert main([*generate, tree, "--draft", "zoo:4x128"]) == 2
    assert main([*generate, str(tmp_path / "none.json"), "--draft", "zoo:4x128", "--drafter", "tree"]) == 2
    (tmp_path / "junk.json").write_text('{"parents": 3}')
    assert main([*generate, str(tmp_path / "junk.json"), "--draft", "zoo:4x128", "--drafter", "tree"]) == 2
    assert "this is no tree" in capsys.readouterr().err
    for wrong in (["--nodes", "0"], ["--out", tree]):
        assert main([*command, *wrong]) == 2


def test_traces_that_cannot_be(trace):
    draft, whole = sd.load_draft("zoo:4x128"), trace[1]
    drawn = Trace(whole.target, whole.vocabulary, Sampling(1.0), whole.outputs)
    with pytest.raises(OptionError, match="was sampled"):
        replay_ranks(draft, drawn)
    with pytest.raises(OptionError, match="record longer ones"):
        TokenRanks("draft", [[0] * 3], [50]).tree(4)
