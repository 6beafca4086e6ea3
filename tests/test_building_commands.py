"""pretrain, prune and distill, from a folder of text to a draft that its target accepts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.building.masks import Masks
from shallowdraft.building.tasks import Pretraining
from shallowdraft.cli import main
from shallowdraft.errors import TrainingError

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
    assert main(["distill", *distil, "--out", better]) == 0
    assert "is done" in capsys.readouterr().err
    assert main(["distill", *distil, "--seed", "1", "--out", better]) == 2
    assert "already holds a model, made with --seed 0;" in capsys.readouterr().err
    assert main(["distill", *distil, "--out", parent]) == 2
    assert "already holds a model, made with another command;" in capsys.readouterr().err


def test_heads_learn_to_guess_ahead(parent: str, corpus: str, tmp_path: Path, capsys, monkeypatch):
    out = str(tmp_path / "heads")
    options = ["--target", parent, "--corpus", corpus, "--count", "3", "--generated", "4096", *BUDGET]
    monkeypatch.setattr("shallowdraft.display.progress.LOG_EVERY_S", -1)
    assert main(["heads", *options, "--out", out, "--json"]) == 0
    said = capsys.readouterr()
    assert "measuring: 0 of " in said.err
    learned = json.loads(said.out)
    assert learned["greedy_tar"] > 1.5
    target = sd.load(parent)
    heads = sd.load_heads(target, out)
    plain = sd.generate(target, "The red", max_new_tokens=40)
    ahead = sd.generate(target, "The red", drafter="medusa", heads=heads, max_new_tokens=40)
    assert ahead.token_ids == plain.token_ids
    assert ahead.stats.tar > 1.5
    generate = ["generate", "--target", parent, "--prompt", "The red", "--drafter", "medusa"]
    assert main([*generate, "--heads", out]) == 0
    assert main(generate) == 2
    assert "there are no heads" in capsys.readouterr().err
    for wrong in (["--count", "0"], ["--rollout", "0.5"], ["--count", "16", "--sequence", "16"]):
        assert main(["heads", *options, *wrong, "--out", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_pruned_by_learned_masks_without_distillation(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--parent", parent, "--corpus", corpus, "--shape", "1x48/4h/2kv/16hd/32", "--method", "learned"]
    budget = ["--tokens", "30720", "--batch-tokens", "512", "--sequence", "32", "--mask-tokens", "1"]
    assert main(["prune", *options, *budget, "--out", str(tmp_path / "draft"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["shape"] == "1x48/4h/2kv/16hd/32"
    assert not (tmp_path / "draft" / "training" / "distill").exists()
    metrics = (tmp_path / "draft" / "training" / "masks" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["details"]["gap"] > 0.5


def test_the_plan_comes_first_and_may_be_all(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--parent", parent, "--corpus", corpus, "--shape", "1x32/2h/1kv/16hd/32", *BUDGET, "--dry-run"]
    for method, batch in (("importance", "512"), ("learned", "64")):
        given = ["--method", method, "--batch-tokens", batch, "--out", str(tmp_path / method)]
        assert main(["prune", *options, *given]) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert "reachable; a pass reads 0.1 MB" in said
        assert "GiB of memory" in said
        assert not (tmp_path / method / "config.json").exists()


def test_too_few_steps_for_masks_are_told_before_and_after(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--parent", parent, "--corpus", corpus, "--shape", "1x32/2h/1kv/16hd/32", "--method", "learned"]
    for more in ([], ["--dry-run"]):
        assert main(["prune", *options, *BUDGET, *more, "--out", str(tmp_path / "d")]) == 2
        said = capsys.readouterr().err
        assert "trained on 4 steps, and converge on 20 at least" in said
        assert "reachable" not in said
    assert not (tmp_path / "d").exists()
    with pytest.raises(TrainingError, match="more steps \\(20 at least\\), or prune by importance"):
        Masks(sd.load(parent).shape, replace(sd.load(parent).shape, layers=1)).require_converged()


def test_distilled_on_the_targets_words_and_its_own_at_the_best_rate(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--draft", parent, "--target", parent, "--corpus", corpus, *BUDGET[:-2]]
    more = ["--generated", "2048", "--rollout", "0.25", "--out", str(tmp_path / "d")]
    assert main(["distill", *options, *more]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("learning rate") == 3
    assert "times over" not in printed.err
    assert "greedy tar" in printed.out
    assert sorted(p.name for p in (tmp_path / "d" / "training").glob("rate-*")) == [
        "rate-0.002",
        "rate-0.004",
        "rate-0.008",
    ]


def test_too_little_of_the_targets_text_is_said_and_a_wrong_share_refused(parent: str, corpus: str, tmp_path, capsys):
    options = ["--draft", parent, "--target", parent, "--corpus", corpus, *BUDGET, "--generated", "512"]
    assert main(["distill", *options, "--out", str(tmp_path / "d")]) == 0
    assert "will be read 8 times over" in " ".join(capsys.readouterr().err.split())
    assert main(["distill", *options, "--generated-share", "2", "--out", str(tmp_path / "e")]) == 2
    assert "--generated-share is 2.0" in capsys.readouterr().err


def test_a_draft_of_another_vocabulary(parent: str, corpus: str, tmp_path: Path, capsys):
    """A shorter one of the same kind is trained; one that gives other ids to the same tokens is refused."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "other.txt").write_text("Zwei Boxkämpfer jagen Eva quer durch Sylt. " * 2000)
    for name, text, vocab in (("shorter", corpus, "290"), ("other", str(tmp_path / "text"), "290")):
        shape = ["--shape", "1x32/2h/48", "--vocab", vocab, "--context", "64"]
        budget = ["--tokens", "1024", *BUDGET[2:]]
        assert main(["pretrain", "--corpus", text, *shape, *budget, "--out", str(tmp_path / name)]) == 0
        options = ["--draft", str(tmp_path / name), "--target", parent, "--corpus", corpus, *budget]
        assert main(["distill", *options, "--out", str(tmp_path / "d")]) == (0 if name == "shorter" else 2)
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
    assert "error:" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_start_that_failed_does_not_bind_the_next(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--corpus", corpus, "--vocab", "300", "--context", "64", *BUDGET, "--out", str(tmp_path / "m")]
    assert main(["pretrain", "--shape", "1x32/2h/48", *options, "--vocab", "999999"]) == 2
    assert main(["pretrain", "--shape", "1x32/2h/48", *options, "--corpus", "nowhere"]) == 2
    assert main(["pretrain", "--shape", "1x32/2h/48", *options]) == 0
    assert sd.load(tmp_path / "m").shape.vocab == 300
    draft = ["--draft", str(tmp_path / "m"), "--corpus", corpus, *BUDGET, "--out", str(tmp_path / "d")]
    assert main(["distill", *draft, "--target", "nowhere"]) == 2
    assert main(["distill", *draft, "--target", parent]) == 0


def test_the_state_of_another_run_is_not_taken(parent: str, corpus: str, tmp_path: Path, capsys):
    options = ["--corpus", corpus, "--vocab", "300", "--context", "64", *BUDGET, "--out", str(tmp_path / "m")]
    assert main(["pretrain", "--shape", "1x32/2h/48", *options]) == 0
    (tmp_path / "m" / "config.json").unlink()  # as if it had been stopped before the end
    state = (tmp_path / "m" / "training" / "pretrain" / "state.pt").read_bytes()
    assert main(["pretrain", "--shape", "1x32/2h/64", *options]) == 2
    assert "unfinished run that was started with --shape 1x32/2h/48;" in capsys.readouterr().err
    (tmp_path / "m" / "training" / "run.json").unlink()
    assert main(["pretrain", "--shape", "1x32/2h/64", *options]) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (tmp_path / "m" / "training" / "pretrain" / "state.pt").read_bytes() == state


@pytest.mark.parametrize("verb", ["pretrain", "distill", "heads"])
def test_killed_between_saving_and_ending_it_is_done(
    verb: str, parent: str, corpus: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    given = {
        "pretrain": ["--shape", "1x32/2h/48", "--vocab", "300", "--context", "64"],
        "distill": ["--draft", parent, "--target", parent],
        "heads": ["--target", parent, "--count", "2"],
    }[verb]
    command = [verb, *given, "--corpus", corpus, *BUDGET, "--tokens", "1024", "--out", str(tmp_path / "m"), "--json"]
    with monkeypatch.context() as killed:
        killed.setattr("builtins.print", lambda *_, **__: (_ for _ in ()).throw(MemoryError("killed")))
        with pytest.raises(MemoryError):
            main(command)
    saved = (tmp_path / "m" / "config.json").stat().st_mtime_ns
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["out"] == str(tmp_path / "m")
    assert set(shown) & {"loss", "greedy_tar"}
    assert (tmp_path / "m" / "config.json").stat().st_mtime_ns == saved
    assert main([*command, "--seed", "7"]) == 2
    assert "already holds a model, made with --seed 0" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_it_goes_on_after_the_step_it_was_in(
    number: signal.Signals, status: int, corpus: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    options = ["--shape", "1x32/2h/48", "--corpus", corpus, "--vocab", "300", "--context", "64", *BUDGET]
    before, calls = Pretraining.loss, iter(range(100))

    def told(self, model, tokens):
        if next(calls) == 4:
            os.kill(os.getpid(), number)
        return before(self, model, tokens)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as once:
        once.setattr(Pretraining, "loss", told)
        try:
            ended = main(["pretrain", *options, "--out", str(tmp_path / "told")])
        except SystemExit as end:
            ended = end.code
    assert ended == status
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    state = tmp_path / "told" / "training" / "pretrain" / "state.pt"
    assert torch.load(state, weights_only=True)["step"] == 5
    capsys.readouterr()
    for folder in ("told", "undisturbed"):
        assert main(["pretrain", *options, "--out", str(tmp_path / folder)]) == 0
        assert ("going on after step 5" in capsys.readouterr().err) == (folder == "told")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("told", "undisturbed")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_command_under_torchrun(parent: str, corpus: str, tmp_path: Path):
    options = ["--parent", parent, "--corpus", corpus, "--shape", "1x32/2h/1kv/16hd/32", "--generated", "1024", *BUDGET]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shallowdraft"]
    for method, budget in (("importance", "4096"), ("learned", "40960")):
        out = str(tmp_path / method)
        command = [sys.executable, *launch, "prune", *options, "--method", method, "--tokens", budget, "--out", out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("held out") == 1
        assert str(sd.load(out).shape) == "1x32/2h/1kv/32"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--shape", "9x48/4h/2kv/16hd/64"], "layers is 9, the parent has 3"),
        (["--shape", "1x48/3h/2kv/16hd/64"], "do not divide"),
        (["--shape", "1x48/4h/2kv/24hd/64"], "heads are 24 wide"),
        (["--corpus", "nowhere"], "no such folder"),
        (["--tokens", "0"], "must be at least 1"),
        (["--dtype", "bfloat16"], "trained in float32"),
        (["--mask-tokens", "1.5"], "a share"),
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
