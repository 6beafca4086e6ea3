"""Sets of prompts: those that ship with the package by name, others as files of JSON lines with a `prompt` field."""

import json
from dataclasses import dataclass
from pathlib import Path

from shallowdraft.errors import PromptError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set."""

    id: str
    task: str
    """What kind of text it belongs to."""
    text: str


def names() -> list[str]:
    """The sets that ship with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))


def load_prompts(name: str | Path) -> list[Prompt]:
    """A set by its name, or a file."""
    shipped = FOLDER / f"{name}.jsonl"
    file = shipped if str(name) in names() else Path(name)
    if not file.is_file():
        raise PromptError(f"{name}: no such file, and no set of that name; there are {', '.join(names())}")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PromptError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); convert it first") from None
    prompts = [_prompt(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{file}: holds no prompt")
    return prompts


def _prompt(file: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        text = row["prompt"]
    except (ValueError, KeyError, TypeError):
        raise PromptError(f'{file}:{number}: no JSON object with a "prompt" field; each line must be one') from None
    if not isinstance(text, str) or not text:
        raise PromptError(f'{file}:{number}: "prompt" is no text')
    return Prompt(str(row.get("id", number)), str(row.get("task", file.stem)), text)
