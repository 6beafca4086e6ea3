"""A corpus as token ids: what training reads.

A store holds the documents of each domain end to end as one memory-mapped array of token ids, an end token after each.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict

import numpy as np
import numpy.typing as npt

from shallowdraft.building.corpus import VALIDATION_EVERY, Document, Part, read_corpus, required_name
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

DOCUMENTS_AT_ONCE = 256  # `tokenizers` uses all cores within a group


@dataclass(frozen=True)
class TokenStore:
    """A corpus as token ids on disk."""

    folder: Path
    tokenizer: str
    """Fingerprint of the tokenizer that made it."""
    vocab: int
    end: int
    """The token after each document."""
    counts: dict[str, dict[Part, int]]
    """Tokens by domain and part."""

    @property
    def domains(self) -> list[str]:
        return [domain for domain, parts in self.counts.items() if parts["train"]]

    @property
    def tokens_in_all(self) -> int:
        return sum(sum(parts.values()) for parts in self.counts.values())

    def tokens(self, domain: str, part: Part) -> npt.NDArray[np.unsignedinteger]:
        """All tokens of a part, memory-mapped."""
        file, kind = self.folder / f"{domain}.{part}.bin", _id_type(self.vocab)
        size, wanted = file.stat().st_size if file.is_file() else 0, self.counts[domain][part] * np.dtype(kind).itemsize
        if size != wanted:
            raise CorpusError(
                f"{file}: {size:,} bytes, and store.json says {wanted:,}; make a new store from the corpus"
            )
        return np.memmap(file, dtype=kind, mode="r")

    def require_tokenizer(self, tokenizer: Any) -> None:
        if fingerprint(tokenizer) != self.tokenizer:
            raise CorpusError(
                f"{self.folder} was made with another tokenizer than this model's; make a new store from the corpus"
            )


def write_store(corpus: Path, tokenizer: Any, folder: Path) -> TokenStore:
    """Tokenise a corpus into a folder; `store.json` comes last, so a folder with it is complete."""
    if (folder / "store.json").exists():
        raise CorpusError(f"{folder} already holds a token store; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    empty = empty_store(tokenizer, folder)
    vocab, end = empty.vocab, empty.end
    counts: dict[str, dict[Part, int]] = {}
    files: dict[str, IO[bytes]] = {}
    try:
        for some in _in_groups(read_corpus(corpus)):
            encoded = tokenizer([one.text for one in some], add_special_tokens=False)["input_ids"]
            for one, ids in zip(some, encoded, strict=True):
                name = f"{one.domain}.{one.part}.bin"
                if name not in files:
                    files[name] = (folder / name).open("wb")
                tokens = [*ids, end] if one.last else ids
                with path_in_errors(folder / name):
                    files[name].write(np.array(tokens, dtype=_id_type(vocab)).tobytes())
                counts.setdefault(one.domain, {"train": 0, "val": 0})[one.part] += len(tokens)
    finally:
        for name, file in files.items():
            with path_in_errors(folder / name):
                file.close()
    if not any(parts["train"] for parts in counts.values()):
        raise CorpusError(f"{corpus}: holds no text to train on")
    for domain, parts in counts.items():
        if not parts["val"]:
            _hold_out_the_end(folder, domain, parts, _id_type(vocab))
    return _complete(replace(empty, counts=counts))


def empty_store(tokenizer: Any, folder: Path) -> TokenStore:
    """Without any text."""
    if tokenizer.eos_token_id is None:
        raise CorpusError("the tokenizer has no end-of-sequence token to put between documents")
    return TokenStore(folder, fingerprint(tokenizer), len(tokenizer), tokenizer.eos_token_id, {})


def _hold_out_the_end(folder: Path, domain: str, parts: dict[Part, int], kind: type[np.unsignedinteger]) -> None:
    """Of a domain with too few documents to hold one out."""
    tokens = np.fromfile(folder / f"{domain}.train.bin", kind)
    kept = len(tokens) - len(tokens) // VALIDATION_EVERY
    for part, some in (("train", tokens[:kept]), ("val", tokens[kept:])):
        with path_in_errors(folder / f"{domain}.{part}.bin"):
            some.tofile(folder / f"{domain}.{part}.bin")
    parts["train"], parts["val"] = kept, len(tokens) - kept


def extend_store(
    store: TokenStore, folder: Path, domain: str, *, train: npt.NDArray[np.int64], val: npt.NDArray[np.int64]
) -> TokenStore:
    """A store in another folder with one more domain; the files of the others are shared."""
    if domain in store.counts:
        raise CorpusError(f"{store.folder} has a domain {domain!r} already")
    folder.mkdir(parents=True, exist_ok=True)
    for known, parts in store.counts.items():
        for name in (f"{known}.{part}.bin" for part, count in parts.items() if count):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to((store.folder / name).resolve())
    for part, tokens in (("train", train), ("val", val)):
        file = folder / f"{domain}.{part}.bin"
        with path_in_errors(file):
            file.write_bytes(tokens.astype(_id_type(store.vocab)).tobytes())
    counts = store.counts | {domain: {"train": train.size, "val": val.size}}
    return _complete(TokenStore(folder, store.tokenizer, store.vocab, store.end, counts))


def _complete(store: TokenStore) -> TokenStore:
    """Write the description, which makes a folder a store."""
    description = json.dumps({k: v for k, v in asdict(store).items() if k != "folder"}, indent=2)
    write_whole(store.folder / "store.json", description + "\n")
    return store


@dataclass(frozen=True)
class _Piece:
    """A document, or some of a long one."""

    domain: str
    part: Part
    text: str
    last: bool


def _in_groups(documents: Iterator[Document]) -> Iterator[list[_Piece]]:
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
    """What store.json holds."""

    tokenizer: str
    vocab: Annotated[int, Range(1, LIMITS["vocab"])]
    end: Annotated[int, Range(0, LIMITS["vocab"])]
    counts: dict[str, _Counts]


def open_store(folder: Path) -> TokenStore:
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
