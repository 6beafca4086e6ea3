"""Sets of prompts: those that ship with the package by name, full ones from the hub, files and folders of your own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shallowdraft.errors import PromptError
from shallowdraft.files import parse_json, read_lines
from shallowdraft.prompts.published import full_rows, text_of

if TYPE_CHECKING:
    from shallowdraft.models.model import Model

FOLDER = Path(__file__).parent
FULL = ":full"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set."""

    id: str
    task: str
    """What kind of text it belongs to."""
    text: str
    ids: tuple[int, ...] = ()
    """Token ids instead of text."""

    @property
    def content(self) -> str | list[int]:
        """The text, or the token ids that are given instead."""
        return list(self.ids) or self.text

    @property
    def turn(self) -> list[dict[str, str]]:
        """The user's turn that begins a conversation."""
        if self.ids:
            raise PromptError(f"prompt {self.id} is token ids, which no chat template takes; give text, or no --chat")
        return [{"role": "user", "content": self.text}]


def fit_prompt(target: "Model", prompt: Prompt, new_tokens: int, *, chat: bool = False) -> tuple[list[int], int]:
    """Return a prompt's tokens, cut from the left to leave room for new ones, and how many were cut."""
    ids = target.encode_chat(prompt.turn) if chat else list(prompt.ids) or target.encode(prompt.text)
    longest = target.shape.context - new_tokens
    if longest < 1:
        raise PromptError(
            f"{target.name} has a context of {target.shape.context:,}, too short for {new_tokens:,} new tokens"
        )
    if not ids:
        raise PromptError(f"prompt {prompt.id} has no tokens; remove it from its set")
    return ids[-longest:], max(0, len(ids) - longest)


def names() -> list[str]:
    """The sets that ship with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))


def load_prompts(name: str | Path) -> list[Prompt]:
    """A set by its name; `NAME:full` all of it, through `datasets`; or a file of JSON lines, or a folder of such files.

    Lines have a `prompt` field, or token ids as `ids`, or are rows as the authors of MMLU, HellaSwag,
    GSM8K, MT-Bench or Spec-Bench publish them. A folder may also be what `datasets` saved.
    """
    if str(name).endswith(FULL):
        rows = full_rows(str(name).removesuffix(FULL))
        return [_prompt(str(name), number, row, text) for number, (row, text) in enumerate(rows, 1)]
    path = FOLDER / f"{name}.jsonl" if str(name) in names() else Path(name)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        several = [replace(one, id=f"{file.stem}/{one.id}") for file in files for one in _read(file)]
        found = several or _read_saved(path)
    elif path.exists():
        found = list(_read(path))
    else:
        raise PromptError(f"{name}: no such file, and no set of that name; there are {', '.join(names())}")
    if not found:
        raise PromptError(f"{path}: holds no prompt")
    return found


def _read(file: Path) -> Iterator[Prompt]:
    for number, line in read_lines(file, PromptError):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise PromptError(f"{file}:{number}: no JSON object ({error}); each line must be one") from None
            yield _prompt(str(file), number, row, _text(row))


def _text(row: Any) -> str | None:
    """The prompt of a row of any kind."""
    try:
        return text_of(row) if isinstance(row, dict) else None
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _read_saved(folder: Path) -> list[Prompt]:
    try:
        from datasets import load_from_disk

        rows = load_from_disk(str(folder))
    except Exception as error:  # of arrow's and of its own, as the damage is
        raise PromptError(
            f"{folder}: no *.jsonl files, and nothing that `datasets` saved and can read here ({error})"
        ) from None
    return [_prompt(str(folder), number, row, _text(row)) for number, row in enumerate(rows, 1)]


def _prompt(where: str, number: int, row: Any, text: str | None) -> Prompt:
    ids = _ids(row)
    if not text and not ids:
        raise PromptError(
            f'{where}:{number}: no JSON object with a "prompt" field that holds text, or "ids" that holds token ids; '
            "each line must be one"
        )
    known = next((str(row[name]) for name in ("id", "question_id", "task_id", "prompt_id") if name in row), str(number))
    return Prompt(known, str(row.get("task", row.get("category", Path(where).stem))), text or "", () if text else ids)


def _ids(row: Any) -> tuple[int, ...]:
    """The token ids of a row, if it has some and nothing else among them."""
    given = row.get("ids") if isinstance(row, dict) else None
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        return ()
    return tuple(given)
