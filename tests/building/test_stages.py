"""The stages of building a draft as functions: plain arguments, progress through callbacks, nothing printed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.building.pruning_stage import estimate_pruning, prune
from shallowdraft.building.recipe import DistillationOptions, TrainingOptions
from shallowdraft.building.stages import distill, pretrain, train_heads
from shallowdraft.errors import OptionError
from shallowdraft.models.heads import load_heads

BUDGET = {"tokens": 2048, "batch_tokens": 512, "sequence": 32, "learning_rate": 5e-3}
DISTILLATION = DistillationOptions(**BUDGET, generated=512)


class Observer:
    """Callbacks that keep what they are called with."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[list[int], int]] = {}
        self.said: list[str] = []

    def follow(self, name: str, steps: Iterator[int], total: int) -> None:
        self.stages[name] = list(steps), total

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("animals.txt", "animals-val.txt"):
        (folder / name).write_text("The old cat sleeps in the house. The red dog runs in the garden. " * 200)
    return folder


@pytest.fixture(scope="module")
def parent(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parent") / "model"
    pretrain(shape="3x32/2h/48", corpus=corpus, out=out, options=TrainingOptions(**BUDGET), vocab=280, context=128)
    return out


def test_a_stage_reports_progress_and_returns_what_it_wrote(corpus: Path, tmp_path: Path, capfd):
    observer, out = Observer(), tmp_path / "model"
    arguments = {
        "shape": "1x32/2h/48",
        "corpus": corpus,
        "out": out,
        "options": TrainingOptions(**BUDGET),
        "vocab": 280,
        "context": 128,
        "follow": observer.follow,
        "say": observer.say,
    }
    result = pretrain(**arguments)
    model = sd.load(out)
    assert (result.out, result.parameters, result.about["shape"]) == (out, model.shape.parameters, "1x32/2h/48")
    assert result.held_out["loss"] > 0
    assert result.seconds > 0
    assert observer.stages == {"pretrain": ([1, 2, 3, 4], 4)}
    assert "loss" in observer.stages["pretrain"][0][-1].detail
    assert observer.said == [f"reading {corpus}"]
    again = pretrain(**arguments)
    assert again.finished_before
    assert (again.held_out, again.parameters, again.seconds) == (result.held_out, result.parameters, result.seconds)
    assert observer.said[1:] == [f"{out} is done"]
    assert capfd.readouterr() == ("", "")


def test_pruning_from_python_after_an_estimate(parent: Path, corpus: Path, tmp_path: Path):
    out = tmp_path / "draft"
    arguments = {"parent": str(parent), "shape": "1x32/2h/48", "corpus": corpus, "out": out, "options": DISTILLATION}
    estimate = estimate_pruning(**arguments)
    assert not out.exists()
    observer = Observer()
    result = prune(**arguments, follow=observer.follow)
    assert estimate.parameters == result.parameters == sd.load(out).shape.parameters
    assert estimate.memory_bytes > 4 * estimate.parameters
    assert 0 < result.held_out["acceptance"] <= 1
    *probed, second_last, last = observer.stages
    assert len(probed) > 1
    assert all(name.startswith("layers-") for name in probed)
    assert (second_last, last) == ("the target writes", "distill")
    written, asked = observer.stages["the target writes"]
    assert asked == 512 <= written[-1]
    with pytest.raises(OptionError, match=r"already holds a model, made with --probe 0\.1"):
        prune(**arguments, probe=0.2)


def test_distilling_and_heads_from_python(parent: Path, corpus: Path, tmp_path: Path):
    both = {"target": str(parent), "corpus": corpus, "options": DISTILLATION}
    draft = distill(draft=str(parent), out=tmp_path / "draft", **both)
    assert set(draft.held_out) == {"loss", "acceptance", "greedy_match", "greedy_tar"}
    heads = train_heads(out=tmp_path / "heads", count=2, **both)
    loaded = load_heads(sd.load(parent), tmp_path / "heads")
    assert heads.parameters == sum(weight.numel() for weight in loaded.parameters())
    assert set(heads.held_out) == {"match_1", "match_2", "greedy_tar"}
    both["options"] = DistillationOptions(**BUDGET, rollout=0.5)
    with pytest.raises(OptionError, match="rollout is for drafts"):
        train_heads(out=tmp_path / "no", **both)


def test_a_callback_that_closes_the_steps_saves_the_state(corpus: Path, tmp_path: Path):
    class EnoughError(Exception):
        pass

    def stop_after_two(_name: str, steps: Iterator[int], _total: int) -> None:
        for done in steps:
            if done == 2:
                steps.close()
                raise EnoughError

    arguments = {"corpus": corpus, "options": TrainingOptions(**BUDGET), "vocab": 280, "context": 128}
    with pytest.raises(EnoughError):
        pretrain(shape="1x32/2h/48", out=tmp_path / "stopped", follow=stop_after_two, **arguments)
    state = torch.load(tmp_path / "stopped" / "training" / "pretrain" / "state.pt", weights_only=True)
    assert state["step"] == 2
    observer = Observer()
    for name in ("stopped", "straight"):
        pretrain(shape="1x32/2h/48", out=tmp_path / name, say=observer.say, **arguments)
    assert "pretrain: going on after step 2" in observer.said
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "straight")]
    assert weights[0] == weights[1]


def test_encoder_decoders_are_refused_before_anything_is_written(parent: Path, corpus: Path, tmp_path: Path):
    other = tmp_path / "t5"
    other.mkdir()
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 280, "d_model": 32}
    config |= {"d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="is an encoder–decoder"):
        distill(draft=str(other), target=str(parent), corpus=corpus, out=tmp_path / "d", options=DISTILLATION)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"batch_tokens": 16}, {"learning_rate": 0.0}, {"generated": -1}, {"generated_share": 0.0}],
)
def test_wrong_options_are_refused_at_once(wrong: dict):
    with pytest.raises(OptionError):
        DistillationOptions(**(BUDGET | wrong))
