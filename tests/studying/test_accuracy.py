"""Accuracy by likelihood: against sums taken by hand, through the command, and what may be said from it."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import PromptError
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.runs.accuracy import AccuracyClaim, DraftScores, ShareCorrect, TaskScore
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.accuracy import Question, claim, load_questions, score

SHAPE = ModelShape(2, 64, 4, 96, 400, context=64)


@pytest.fixture(scope="module")
def model() -> sd.Model:
    return sd.Model("writer", random_decoder(SHAPE, seed=2, scale=2.0), byte_tokenizer(SHAPE.vocab))


def by_hand(model: sd.Model, context: str, choice: str) -> float:
    """The choice's log-likelihood from one pass over the whole text."""
    whole, given = model.encode(context + choice), len(model.encode(context))
    logits = model.decoder.logits(torch.tensor([whole[:-1]]))[0].log_softmax(-1)
    return float(sum(logits[at - 1, whole[at]] for at in range(given, len(whole))))


def test_the_likeliest_choice_is_the_answer(model: sd.Model):
    choices = (" ox", " cat", " zebra", " bee")
    sums = [by_hand(model, "The number is", choice) for choice in choices]
    per_character = [total / len(choice[1:]) for total, choice in zip(sums, choices, strict=True)]
    best, best_per_character = (max(range(4), key=row.__getitem__) for row in (sums, per_character))
    assert best != best_per_character  # or the two kinds could be mixed up unseen
    for answer in range(4):
        *_, found = score(model, [Question("The number is", choices, answer)])
        assert isinstance(found, TaskScore)
        assert found.accuracy.value == (answer == best)
        assert found.normalised.value == (answer == best_per_character)
        assert found.loss == pytest.approx(-sums[answer] / len(choices[answer]), rel=1e-4)


def test_the_size_of_a_choice_is_that_of_lm_evaluation_harness(model: sd.Model):
    """Its acc_norm: `np.argmax(lls / np.array([float(len(i)) for i in choices]))`, the space before them apart."""

    def best(sums: list[float], sizes: list[int]) -> int:
        return int(np.argmax(np.array(sums) / np.array(sizes, dtype=float)))

    words = ("ox", "zebra", "a", "über", "née", "he sat", "öäü", "cat and dog")
    asked, with_space, in_bytes = [], 0, 0
    for context in ("The number is", "It was", "So"):
        sums = {word: by_hand(model, context, f" {word}") for word in words}
        for pair in combinations(words, 2):
            found = [sums[word] for word in pair]
            answer = best(found, [len(word) for word in pair])
            asked.append(Question(context, tuple(f" {word}" for word in pair), answer))
            with_space += answer != best(found, [len(word) + 1 for word in pair])
            in_bytes += answer != best(found, [len(word.encode()) for word in pair])
    assert with_space  # or a wrong size would not be seen
    assert in_bytes
    *_, scored = score(model, asked)
    assert isinstance(scored, TaskScore)
    assert scored.normalised.value == 1


def test_letters_are_told_by_one_pass(model: sd.Model):
    question = Question("Which one? Answer:", ("x", "y", "z"), 1)
    *_, found = score(model, [question])
    assert isinstance(found, TaskScore)
    assert found.loss == pytest.approx(-by_hand(model, question.context, "y"), rel=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(model: sd.Model):
    short, long = (Question("x" * size + "the end", (" ab", " cd"), 0) for size in (0, 200))
    *_, found = score(model, [long])
    *_, other = score(model, [Question("x" * 55 + "the end", (" ab", " cd"), 0)])  # 62 + 3 tokens: the last is not read
    assert isinstance(found, TaskScore)
    assert isinstance(other, TaskScore)
    assert found.loss == pytest.approx(other.loss, rel=1e-5)
    *_, another = score(model, [short])
    assert isinstance(another, TaskScore)
    assert another.loss != pytest.approx(found.loss, rel=1e-3)


def test_shipped_questions_have_answers():
    mmlu, hellaswag = load_questions("mmlu"), load_questions("hellaswag", 20)
    assert {question.choices for question in mmlu} == {(" A", " B", " C", " D")}
    assert len({question.answer for question in mmlu}) == 4
    assert len(hellaswag) == 20
    assert all(len(question.choices) == 4 for question in hellaswag)


@pytest.mark.parametrize("line", ["{}", "[]", '{"prompt": "a", "choices": ["x"], "answer": 3}', "no"])
def test_bad_questions(line: str, tmp_path: Path):
    (tmp_path / "q.jsonl").write_text(line + "\n")
    with pytest.raises(PromptError, match=r"q\.jsonl:1"):
        load_questions(str(tmp_path / "q.jsonl"))


def scored(accuracy: float, low: float, loss: float) -> TaskScore:
    share = ShareCorrect(accuracy, (low, 1.0), 0.25)
    return TaskScore(share, loss, share)


def claimed(scores: dict[str, TaskScore], tars: dict[str, float]) -> AccuracyClaim:
    return claim("task", [DraftScores(name, tars[name], {"task": score}) for name, score in scores.items()])


def test_what_may_be_said():
    tars = {"a": 1.0, "b": 2.0, "c": 3.0}
    able = {"a": scored(0.5, 0.4, 3.0), "b": scored(0.4, 0.3, 2.0), "c": scored(0.3, 0.2, 1.0)}
    assert claimed(able, tars).of_accuracy == pytest.approx(-1)
    assert claimed(able, tars).of_loss == pytest.approx(1)
    guessing = {name: scored(one.accuracy.value, 0.2, one.loss) for name, one in able.items()}
    assert claimed(guessing, tars).of_accuracy is None
    assert "cannot be tested" in claimed(guessing, tars).statement
    assert claimed({"a": able["a"]}, tars).of_loss is None


def test_the_command(model: sd.Model, tmp_path: Path, capsys):
    model.save(tmp_path / "m")
    lines = [{"prompt": f"Question {n}:", "choices": ["yes", "no"], "answer": n % 2} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["accuracy", "--drafts", str(tmp_path / "m"), "--sets", str(tmp_path / "q.jsonl")]
    assert main([*given, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["drafts"]
    (figures,) = found["sets"].values()
    assert figures["accuracy"]["chance"] == 0.5
    assert main(given) == 0
    assert "chance 50%" in capsys.readouterr().out
    assert main([*given, "--limit", "0"]) == 2
