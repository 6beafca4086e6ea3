"""Sets of prompts: shipped with the package, full sets from the hub, your own files and folders."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shallowdraft.errors import PromptError
from shallowdraft.files import parse_json, read_lines
from shallowdraft.prompts.published import full_rows, prompt_text

if TYPE_CHECKING:
    from shallowdraft.models.model import Model

FOLDER = Path(__file__).parent
FULL = ":full"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set."""

    id: str
    task: str
    """The kind of text, such as a category of MT-Bench."""
    text: str
    ids: tuple[int, ...] = ()
    """Token ids, if the prompt has no text."""

    @property
    def content(self) -> str | list[int]:
        """The text, or the token ids of a prompt without text."""
        return list(self.ids) or self.text

    @property
    def turn(self) -> list[dict[str, str]]:
        """The prompt as the first message of a chat."""
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
    """Return the names of the sets that ship with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))


def load_prompts(name: str | Path) -> list[Prompt]:
    """Load a shipped set by its name, a full set as `NAME:full`, a file of JSON lines, or a folder.

    A line has a `prompt` field, or token ids as `ids`, or is a row as the authors of MMLU, HellaSwag, GSM8K, MT-Bench
    or Spec-Bench publish it. A folder holds files of such lines, or a data set that `datasets` saved.
    """
    if str(name).endswith(FULL):
        rows = full_rows(str(name).removesuffix(FULL))
        return [_prompt(str(name), number, row, text) for number, (row, text) in enumerate(rows, 1)]
    path = FOLDER / f"{name}.jsonl" if str(name) in names() else Path(name)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        from_files = [replace(prompt, id=f"{file.stem}/{prompt.id}") for file in files for prompt in _read(file)]
        prompts = from_files or _read_saved(path)
    elif path.exists():
        prompts = list(_read(path))
    else:
        raise PromptError(f"{name}: no such file, and no set of that name; there are {', '.join(names())}")
    if not prompts:
        raise PromptError(f"{path}: holds no prompt")
    return prompts


def _read(file: Path) -> Iterator[Prompt]:
    for number, line in read_lines(file, PromptError):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise PromptError(f"{file}:{number}: not a JSON object ({error}); each line must be one") from None
            yield _prompt(str(file), number, row, _text(row))


def _text(row: Any) -> str | None:
    """Return the prompt of a row, whatever its fields hold; None if it has none."""
    try:
        return prompt_text(row) if isinstance(row, dict) else None
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _read_saved(folder: Path) -> list[Prompt]:
    try:
        from datasets import load_from_disk

        rows = load_from_disk(str(folder))
    except Exception as error:  # of `datasets` or of arrow, depending on the damage
        raise PromptError(
            f"{folder}: holds no *.jsonl files, and no data set that `datasets` can read ({error})"
        ) from None
    return [_prompt(str(folder), number, row, _text(row)) for number, row in enumerate(rows, 1)]


def _prompt(where: str, number: int, row: Any, text: str | None) -> Prompt:
    ids = _ids(row)
    if not text and not ids:
        raise PromptError(
            f'{where}:{number}: not a JSON object with a "prompt" field that holds text, or "ids" that holds '
            "token ids; each line must be one"
        )
    names = ("id", "question_id", "task_id", "prompt_id")
    prompt_id = next((str(row[name]) for name in names if name in row), str(number))
    task = str(row.get("task", row.get("category", Path(where).stem)))
    return Prompt(prompt_id, task, text or "", () if text else ids)


def _ids(row: Any) -> tuple[int, ...]:
    """Return the token ids of a row; none unless all of them are integers."""
    ids = row.get("ids") if isinstance(row, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        return ()
    return tuple(ids)
