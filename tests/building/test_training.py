"""The loop learns, and a run that is killed goes on to the very same weights."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shallowdraft
from shallowdraft.building.batches import Batches
from shallowdraft.building.masks import MaskTraining
from shallowdraft.building.recipe import Recipe, rows_at_once
from shallowdraft.building.tasks import Distillation, Pretraining, TrainingTask
from shallowdraft.building.token_store import TokenStore, write_store
from shallowdraft.building.training import fresh_decoder, train, validate
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.synthetic import byte_tokenizer
from shallowdraft.shapes.shape import ModelShape

# Of processes that tests start: the tests, and the package that this process imported.
SEARCH_PATH = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(shallowdraft.__file__).parents[1])))
SHAPE = ModelShape(2, 32, 2, 48, 320, kv_heads=1, tied=True)
RECIPE = Recipe(tokens=40 * 512, batch_tokens=512, sequence=32, micro_rows=8, learning_rate=5e-3, save_every=7)


def make_store(folder: Path) -> TokenStore:
    corpus = folder / "corpus"
    corpus.mkdir()
    words = random.Random(0)
    for domain, choice in (("animals", ["cat ", "dog ", "cow "]), ("colours", ["red ", "blue ", "green "])):
        text = "".join(words.choice(choice) for _ in range(6000))
        (corpus / f"{domain}.txt").write_text(text)
        (corpus / f"{domain}-val.txt").write_text(text[:3000])
    tokenizer = byte_tokenizer(320)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(300)
    return write_store(corpus, tokenizer, folder / "store")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("training"))


def reader(store: TokenStore, part: str = "train") -> Batches:
    return Batches(store, part=part, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=3)


def test_pretraining_and_distilling_raise_acceptance(store: TokenStore, tmp_path: Path):
    target = fresh_decoder(SHAPE, seed=1)
    before = validate(target, None, reader(store, "val"), 2)["loss"]
    records = list(train(target, Pretraining(), reader(store), RECIPE, tmp_path / "target"))
    assert [record.step for record in records] == list(range(1, 41))
    assert validate(target, None, reader(store, "val"), 2)["loss"] < 0.6 * before
    draft = fresh_decoder(ModelShape(1, 32, 2, 48, 320), seed=2)
    before = validate(draft, target, reader(store, "val"), 2)
    list(train(draft, Distillation(target, "hybrid"), reader(store), RECIPE, tmp_path / "draft"))
    after = validate(draft, target, reader(store, "val"), 2)
    assert after["acceptance"] > before["acceptance"] + 0.2
    assert after["greedy_tar"] > before["greedy_tar"]


def test_a_batch_may_be_accumulated(store: TokenStore, tmp_path: Path):
    finals = []
    for micro_rows in (3, 16):
        model = fresh_decoder(SHAPE, seed=1)
        list(
            train(
                model,
                Pretraining(),
                reader(store),
                replace(RECIPE, tokens=5 * 512, micro_rows=micro_rows),
                tmp_path / f"{micro_rows}",
            )
        )
        finals.append(model.state_dict())
    for name, tensor in finals[0].items():
        torch.testing.assert_close(tensor, finals[1][name], rtol=1e-3, atol=1e-5)


def test_the_learning_rate_rises_and_decays():
    recipe = Recipe(tokens=100 * 64, batch_tokens=64, sequence=64, learning_rate=1e-2, warmup=0.1, final_rate=0.1)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert recipe.steps == 100
    assert rates[0] == pytest.approx(1e-3)
    assert max(rates) == pytest.approx(1e-2) == pytest.approx(rates[9])
    assert rates[-1] == pytest.approx(1e-3, rel=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_run_that_diverges_stops_with_the_last_good_state(store: TokenStore, tmp_path: Path):
    class Explodes(Pretraining):
        calls = 0

        def loss(self, model, tokens):
            self.calls += 1
            return super().loss(model, tokens) * (math.nan if self.calls > 2 * 10 else 1)

    with pytest.raises(TrainingError, match="diverged"):
        list(train(fresh_decoder(SHAPE, seed=1), Explodes(), reader(store), RECIPE, tmp_path))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 7
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_loss_that_stays_high_is_neither_saved_nor_forgotten(store: TokenStore, tmp_path: Path):
    class Jumps(Pretraining):
        step = 0

        def begin(self, step, steps):
            self.step = step

        def loss(self, model, tokens):
            return super().loss(model, tokens) * (50 if self.step >= 10 else 1)

    for _ in range(2):
        with pytest.raises(TrainingError, match="diverged"):
            list(train(fresh_decoder(SHAPE, seed=1), Jumps(), reader(store), RECIPE, tmp_path))
        assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 7


def test_another_runs_checkpoint_is_not_taken(store: TokenStore, tmp_path: Path):
    list(train(fresh_decoder(SHAPE, seed=1), Pretraining(), reader(store), RECIPE, tmp_path))
    other = ModelShape(1, 32, 2, 48, 320)
    with pytest.raises(TrainingError, match="belongs to another run"):
        list(train(fresh_decoder(other, seed=1), Pretraining(), reader(store), RECIPE, tmp_path))


def test_fewer_rows_at_once_for_a_large_vocabulary():
    assert rows_at_once(SHAPE, 256) == 64
    assert rows_at_once(replace(SHAPE, vocab=128256), 256) == 5
    assert rows_at_once(replace(SHAPE, vocab=128256), 8192) == 1


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"tokens": 9, "batch_tokens": 10}, {"tokens": 9, "learning_rate": 2.0}]
)
def test_wrong_recipes(wrong):
    with pytest.raises(OptionError):
        Recipe(**wrong)


def test_unknown_objectives():
    with pytest.raises(OptionError, match="'mse' is unknown; use forward-kl"):
        Distillation(fresh_decoder(SHAPE, seed=1), "mse")


SCRIPT = """
import sys, time, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_training import RECIPE, SHAPE, reader
from shallowdraft.building.token_store import open_store
from shallowdraft.building.tasks import Pretraining
from shallowdraft.building.training import fresh_decoder, train
torch.set_num_threads(1)
store = open_store(Path({store!r}))
for record in train(fresh_decoder(SHAPE, seed=1), Pretraining(), reader(store), RECIPE, Path(sys.argv[1])):
    print(record.step, flush=True)
    time.sleep(0.02)
print("done", flush=True)
"""


def test_killed_at_random_moments_it_ends_with_the_same_bytes(store: TokenStore, tmp_path: Path):
    script = SCRIPT.format(tests=str(Path(__file__).parent), store=str(store.folder))
    environment = os.environ | {"PYTHONPATH": SEARCH_PATH}

    def run(folder: str, kill_after: int | None) -> bool:
        """Whether it came to its end before it was killed, some steps after its start."""
        command = [sys.executable, "-c", script, str(tmp_path / folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for seen, line in enumerate(process.stdout):
                if kill_after is not None and seen >= kill_after:
                    time.sleep(moments.uniform(0, 0.05))
                    process.send_signal(signal.SIGKILL)
                    return False
                if line == "done\n":
                    return True
        return False

    moments = random.Random(5)
    assert run("undisturbed", None)
    kills = 0
    while not run("killed", moments.randrange(2, 9) if kills < 4 else None):
        kills += 1
    assert kills == 4
    undisturbed, killed = (
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("undisturbed", "killed")
    )
    for name, tensor in undisturbed["model"].items():
        assert torch.equal(tensor, killed["model"][name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))


def test_a_full_disk_says_so_and_keeps_the_last_state(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = torch.save

    def full(state, path):
        saved(state, path)
        if state["step"] == 14:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"after step 14 could not be written .*No space left.*make room"):
        list(train(fresh_decoder(SHAPE, seed=1), Pretraining(), reader(store), RECIPE, tmp_path))
    assert not list(tmp_path.glob("*.partial"))
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 7


def test_metrics_go_to_tensorboard_where_it_is_installed(store: TokenStore, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = list(train(fresh_decoder(SHAPE, seed=1), Pretraining(), reader(store), RECIPE, tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([record.loss for record in records])


def test_recomputed_activations_change_nothing(store: TokenStore, tmp_path: Path):
    finals = []
    for recompute in (False, True):
        model = fresh_decoder(SHAPE, seed=1)
        short = replace(RECIPE, tokens=5 * 512)
        list(train(model, Pretraining(), reader(store), short, tmp_path / str(recompute), recompute=recompute))
        finals.append(model.state_dict())
    assert all(torch.equal(tensor, finals[1][name]) for name, tensor in finals[0].items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_training_follows_the_same_curve(store: TokenStore, tmp_path: Path):
    short = replace(RECIPE, tokens=5 * 512)
    curves = []
    for compiled in (False, True):
        model, folder = fresh_decoder(SHAPE, seed=1), tmp_path / str(compiled)
        curves.append(
            [step.loss for step in train(model, Pretraining(), reader(store), short, folder, compiled=compiled)]
        )
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)


def stopped_after(steps: int, model: Decoder, task: TrainingTask, batches: Batches, folder: Path) -> None:
    """Train for some steps and close the run, as `follow` does when it is told to end."""
    run = train(model, task, batches, RECIPE, folder)
    for record in run:
        if record.step >= steps:
            run.close()


@pytest.mark.parametrize("kind", ["pretrain", "masks"])
def test_a_run_that_is_told_to_end_goes_on_from_there_to_the_same_bytes(kind: str, store: TokenStore, tmp_path: Path):
    def begin() -> tuple[Decoder, TrainingTask]:
        model = fresh_decoder(SHAPE, seed=1)
        return model, Pretraining() if kind == "pretrain" else MaskTraining(
            fresh_decoder(SHAPE, seed=1), replace(SHAPE, ffn=24)
        )

    finals = []
    for stops in ((), (3, 33)):  # 33: masks are frozen
        folder = tmp_path / f"{len(stops)}"
        for stop in stops:
            stopped_after(stop, *begin(), reader(store), folder)
            assert torch.load(folder / "state.pt", weights_only=True)["step"] == stop
        model, task = begin()
        records = list(train(model, task, reader(store), RECIPE, folder))
        assert records[0].step == (stops[-1] + 1 if stops else 1)
        finals.append(model.state_dict())
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name


def test_it_is_saved_after_some_time_too(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def saved_step() -> int | None:
        return torch.load(tmp_path / "state.pt", weights_only=True)["step"] if list(tmp_path.glob("state.pt")) else None

    run = train(fresh_decoder(SHAPE, seed=1), Pretraining(), reader(store), RECIPE, tmp_path)
    next(run)
    assert saved_step() is None
    monkeypatch.setattr("shallowdraft.building.training.SAVE_EVERY_S", 0.0)
    monkeypatch.setattr("shallowdraft.building.training.SAVING_SHARE", 1e9)
    next(run)
    assert saved_step() == 2
    monkeypatch.setattr("shallowdraft.building.training.SAVING_SHARE", 1e-9)  # as if saving took long
    next(run)
    next(run)
    assert saved_step() == 2
