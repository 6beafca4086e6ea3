"""A corpus on disk: its files by domain, and their documents.

A corpus is a folder of files named `domain.jsonl`, `domain-00.jsonl.xz`, `domain.txt` …: the domain is the part of the
name before the first dash or dot. JSON lines have a `text` field; a plain text file is one document. Files named
`domain-val…` are the validation part; without one, it is every hundredth document of the domain, or its last hundredth.
A folder that the package `datasets` saved is read too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal

from shallowdraft.errors import CorpusError, first_line
from shallowdraft.files import (
    COMPRESSED,
    is_plain_name,
    parse_json,
    read_lines,
    read_text,
)

VALIDATION_EVERY = 100
Part = Literal["train", "val"]
CorpusDocument = tuple[str, Part, str]
"""Domain, part and text."""
LONGEST_NAME = 128  # characters in the name of a domain
_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
_UNREAD = (".zst", ".bz2", ".zip")


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus."""

    path: Path
    domain: str
    validation: bool


def find_corpus_files(folder: Path) -> list[CorpusFile]:
    """Return the corpus files of a folder, in name order."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        raise CorpusError(f"{folder}: {problem}; a corpus is a folder of .jsonl or .txt files")
    files = []
    for path in sorted(folder.iterdir()):
        plain = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED + _UNREAD else path.name
        if plain.endswith((".jsonl", ".txt")) and path.suffix in _UNREAD:
            raise CorpusError(f"{path}: {path.suffix} is not read; make it .xz or .gz, or decompress it")
        if plain.endswith((".jsonl", ".txt")):
            stem = plain.rpartition(".")[0]
            domain = required_name(str(path), stem.partition("-")[0])
            files.append(CorpusFile(path, domain, stem.partition("-")[2].startswith("val")))
    if not files:
        raise CorpusError(
            f"{folder}: holds no .jsonl or .txt file, nor .xz or .gz of one; name them domain.jsonl or domain.txt"
        )
    return files


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of one file: `text`, and the other fields of its line."""
    if ".txt" in path.suffixes[-2:]:
        yield {"text": read_text(path, CorpusError)}
        return
    for number, line in read_lines(path, CorpusError):
        yield _row(path, number, line)


def required_name(where: str, domain: Any) -> str:
    """Return a domain's name, or raise if it is not fit for a file name: the store has a file for each domain."""
    if not isinstance(domain, str) or not 0 < len(domain) <= LONGEST_NAME or not domain.isprintable():
        raise CorpusError(f"{where}: the domain {shortened(domain)} is no name; use some letters and digits")
    if domain.startswith(".") or not is_plain_name(domain) or "\\" in domain:
        raise CorpusError(f"{where}: the domain {shortened(domain)} is a path; use letters and digits")
    return domain


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = parse_json(line)
        text = row["text"]
    except (ValueError, KeyError, TypeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise CorpusError(
            f'{path}:{number}: no JSON object with a "text" field{reason}; each line must be one'
        ) from None
    if not isinstance(text, str):
        raise CorpusError(f'{path}:{number}: "text" is no string')
    return row


def read_corpus(folder: Path) -> Iterator[CorpusDocument]:
    """Yield every non-empty document with its domain and part."""
    saved = any((folder / name).exists() for name in _DATASET_FILES)
    documents = _read_dataset(folder) if saved else _read_files(folder)
    yield from (document for document in documents if document[2].strip())


def _read_dataset(folder: Path) -> Iterator[CorpusDocument]:
    """Read a data set that `datasets` saved: columns "text" and perhaps "domain", splits train and validation."""
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise CorpusError(f"{folder} holds a data set; `pip install datasets` to read it") from None
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # of arrow or of datasets, whichever meets the damage
        raise CorpusError(f"{folder}: the data set cannot be read ({first_line(error)}); copy it again") from None
    splits = {"train": dataset} if isinstance(dataset, Dataset) else dict(dataset)
    if unknown := [name for name, split in splits.items() if "text" not in split.column_names]:
        raise CorpusError(f'{folder}: split {unknown[0]} has no "text" column, only {splits[unknown[0]].column_names}')
    for name in splits.keys() & {"train", "validation"}:
        for number, row in enumerate(splits[name]):
            held_out = name == "validation" or ("validation" not in splits and number % VALIDATION_EVERY == 1)
            if not isinstance(row["text"], str):
                raise CorpusError(f'{folder}: row {number} of {name}: "text" is no string')
            domain = required_name(str(folder), row.get("domain", folder.name))
            yield domain, "val" if held_out else "train", row["text"]


def _read_files(folder: Path) -> Iterator[CorpusDocument]:
    files = find_corpus_files(folder)
    has_validation = {file.domain for file in files if file.validation}
    for file in files:
        for number, row in enumerate(read_rows(file.path)):
            held_out = file.validation or (file.domain not in has_validation and number % VALIDATION_EVERY == 1)
            yield file.domain, "val" if held_out else "train", row["text"]
