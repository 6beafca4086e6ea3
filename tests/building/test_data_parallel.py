"""Two processes under torchrun learn what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from building.test_training import SEARCH_PATH, make_store

SCRIPT = """
import copy, json, os, sys, torch
from dataclasses import replace
from pathlib import Path
from building.test_training import RECIPE, SHAPE, reader
from shallowdraft import distributed
from shallowdraft.building import data_parallel
from shallowdraft.building.token_store import open_store
from shallowdraft.building.tasks import Distillation, Pretraining
from shallowdraft.building.masks import MaskTraining
from shallowdraft.building.training import fresh_decoder, train
from shallowdraft.models.checkpoint import save_decoder
torch.set_num_threads(1)
job_name, store, folder, stop, recompute = sys.argv[1:]
distributed.join(torch.device("cpu"))
parent = fresh_decoder(SHAPE, seed=1)
model = fresh_decoder(SHAPE, seed=2) if job_name in ("distil", "rollout") else copy.deepcopy(parent)
job = {
    "pretrain": Pretraining(),
    "distil": Distillation(parent, "hybrid"),
    "rollout": Distillation(parent, "hybrid", rollout=0.25),
    "masks": MaskTraining(parent, replace(SHAPE, layers=1, ffn=24)),
}[job_name]
batches = reader(open_store(Path(store)))
for record in train(model, job, batches, RECIPE, Path(folder), recompute=recompute == "yes"):
    if record.step == int(stop):
        break
if "LOCAL_RANK" in os.environ:
    assert distributed.processes() == 2
    local = model.blocks[0].up.weight.to_local()
    assert local.numel() * 2 == parent.blocks[0].up.weight.numel()
whole = data_parallel.gather_model(model)
if distributed.is_first():
    save_decoder(whole, Path(folder) / "model")
distributed.leave()
"""


def run(processes: int, job: str, store: Path, folder: Path, stop: int = 0, recompute: str = "no") -> list[dict]:
    """The records of a run."""
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *(launch if processes == 2 else []), str(script)]
    environment = os.environ | {
        "PYTHONPATH": SEARCH_PATH,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, job, str(store), str(folder), str(stop), recompute],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("data_parallel")).folder


SLOW = pytest.mark.slow


@pytest.mark.parametrize("job", ["pretrain", pytest.param("masks", marks=SLOW), pytest.param("distil", marks=SLOW)])
def test_the_loss_curve_is_that_of_one_process(job: str, store: Path, tmp_path: Path):
    alone, together = (run(processes, job, store, tmp_path / str(processes)) for processes in (1, 2))
    assert len(alone) == len(together) == 40
    for step_alone, step_together in zip(alone, together, strict=True):
        assert step_together["loss"] == pytest.approx(step_alone["loss"], abs=1e-3)
        assert step_together["gradient_norm"] == pytest.approx(step_alone["gradient_norm"], rel=1e-2)


@pytest.mark.slow
def test_rollouts_work_in_a_sharded_run(store: Path, tmp_path: Path):
    alone, together = (run(processes, "rollout", store, tmp_path / str(processes)) for processes in (1, 2))
    assert together[-1]["loss"] == pytest.approx(alone[-1]["loss"], rel=0.2)  # they draw different words
    assert together[-1]["loss"] < 0.8 * together[0]["loss"]


@pytest.mark.slow
def test_a_sharded_run_goes_on_where_it_stopped_and_saves_a_whole_model(store: Path, tmp_path: Path):
    straight = run(2, "pretrain", store, tmp_path / "straight", recompute="yes")
    run(2, "pretrain", store, tmp_path / "stopped", stop=16)
    assert run(2, "pretrain", store, tmp_path / "stopped")[-1]["loss"] == pytest.approx(straight[-1]["loss"], abs=1e-5)
    from shallowdraft.models.checkpoint import load_decoder

    decoder = load_decoder(tmp_path / "straight" / "model", dtype=torch.float32, device=torch.device("cpu"))
    state = torch.load(tmp_path / "straight" / "state.pt", weights_only=True)
    assert torch.equal(decoder.embed.weight, state["model"]["embed.weight"])
