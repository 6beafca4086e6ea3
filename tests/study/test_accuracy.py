"""Accuracy by likelihood: against sums taken by hand, through the command, and what may be said from it."""

import json
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import PromptError
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.shapes import ModelShape
from shallowdraft.study.accuracy import Accuracy, Question, Score, claim, load_questions, score

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
    per_byte = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
    best, best_per_byte = (max(range(4), key=row.__getitem__) for row in (sums, per_byte))
    assert best != best_per_byte  # or the two kinds could be mixed up unseen
    for answer in range(4):
        *_, found = score(model, [Question("The number is", choices, answer)])
        assert isinstance(found, Score)
        assert found.accuracy.value == (answer == best)
        assert found.normalised.value == (answer == best_per_byte)
        assert found.loss == pytest.approx(-sums[answer] / len(choices[answer]), rel=1e-4)


def test_letters_are_told_by_one_pass(model: sd.Model):
    question = Question("Which one? Answer:", ("x", "y", "z"), 1)
    *_, found = score(model, [question])
    assert isinstance(found, Score)
    assert found.loss == pytest.approx(-by_hand(model, question.context, "y"), rel=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(model: sd.Model):
    short, long = (Question("x" * size + "the end", (" ab", " cd"), 0) for size in (0, 200))
    *_, found = score(model, [long])
    *_, other = score(model, [Question("x" * 55 + "the end", (" ab", " cd"), 0)])  # 62 + 3 tokens: the last is not read
    assert isinstance(found, Score)
    assert isinstance(other, Score)
    assert found.loss == pytest.approx(other.loss, rel=1e-5)
    *_, another = score(model, [short])
    assert isinstance(another, Score)
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


def scored(accuracy: float, low: float, loss: float) -> Score:
    one = Accuracy(accuracy, (low, 1.0), 0.25)
    return Score(one, one, loss)


def test_what_may_be_said():
    tars = {"a": 1.0, "b": 2.0, "c": 3.0}
    able = {"a": scored(0.5, 0.4, 3.0), "b": scored(0.4, 0.3, 2.0), "c": scored(0.3, 0.2, 1.0)}
    assert claim(able, tars).of_accuracy == pytest.approx(-1)
    assert claim(able, tars).of_loss == pytest.approx(1)
    guessing = {name: scored(one.accuracy.value, 0.2, one.loss) for name, one in able.items()}
    assert claim(guessing, tars).of_accuracy is None
    assert "cannot be tested" in claim(guessing, tars).statement
    assert claim({"a": able["a"]}, tars).of_loss is None


def test_the_command(model: sd.Model, tmp_path: Path, capsys):
    model.save(tmp_path / "m")
    lines = [{"prompt": f"Question {n}:", "choices": ["yes", "no"], "answer": n % 2} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["accuracy", "--draft", str(tmp_path / "m"), "--sets", str(tmp_path / "q.jsonl")]
    assert main([*given, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["drafts"]
    (figures,) = found["sets"].values()
    assert figures["accuracy"]["chance"] == 0.5
    assert main(given) == 0
    assert "chance 50%" in capsys.readouterr().out
    assert main([*given, "--limit", "0"]) == 2
