"""Cells on a Ray cluster of two nodes on this machine: what comes back is what comes without one."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import ClusterError, OptionError
from shallowdraft.prompts import load_prompts
from shallowdraft.records import Records
from shallowdraft.study import proposers
from shallowdraft.study.cluster import Cluster
from shallowdraft.study.study import Plan, study

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster whose nodes have one worker each."""
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(sd.__file__).parents[1]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        node = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=node)
        nodes.add_node(num_cpus=1, object_store_memory=100_000_000)
        yield nodes.address
        nodes.shutdown()


@pytest.fixture(autouse=True)
def _disconnected() -> Iterator[None]:
    yield
    ray.shutdown()


def test_every_cell_comes_back_also_from_lost_workers(address: str, tmp_path: Path):
    def unlucky(cell: int) -> tuple[int, int]:
        died = tmp_path / f"died-{cell}"
        if cell % 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return cell**2, os.getpid()

    cluster = Cluster(address)
    found = dict(cluster.map(unlucky, [1, 2, 3, 4]))
    assert [found[number][0] for number in range(4)] == [1, 4, 9, 16]
    assert os.getpid() not in {process for _, process in found.values()}
    assert len([*tmp_path.iterdir()]) == 2


def test_errors_are_those_of_the_cell(address: str):
    def wrong(cell: int) -> int:
        raise OptionError(f"cell {cell}")

    with pytest.raises(OptionError, match="cell 7"):
        dict(Cluster(address).map(wrong, [7]))


def test_a_model_travels_by_name():
    draft = replace(sd.load_draft("zoo:4x128"), name="mine")
    loader, arguments = draft.__reduce__()
    again = loader(*arguments)
    assert (again.name, again.shape, again.decoder.packing) == ("mine", draft.shape, draft.decoder.packing)
    with pytest.raises(OptionError, match="save it first"):
        replace(draft, origin=None).__reduce__()


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.mark.slow
def test_a_study_has_the_same_records(address: str, tmp_path: Path, capsys):
    given = ["study", "--target", "zoo:target", "--drafts", "zoo:4x128", "zoo:2x192", "--prompts", "zoo"]
    given += ["--drafters", "model", "tree", "ngram", "skip", "--nodes", "4", "--lookaheads", "2:2", "--live", "4"]
    given += ["--limit", "3", "--max-new-tokens", "24", "--rounds", "1", "--json"]
    runs = tmp_path / "here", tmp_path / "cluster"
    for run, more in zip(runs, ([], ["--cluster", address]), strict=True):
        assert main([*given, "--out", str(run), *more]) == 0
    here, cluster = runs
    for name in ("trace.jsonl", "replays.jsonl"):
        assert rows(here / name) == rows(cluster / name)
    assert sorted(map(str, rows(here / "skips.jsonl"))) == sorted(map(str, rows(cluster / "skips.jsonl")))
    for name, parts in (
        ("profile.jsonl", ("draft", "lookahead", "context", "batch", "round", "turn")),
        ("live.jsonl", ("draft", "set", "id", "round")),
    ):
        one, other = ([[row[part] for part in parts] for row in rows(run / name)] for run in runs)
        assert sorted(one) == sorted(other)
    before = (cluster / "trace.jsonl").read_text()
    assert main([*given, "--out", str(cluster), "--cluster", address]) == 0
    assert (cluster / "trace.jsonl").read_text() == before


@pytest.mark.slow
def test_a_study_loses_nothing_with_a_worker(address: str, tmp_path: Path):
    def mortal(proposer: proposers.Proposer, died: Path) -> proposers.Proposer:
        whole = proposer.replay

        def replayed(trace, sizes, folder):
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(trace, sizes, folder)

        return replace(proposer, replay=replayed)

    target, drafts = sd.load("zoo:target"), [sd.load_draft(name) for name in ("zoo:4x128", "zoo:2x192")]
    plan = Plan([("zoo", prompt) for prompt in load_prompts("zoo")[:3]], [2], 16, rounds=1, live=0)
    made = [proposers.drafting_model(draft) for draft in drafts]
    fatal = [mortal(made[0], tmp_path / "died"), made[1]]
    found = {}
    for name, of_run, executor in (("here", made, None), ("cluster", fatal, Cluster(address))):
        study(target, of_run, plan, tmp_path / name, lambda _name, steps, _total: [*steps], executor=executor)
        found[name] = rows(tmp_path / name / "replays.jsonl")
    assert (tmp_path / "died").exists()
    assert found["here"] == found["cluster"]


@pytest.mark.slow
def test_replay_and_search(address: str, tmp_path: Path, capsys, monkeypatch):
    """Relative paths are those of the command."""
    monkeypatch.chdir(tmp_path)
    make = ["pair", "--target-shape", "4x64/2h/96", "--draft-shape", "1x64/2h/96", "--vocab", "512", "--out", "pair"]
    assert main(make) == 0
    recorded = ["record", "--target", "pair/target", "--prompts", "zoo", "--limit", "4", "--max-new-tokens", "16"]
    assert main([*recorded, "--out", "t"]) == 0
    capsys.readouterr()
    for more in ([], ["--cluster", address]):
        drafts = ["--draft", "pair/draft", "pair/target", "nowhere"]
        assert main(["replay", "--trace", "t", *drafts, "--nodes", "4", "--json", *more]) == 2
    here, cluster = capsys.readouterr().out.splitlines()
    assert here == cluster
    timed = ["profile", "--target", "pair/target", "--draft", "pair/draft", "--shapes", "auto", "--out", "p"]
    assert main([*timed, "--lookaheads", "1", "4", "--contexts", "16", "--rounds", "1"]) == 0
    search = ["design", "--target", "pair/target", "--profile", "p", "--lookaheads", "1:4", "--trace", "t", "--search"]
    search += ["--candidates", "3", "--tokens", "20000", "--text", "16384", "--out", "o", "--cluster", address]
    ray.shutdown()
    assert main(search) == 0
    file = Records.read(Path("o/search.jsonl"), "search")
    assert len([*file]) == sum(rung["candidates"] for rung in file.about["rungs"])
    assert (Path("o") / "draft" / "config.json").exists()


@pytest.mark.parametrize("address", ["localhost:1", "localhost:99999", "nonsense"])
def test_a_cluster_that_is_not_there_is_named(address: str):
    with pytest.raises(ClusterError, match="ray start"):
        Cluster(address)
