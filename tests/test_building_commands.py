"""pretrain, prune and distill, from a folder of text to a draft that its target accepts."""

import json
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main

BUDGET = ["--tokens", "4096", "--batch-tokens", "512", "--sequence", "32", "--learning-rate", "5e-3"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"The {a} {b} {c} in the {d}.\n" for a in ("old", "red", "big") for b in ("cat", "dog", "cow")
             for c in ("sleeps", "sings", "runs") for d in ("house", "garden", "wood")]  # fmt: skip
    for name in ("animals.txt", "animals-val.txt"):
        (folder / name).write_text("".join(lines) * 6)
    return str(folder)


@pytest.fixture(scope="module")
def parent(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("parent") / "model")
    shape = ["--shape", "3x48/4h/2kv/16hd/64", "--vocab", "300", "--context", "256"]
    assert main(["pretrain", "--corpus", corpus, *shape, *BUDGET, "--out", out]) == 0
    return out


def test_a_pretrained_model_is_an_ordinary_folder(parent: str):
    model = sd.load(parent)
    assert (str(model.shape), model.shape.vocab, model.shape.tied) == ("3x48/4h/2kv/16hd/64", 300, True)
    assert model.stop_tokens == (model.tokenizer.eos_token_id,)
    assert len(sd.generate(model, "The old", max_new_tokens=8).token_ids) > 0


def test_pruned_to_the_shape_and_distilled(parent: str, corpus: str, tmp_path: Path, capsys):
    out = str(tmp_path / "draft")
    options = ["--parent", parent, "--corpus", corpus, "--shape", "1x32/2h/1kv/16hd/32", *BUDGET]
    assert main(["prune", *options, "--out", out, "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned["shape"] == str(sd.load(out).shape) == "1x32/2h/1kv/32"
    better = str(tmp_path / "better")
    distil = ["--draft", out, "--target", parent, "--corpus", corpus, "--objective", "hybrid", *BUDGET]
    assert main(["distill", *distil, "--out", better, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance"] > pruned["acceptance"] - 0.02
    target, draft = sd.load(parent), sd.load(better)
    plain, speculative = (sd.generate(target, "The red", draft=d, max_new_tokens=40) for d in (None, draft))
    assert speculative.token_ids == plain.token_ids
    assert main(["distill", *distil, "--out", better]) == 2
    assert "already holds a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--shape", "9x48/4h/2kv/16hd/64"], "layers is 9, the parent has 3"),
        (["--shape", "1x48/3h/2kv/16hd/64"], "do not divide"),
        (["--shape", "1x48/4h/2kv/24hd/64"], "heads are 24 wide"),
        (["--corpus", "nowhere"], "no such folder"),
        (["--tokens", "0"], "must be at least 1"),
        (["--objective", "mse"], "'mse' is unknown"),
        (["--sequence", "100000", "--batch-tokens", "100000"], "no domain has"),
    ],
)
def test_bad_input(parent: str, corpus: str, tmp_path: Path, capsys, change: list[str], said: str):
    options = [
        "--parent",
        parent,
        "--corpus",
        corpus,
        "--shape",
        "1x32/2h/1kv/16hd/32",
        *BUDGET,
        "--out",
        str(tmp_path / "d"),
    ]
    assert main(["prune", *options, *change]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "d" / "config.json").exists()
