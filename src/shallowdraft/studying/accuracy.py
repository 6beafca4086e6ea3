"""Task accuracy by the likelihood of choices, as lm-evaluation-harness defines it, and its correlation with TAR.

MMLU asks which of " A" to " D" is likeliest after five solved questions. HellaSwag asks which ending is likeliest, by
its log-probability (acc), and by its log-probability per character without the space before it (acc_norm).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from shallowdraft.errors import PromptError
from shallowdraft.files import parse_json, read_lines
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.prompts import FOLDER
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.runs.accuracy import AccuracyClaim, DraftScores, ShareCorrect, TaskScore
from shallowdraft.runs.trace import Output

SETS = ("mmlu", "hellaswag")
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Question:
    """A context, its possible continuations, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def load_questions(name: str, limit: int | None = None) -> list[Question]:
    """Load a set that ships with the package, or a file of lines with prompt, choices and answer.

    An answer is a number, or a letter under which the prompt lists the choices.
    """
    file = FOLDER / f"{name}.jsonl" if name in SETS else Path(name)
    if not file.exists():
        raise PromptError(f"{name}: no such file, and no set of questions of that name; there are {', '.join(SETS)}")
    lines = ((number, line) for number, line in read_lines(file, PromptError) if line.strip())
    questions = [_question(file, number, line) for number, line in islice(lines, limit)]
    if not questions:
        raise PromptError(f"{file}: holds no question")
    return questions


def _question(file: Path, number: int, line: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise PromptError(f"{file}:{number}: no JSON object ({error})") from None
    try:
        prompt, choices, answer = row["prompt"], row["choices"], row["answer"]
        if not prompt or not isinstance(prompt, str) or not isinstance(choices, list):
            raise TypeError
        # Indexing a range refuses an answer beyond the choices.
        if isinstance(answer, str):
            letters = tuple(f" {letter}" for letter in LETTERS[: len(choices)])
            return Question(prompt, letters, range(len(letters))[LETTERS.index(answer)])
        if type(answer) is not int or answer < 0:
            raise TypeError
        return Question(prompt, tuple(f" {choice}" for choice in choices), range(len(choices))[answer])
    except (ValueError, KeyError, TypeError, IndexError):
        raise PromptError(f"{file}:{number}: no JSON object with prompt, choices and an answer among them") from None


def score(model: Model, questions: Sequence[Question]) -> Iterator[int | TaskScore]:
    """Yield the number of questions answered so far, and at last the score."""
    sums, sums_by_character, answer_tokens = [], [], []
    for count, question in enumerate(questions, 1):
        by_choice = [tokens.tolist() for tokens in _log_probabilities(model, question)]
        sizes = [max(1, len(choice.removeprefix(" "))) for choice in question.choices]
        sums.append([sum(tokens) for tokens in by_choice])
        sums_by_character.append([total / size for total, size in zip(sums[-1], sizes, strict=True)])
        answer_tokens.extend(by_choice[question.answer])
        yield count
    accuracy, normalised = (_share_correct(scores, questions) for scores in (sums, sums_by_character))
    yield TaskScore(accuracy, -fmean(answer_tokens), normalised)


def _log_probabilities(model: Model, question: Question) -> "list[np.ndarray[Any, Any]]":
    """Return the log-probabilities of every choice's tokens; a context that is too long loses its beginning."""
    import torch

    context = model.encode(question.context)
    choices = [model.encode(question.context + choice)[len(context) :] for choice in question.choices]
    longest = max(map(len, choices))
    room = model.shape.context - longest + 1
    if room < 1:
        raise PromptError(f"a choice has {longest:,} tokens; {model.name} takes {model.shape.context:,}, shorten it")
    context = context[-room:]

    def distributions(choice: list[int]) -> torch.Tensor:
        """Return the log-probabilities [T, V] in place of each of the choice's tokens."""
        passes = predictions(model, Output("", "", 0, context, choice), first=0)
        return torch.cat([logits.float().log_softmax(-1) for logits, _ in passes])

    if all(len(choice) == 1 for choice in choices):  # all share the context, so one pass is enough
        return list(distributions(choices[0])[0, [choice[0] for choice in choices]].cpu().numpy()[:, None])
    return [
        distributions(choice).gather(1, torch.tensor(choice, device=model.device)[:, None])[:, 0].cpu().numpy()
        for choice in choices
    ]


def _share_correct(scores: Sequence[Sequence[float]], questions: Sequence[Question]) -> ShareCorrect:
    """Return the share of questions whose likeliest choice is right, with a bootstrap over questions."""
    pairs = zip(scores, questions, strict=True)
    correct = np.array([float(np.argmax(of_choices) == question.answer) for of_choices, question in pairs])
    low, high = bootstrap(lambda draws: correct[draws].mean(1), len(correct))
    chance = fmean(1 / len(question.choices) for question in questions)
    return ShareCorrect(float(correct.mean()), (float(low), float(high)), chance)


def claim(task: str, drafts: Sequence[DraftScores]) -> AccuracyClaim:
    """Correlate the ranks of drafts by their ability on a task with those by TAR, over drafts that were replayed."""
    replayed = [draft for draft in drafts if draft.tar is not None]
    scores = [draft.sets[task] for draft in replayed]
    tars = [draft.tar for draft in replayed]

    def correlation(figures: Sequence[float]) -> float | None:
        """Return the rank correlation with TAR; None where there are too few different values."""
        from scipy.stats import spearmanr

        if len(figures) < 3 or len(set(figures)) < 2 or len(set(tars)) < 2:
            return None
        return float(spearmanr(figures, tars).statistic)

    testable = any(score.accuracy.above_chance for score in scores)
    of_accuracy = correlation([score.accuracy.value for score in scores]) if testable else None
    of_loss = correlation([-score.loss for score in scores])
    return AccuracyClaim(of_accuracy, of_loss, _statement(of_accuracy, of_loss))


def _statement(of_accuracy: float | None, of_loss: float | None) -> str:
    loss = "" if of_loss is None else f"; the loss on right answers ranks drafts as TAR does to {of_loss:+.2f}"
    if of_accuracy is None:
        return f"cannot be tested: the accuracy of every draft may be chance{loss}"
    return f"accuracy ranks drafts as TAR does to {of_accuracy:+.2f}{loss}"
