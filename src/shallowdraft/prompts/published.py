"""Public data sets: the prompt in a row as their authors publish it, and the full sets on the hub."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shallowdraft.errors import PromptError

DatasetRow = Mapping[str, Any]
SHOTS = 5  # solved questions before one of MMLU, as in the paper
LETTERS = "ABCD"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub."""

    repository: str
    config: str | None
    split: str


FULL = {
    "mmlu": HubDataset("cais/mmlu", "all", "test"),
    "hellaswag": HubDataset("Rowan/hellaswag", None, "validation"),
    "arena": HubDataset("lmarena-ai/arena-hard-auto-v0.1", None, "train"),
    "humaneval": HubDataset("openai/openai_humaneval", None, "test"),
    "gsm8k": HubDataset("openai/gsm8k", "main", "test"),
    "mt-bench": HubDataset("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


def prompt_text(row: DatasetRow) -> str | None:
    """Return the prompt of a row in our format or that of a public set; None for any other row."""
    if "ctx" in row and "endings" in row:  # HellaSwag
        return hellaswag(row)
    if "question" in row and "choices" in row:
        return mmlu_question(row)
    for name in ("prompt", "turns", "question"):  # the first turn of MT-Bench, Spec-Bench and Arena-Hard
        text = row.get(name)
        if isinstance(text, list) and text:
            text = text[0]["content"] if isinstance(text[0], Mapping) else text[0]
        if isinstance(text, str) and text:
            return text
    return None


def hellaswag(row: DatasetRow) -> str:
    """Return the activity and the context without WikiHow's markup, as lm-evaluation-harness does."""
    text = f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}" if "ctx_a" in row else row["ctx"]
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")))


def mmlu_question(row: DatasetRow, *, answered: bool = False) -> str:
    """Return a question with its choices, and with its answer if `answered`."""
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False))
    answer = f" {LETTERS[int(row['answer'])]}" if answered else ""
    return f"{row['question'].strip()}\n{options}\nAnswer:{answer}"


def few_shot(dev: list[DatasetRow]) -> Callable[[DatasetRow], str]:
    """Return a function that puts solved questions of the same subject before a question of MMLU, as in the paper."""
    by_subject: dict[str, list[DatasetRow]] = {}
    for row in dev:
        by_subject.setdefault(row["subject"], []).append(row)

    def prompt(row: DatasetRow) -> str:
        subject = row["subject"]
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
        solved = [mmlu_question(shot, answered=True) for shot in by_subject[subject][:SHOTS]]
        return "\n\n".join([head, *solved, mmlu_question(row)])

    return prompt


def full_rows(name: str) -> Iterator[tuple[DatasetRow, str | None]]:
    """Yield all rows of a set from the hub, each with its prompt."""
    if name not in FULL:
        full_sets = ", ".join(f"{set_name}:full" for set_name in FULL)
        raise PromptError(f"{name}:full is unknown; there are {full_sets}")
    dataset = FULL[name]
    try:
        from datasets import load_dataset
    except ImportError:
        raise PromptError("full sets come through `datasets`; pip install datasets, or name a folder") from None
    try:
        rows = load_dataset(dataset.repository, dataset.config, split=dataset.split)
        format_row: Callable[[DatasetRow], str | None] = prompt_text
        if name == "mmlu":
            format_row = few_shot(list(load_dataset(dataset.repository, dataset.config, split="dev")))
    except Exception as error:  # `datasets` raises many classes, of its own and of the libraries below it
        raise PromptError(f"{dataset.repository} cannot be loaded: {error}") from error
    for row in rows:
        yield row, format_row(row)
