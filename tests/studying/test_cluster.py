"""Cells on a Ray cluster of two workers on this machine: what comes back is what comes without one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.building.token_store import open_store
from shallowdraft.cli import main
from shallowdraft.errors import ClusterError, OptionError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.progress import run_silently
from shallowdraft.prompts import load_prompts
from shallowdraft.runs.trace import read_trace
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying import proposers
from shallowdraft.studying.cluster import Cluster, Here
from shallowdraft.studying.search import Builder, Search, ShapeCandidate, plan_rungs, write_text
from shallowdraft.studying.study import Plan, study

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with two workers."""
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(sd.__file__).parents[1]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        node = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=node)
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


def test_without_a_cluster_there_is_no_ray():
    code = (
        "import sys; from shallowdraft.studying.cluster import Here; "
        "print(*Here().map(abs, [-1]), 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(0, 1) False\n"


def test_a_model_travels_by_name():
    draft = replace(sd.load_draft("zoo:4x128"), name="mine")
    loader, arguments = draft.__reduce__()
    again = loader(*arguments)
    assert (again.name, again.shape, again.decoder.packing) == ("mine", draft.shape, draft.decoder.packing)
    draft.decoder.origin = None
    with pytest.raises(OptionError, match="save it first"):
        draft.__reduce__()


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.mark.slow
def test_a_study_has_the_same_records(address: str, tmp_path: Path, capsys):
    given = ["study", "--target", "zoo:target", "--drafts", "zoo:4x128", "zoo:2x192", "--prompts", "zoo"]
    given += ["--drafters", "model", "tree", "ngram", "skip", "--nodes", "4", "--lookaheads", "2:2", "--live", "6"]
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
        if name == "live.jsonl":  # what stalls is taken again
            one, other = (list(map(list, set(map(tuple, found)))) for found in (one, other))
        assert sorted(one) == sorted(other)
    before = (cluster / "trace.jsonl").read_text()
    ray.shutdown()
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
    made = [proposers.model_proposer(draft) for draft in drafts]
    fatal = [mortal(made[0], tmp_path / "died"), made[1]]
    found = {}
    for name, of_run, executor in (("here", made, None), ("cluster", fatal, Cluster(address))):
        study(target, of_run, plan, tmp_path / name, lambda _name, steps, _total: [*steps], executor=executor)
        found[name] = rows(tmp_path / name / "replays.jsonl")
    assert (tmp_path / "died").exists()
    assert found["here"] == found["cluster"]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pair/target`, `pair/draft` and a trace `t`, by paths that hold in the test's folder alone."""
    monkeypatch.chdir(tmp_path)
    made = make_pair(parse_shape("4x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8)
    made.target.tokenizer.eos_token = made.target.tokenizer.convert_ids_to_tokens(511)  # documents begin after it
    made.save(Path("pair"))
    recorded = ["record", "--target", "pair/target", "--prompts", "zoo", "--limit", "4", "--max-new-tokens", "16"]
    assert main([*recorded, "--out", "t"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("pair")
def test_replay_finds_the_same(address: str, capsys):
    capsys.readouterr()
    for more in ([], ["--cluster", address]):
        drafts = ["--drafts", "pair/draft", "pair/target", "nowhere"]
        assert main(["replay", "--trace", "t", *drafts, "--nodes", "4", "--json", *more]) == 2
    here, cluster = capsys.readouterr().out.splitlines()
    assert here == cluster


@pytest.mark.slow
@pytest.mark.usefixtures("pair")
def test_a_search_builds_the_same(address: str):
    target = sd.load("pair/target", "float32", trainable=True)
    candidates = [ShapeCandidate("pair/target", replace(target.shape, layers=layers)) for layers in (1, 2)]
    built = []
    for out, executor in ((Path("here"), Here()), (Path("cluster"), Cluster(address))):
        assert [*write_text(target, out, 8192, None)]
        store = open_store(out / "text")
        builder = Builder(target, {"pair/target": target}, store, out, run_silently)
        search = Search(
            builder=builder,
            engine=sd.load("pair/target"),
            load_draft=sd.load_draft,
            trace=read_trace(Path("t")),
            profile=out / "profile.jsonl",
            lookaheads=[1, 2],
            follow=run_silently,
            executor=executor,
            say=pytest.fail,
            rounds=1,
        )
        search.run(candidates, plan_rungs(2, 8192))
        assert [row["rung"] for row in rows(out / "search.jsonl")] == [0, 0, 1]
        built.append([sd.load(builder.saved(one, 0)).decoder.dense_state() for one in candidates])
    for one, other in zip(*built, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("address", ["localhost:1", "localhost:99999", "nonsense"])
def test_a_cluster_that_is_not_there_is_named(address: str):
    with pytest.raises(ClusterError, match="ray start"):
        Cluster(address)
