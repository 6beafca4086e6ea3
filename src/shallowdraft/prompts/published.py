"""Rows of public data sets, as their authors publish them, and where the full sets are."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shallowdraft.errors import PromptError

Row = Mapping[str, Any]
SHOTS = 5
LETTERS = "ABCD"


@dataclass(frozen=True)
class Source:
    """A data set on the hub."""

    repository: str
    config: str | None
    split: str


FULL = {
    "mmlu": Source("cais/mmlu", "all", "test"),
    "hellaswag": Source("Rowan/hellaswag", None, "validation"),
    "arena": Source("lmarena-ai/arena-hard-auto-v0.1", None, "train"),
    "humaneval": Source("openai/openai_humaneval", None, "test"),
    "gsm8k": Source("openai/gsm8k", "main", "test"),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


def text_of(row: Row) -> str | None:
    """The prompt of a row: ours, or that of a public set; None for a row of another kind."""
    if "ctx" in row and "endings" in row:  # HellaSwag
        return hellaswag(row)
    if "question" in row and "choices" in row:
        return mmlu_question(row)
    for name in ("prompt", "turns", "question"):  # the first turn of MT-Bench, Spec-Bench and Arena-Hard
        found = row.get(name)
        if isinstance(found, list) and found:
            found = found[0]["content"] if isinstance(found[0], Mapping) else found[0]
        if isinstance(found, str) and found:
            return found
    return None


def hellaswag(row: Row) -> str:
    """The activity and the beginning, without the marks of the site it was taken from (as lm-evaluation-harness)."""
    text = f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}" if "ctx_a" in row else row["ctx"]
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")))


def mmlu_question(row: Row, *, answered: bool = False) -> str:
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False))
    answer = f" {LETTERS[int(row['answer'])]}" if answered else ""
    return f"{row['question'].strip()}\n{options}\nAnswer:{answer}"


def few_shot(dev: list[Row]) -> Callable[[Row], str]:
    """MMLU with the first five solved questions of a row's subject before it, as in the paper."""
    by_subject: dict[str, list[Row]] = {}
    for row in dev:
        by_subject.setdefault(row["subject"], []).append(row)

    def prompt(row: Row) -> str:
        subject = row["subject"]
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
        solved = [mmlu_question(shot, answered=True) for shot in by_subject[subject][:SHOTS]]
        return "\n\n".join([head, *solved, mmlu_question(row)])

    return prompt


def full_rows(name: str) -> Iterator[tuple[Row, str | None]]:
    """All rows of a set from the hub, each with its prompt."""
    if name not in FULL:
        raise PromptError(f"{name}:full is unknown; there are {', '.join(f'{one}:full' for one in FULL)}")
    source = FULL[name]
    try:
        from datasets import load_dataset
    except ImportError:
        raise PromptError("full sets come through `datasets`; pip install datasets, or name a folder") from None
    try:
        rows = load_dataset(source.repository, source.config, split=source.split)
        text = (
            few_shot(list(load_dataset(source.repository, source.config, split="dev"))) if name == "mmlu" else text_of
        )
    except Exception as error:  # whatever the hub, the network or the disk has against it
        raise PromptError(f"{source.repository} cannot be loaded: {error}") from error
    for row in rows:
        yield row, text(row)
