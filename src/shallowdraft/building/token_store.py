"""A corpus as token ids, from which training reads.

A store holds the documents of each domain end to end as one memory-mapped array of token ids, an end token after each.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict

import numpy as np
import numpy.typing as npt

from shallowdraft.building.corpus import VALIDATION_EVERY, CorpusDocument, Part, read_corpus, required_name
from shallowdraft.building.tokenizer import CHARACTERS_AT_ONCE, fingerprint, split_text
from shallowdraft.errors import CorpusError
from shallowdraft.files import (
    Count,
    Range,
    path_in_errors,
    read_json,
    require_fields,
)
from shallowdraft.limits import LIMITS
from shallowdraft.records import write_whole

DOCUMENTS_AT_ONCE = 256  # `tokenizers` spreads the documents of one call over all cores


@dataclass(frozen=True)
class TokenStore:
    """A corpus as token ids on disk."""

    folder: Path
    tokenizer: str
    """Fingerprint of the tokenizer that encoded it."""
    vocab: int
    """Tokens in the tokenizer's vocabulary."""
    end: int
    """Id of the token after each document."""
    counts: dict[str, dict[Part, int]]
    """Tokens by domain and part."""

    @property
    def domains(self) -> list[str]:
        """Domains with text to train on."""
        return [domain for domain, parts in self.counts.items() if parts["train"]]

    @property
    def tokens_in_all(self) -> int:
        """Tokens of all domains and parts."""
        return sum(sum(parts.values()) for parts in self.counts.values())

    def tokens(self, domain: str, part: Part) -> npt.NDArray[np.unsignedinteger]:
        """Return all tokens of a part, memory-mapped."""
        file, id_type = self.folder / f"{domain}.{part}.bin", _id_type(self.vocab)
        size, expected = file.stat().st_size if file.is_file() else 0, self.counts[domain][part] * id_type().itemsize
        if size != expected:
            raise CorpusError(
                f"{file}: {size:,} bytes, and store.json says {expected:,}; make a new store from the corpus"
            )
        return np.memmap(file, dtype=id_type, mode="r")

    def require_tokenizer(self, tokenizer: Any) -> None:
        """Raise unless this tokenizer encoded the store."""
        if fingerprint(tokenizer) != self.tokenizer:
            raise CorpusError(
                f"{self.folder} was made with another tokenizer than this model's; make a new store from the corpus"
            )


def write_store(corpus: Path, tokenizer: Any, folder: Path) -> TokenStore:
    """Tokenise a corpus into a folder; `store.json` is written last, so a folder that has it is complete."""
    if (folder / "store.json").exists():
        raise CorpusError(f"{folder} already holds a token store; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    empty = empty_store(tokenizer, folder)
    id_type = _id_type(empty.vocab)
    counts: dict[str, dict[Part, int]] = {}
    files: dict[str, IO[bytes]] = {}
    try:
        for group in _in_groups(read_corpus(corpus)):
            encoded = tokenizer([piece.text for piece in group], add_special_tokens=False)["input_ids"]
            for piece, ids in zip(group, encoded, strict=True):
                name = f"{piece.domain}.{piece.part}.bin"
                if name not in files:
                    files[name] = (folder / name).open("wb")
                tokens = [*ids, empty.end] if piece.last else ids
                with path_in_errors(folder / name):
                    files[name].write(np.array(tokens, dtype=id_type).tobytes())
                counts.setdefault(piece.domain, {"train": 0, "val": 0})[piece.part] += len(tokens)
    finally:
        for name, file in files.items():
            with path_in_errors(folder / name):
                file.close()
    if not any(parts["train"] for parts in counts.values()):
        raise CorpusError(f"{corpus}: holds no text to train on")
    for domain, parts in counts.items():
        if not parts["val"]:
            _hold_out_the_end(folder, domain, parts, id_type)
    return _write_description(replace(empty, counts=counts))


def empty_store(tokenizer: Any, folder: Path) -> TokenStore:
    """Return a store without any text."""
    if tokenizer.eos_token_id is None:
        raise CorpusError("the tokenizer has no end-of-sequence token to put between documents")
    return TokenStore(folder, fingerprint(tokenizer), len(tokenizer), tokenizer.eos_token_id, {})


def _hold_out_the_end(folder: Path, domain: str, counts: dict[Part, int], id_type: type[np.unsignedinteger]) -> None:
    """Move the last hundredth of a domain with too few documents to hold one out to its validation part."""
    tokens = np.fromfile(folder / f"{domain}.train.bin", id_type)
    training = len(tokens) - len(tokens) // VALIDATION_EVERY
    parts: dict[Part, npt.NDArray[np.unsignedinteger]] = {"train": tokens[:training], "val": tokens[training:]}
    for part, part_tokens in parts.items():
        with path_in_errors(folder / f"{domain}.{part}.bin"):
            part_tokens.tofile(folder / f"{domain}.{part}.bin")
        counts[part] = len(part_tokens)


def extend_store(
    store: TokenStore, folder: Path, domain: str, *, train: npt.NDArray[np.int64], val: npt.NDArray[np.int64]
) -> TokenStore:
    """Make a store in another folder with one more domain; the files of the others are linked to."""
    if domain in store.counts:
        raise CorpusError(f"{store.folder} has a domain {domain!r} already")
    folder.mkdir(parents=True, exist_ok=True)
    for shared, parts in store.counts.items():
        for part, count in parts.items():
            if count:
                link = folder / f"{shared}.{part}.bin"
                link.unlink(missing_ok=True)
                link.symlink_to((store.folder / link.name).resolve())
    for part, tokens in (("train", train), ("val", val)):
        file = folder / f"{domain}.{part}.bin"
        with path_in_errors(file):
            file.write_bytes(tokens.astype(_id_type(store.vocab)).tobytes())
    counts = store.counts | {domain: {"train": train.size, "val": val.size}}
    return _write_description(replace(store, folder=folder, counts=counts))


def _write_description(store: TokenStore) -> TokenStore:
    """Write store.json, which says that a store is complete, and return the store."""
    fields = {name: value for name, value in asdict(store).items() if name != "folder"}
    description = json.dumps(fields, indent=2)
    write_whole(store.folder / "store.json", description + "\n")
    return store


@dataclass(frozen=True)
class _Piece:
    """A document, or a part of a long one."""

    domain: str
    part: Part
    text: str
    last: bool
    """Whether the document ends here."""


def _in_groups(documents: Iterator[CorpusDocument]) -> Iterator[list[_Piece]]:
    """Cut documents into pieces and yield them in groups of bounded size, to encode at once."""
    group: list[_Piece] = []
    size = 0
    for domain, part, text in documents:
        pieces = list(split_text(text))
        for number, piece in enumerate(pieces, 1):
            group.append(_Piece(domain, part, piece, number == len(pieces)))
            size += len(piece)
            if len(group) == DOCUMENTS_AT_ONCE or size > CHARACTERS_AT_ONCE:
                yield group
                group, size = [], 0
    if group:
        yield group


class _Counts(TypedDict):
    train: Count
    val: Count


class _Description(TypedDict):
    """Fields of store.json."""

    tokenizer: str
    vocab: Annotated[int, Range(1, LIMITS["vocab"])]
    end: Annotated[int, Range(0, LIMITS["vocab"])]
    counts: dict[str, _Counts]


def open_store(folder: Path) -> TokenStore:
    """Open a complete store."""
    path = folder / "store.json"
    try:
        description = read_json(path, CorpusError)
    except OSError as error:
        raise CorpusError(f"{folder}: no complete token store ({error}); make one from a corpus") from None
    require_fields(description, _Description, str(path), CorpusError)
    for domain in description["counts"]:
        required_name(str(path), domain)
    return TokenStore(folder, **{name: description[name] for name in _Description.__annotations__})


def _id_type(vocab: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab <= 2**16 else np.uint32
