"""The search for what a target may skip, on a tiny one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.prompts import Prompt
from shallowdraft.replaying.recording import record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying import skip_search
from shallowdraft.studying.skip_search import TIMED, Costs, read_trials, uniform_skips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skips")
    decoder = random_decoder(parse_shape("3x64/2h/96", vocab=512), scale=1.5)
    sd.Model("target", decoder, byte_tokenizer(512)).save(folder / "target")
    return folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    prompts = [("few", Prompt(str(number), "few", f"Prompt {number} about {number * 7}")) for number in range(4)]
    for _ in record(sd.load(folder / "target"), prompts, folder / "trace.jsonl", max_new_tokens=8, sampling=Sampling()):
        pass
    return folder / "trace.jsonl"


def test_it_tries_regular_patterns_first_and_goes_on_where_it_stopped(folder: Path, trace: Path, capsys):
    out = folder / "skips.jsonl"
    arguments = ["skip-search", "--target", str(folder / "target"), "--trace", str(trace), "--out", str(out), "--json"]
    assert main([*arguments, "--trials", "3"]) == 0
    before = out.read_text()
    assert main([*arguments, "--trials", "9"]) == 0
    assert out.read_text().startswith(before)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    trials = read_trials(out)
    assert report["trials"] == len(trials) == 9
    assert report["best"]["speed_up"] == max(trial.speed_up for trial in trials)
    assert report["best"]["speed_up"] >= report["best_uniform"]["speed_up"]
    regular = uniform_skips(3)
    assert {trial.skips for trial in trials if trial.uniform} == set(regular)
    assert len(trials) > len(regular)
    plain = sd.generate(sd.load(folder / "target"), "Prompt", max_new_tokens=20)
    command = ["generate", "--target", str(folder / "target"), "--prompt", "Prompt", "--max-new-tokens", "20", "--json"]
    assert main([*command, "--drafter", "skip", "--skips", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == plain.token_ids


def test_what_looks_better_must_prove_it_on_more_prompts(monkeypatch):
    """There are 24 prompts in three rounds: a set that no longer looks better is given up, a regular one is not."""
    costs = Costs(1.0, 0.1, 0.0, 0.0, 3, dict.fromkeys(map(str, TIMED), 1.0))
    accepted = iter([[1] * 8, [0] * 8, [0] * 8, [1] * 8, [1] * 8, [0] * 8])

    def generated(target: object, prompts: list[list[int]], **options: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(accepted_by_iteration=[count]) for count in next(accepted)]

    monkeypatch.setattr(skip_search, "generate", generated)
    rounds = [[SimpleNamespace(prompt=[1])] * 8] * 3
    regular = skip_search.judge(None, rounds, costs, (1,), True, 0.0)
    assert (regular.prompts, regular.tar) == (24, pytest.approx(4 / 3))
    better = skip_search.judge(None, rounds, costs, (2,), False, regular.speed_up)
    assert (better.prompts, better.tar) == (24, pytest.approx(5 / 3))
    accepted = iter([[1] * 8, [0] * 8])
    assert skip_search.judge(None, rounds, costs, (3,), False, better.speed_up).prompts == 16


def test_bad_input(folder: Path, trace: Path, capsys):
    target = ["--target", str(folder / "target")]
    assert main(["generate", *target, "--prompt", "x", "--skips", str(trace)]) == 2
    assert "--drafter skip" in capsys.readouterr().err
    assert main(["generate", *target, "--prompt", "x", "--drafter", "skip", "--skips", str(trace)]) == 2
    assert "no skip search" in capsys.readouterr().err
    assert main(["skip-search", *target, "--trace", str(trace), "--out", "x", "--trials", "0"]) == 2
    assert "trials is 0" in capsys.readouterr().err


def test_a_step_costs_what_is_kept():
    costs = Costs(1.0, 0.1, 0.02, 0.03, 10, {"1": 1.0, "2": 1.1, "4": 1.3, "8": 1.7})
    assert costs.step_s(()) == pytest.approx(0.6)
    assert costs.step_s((0, 2, 3)) == pytest.approx(0.6 - 2 * 0.02 - 0.03)
    assert costs.iteration_s((), 3) == pytest.approx(3 * 0.6 + 1.2)
