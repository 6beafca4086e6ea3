"""Text by domain, and the packed token store that training reads.

A corpus is a folder of files named `domain.jsonl`, `domain-00.jsonl.xz`, `domain.txt` …: the domain is what stands
before the first dash or dot. JSON lines carry a `text` field; a plain text file is one document. Files named
`domain-val…` are the validation part; without one, every hundredth document of the domain is, or its last hundredth. A
folder that the package `datasets` saved will do too.

A store holds each domain's documents end to end as one memory-mapped array of token ids, an end token after each.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import IO, Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from shallowdraft.errors import CorpusError, first_line
from shallowdraft.files import (
    COMPRESSED,
    Count,
    Range,
    Share,
    is_plain_name,
    parse_json,
    path_in_errors,
    read_json,
    read_lines,
    read_text,
    require_fields,
)
from shallowdraft.limits import LIMITS
from shallowdraft.records import write_whole

Part = Literal["train", "val"]
_Document = tuple[str, Part, str]
VALIDATION_EVERY = 100
SMALLEST_VOCABULARY = 257  # the bytes and the end token
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 2**20  # tokenizers uses all cores within a group, and 0.2 KB a token
LONGEST_NAME = 128  # characters of a domain
_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
_UNREAD = (".zst", ".bz2", ".zip")


@dataclass(frozen=True)
class Source:
    """One file of a corpus."""

    path: Path
    domain: str
    validation: bool


def find_sources(folder: Path) -> list[Source]:
    """The corpus files of a folder, in name order."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise CorpusError(f"{folder}: {found}; a corpus is a folder of .jsonl or .txt files")
    sources = []
    for path in sorted(folder.iterdir()):
        plain = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED + _UNREAD else path.name
        if plain.endswith((".jsonl", ".txt")) and path.suffix in _UNREAD:
            raise CorpusError(f"{path}: {path.suffix} is not read; make it .xz or .gz, or decompress it")
        if plain.endswith((".jsonl", ".txt")):
            stem = plain.rpartition(".")[0]
            domain = _required_name(str(path), stem.partition("-")[0])
            sources.append(Source(path, domain, stem.partition("-")[2].startswith("val")))
    if not sources:
        raise CorpusError(
            f"{folder}: holds no .jsonl or .txt file, nor .xz or .gz of one; name them domain.jsonl or domain.txt"
        )
    return sources


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The documents of one file: `text`, and whatever else stands beside it."""
    if ".txt" in path.suffixes[-2:]:
        yield {"text": read_text(path, CorpusError)}
        return
    for number, line in read_lines(path, CorpusError):
        yield _row(path, number, line)


def _required_name(where: str, domain: Any) -> str:
    """A domain becomes the name of a file of the store, and of nothing elsewhere."""
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


def read_corpus(folder: Path) -> Iterator[_Document]:
    """Every non-empty document with its domain and part."""
    saved = any((folder / name).exists() for name in _DATASET_FILES)
    documents = _read_dataset(folder) if saved else _read_files(folder)
    yield from (document for document in documents if document[2].strip())


def _read_dataset(folder: Path) -> Iterator[_Document]:
    """A data set that `datasets` saved: columns "text" and, if there is one, "domain"; splits train and validation."""
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise CorpusError(f"{folder} holds a data set; `pip install datasets` to read it") from None
    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # of arrow's and of its own, as the damage is
        raise CorpusError(f"{folder}: the data set cannot be read ({first_line(error)}); copy it again") from None
    splits = {"train": found} if isinstance(found, Dataset) else dict(found)
    if unknown := [name for name, split in splits.items() if "text" not in split.column_names]:
        raise CorpusError(f'{folder}: split {unknown[0]} has no "text" column, only {splits[unknown[0]].column_names}')
    for name in splits.keys() & {"train", "validation"}:
        for number, row in enumerate(splits[name]):
            held_out = name == "validation" or ("validation" not in splits and number % VALIDATION_EVERY == 1)
            if not isinstance(row["text"], str):
                raise CorpusError(f'{folder}: row {number} of {name}: "text" is no string')
            domain = _required_name(str(folder), row.get("domain", folder.name))
            yield domain, "val" if held_out else "train", row["text"]


def _read_files(folder: Path) -> Iterator[_Document]:
    sources = find_sources(folder)
    has_validation = {source.domain for source in sources if source.validation}
    for source in sources:
        for number, row in enumerate(read_rows(source.path)):
            held_out = source.validation or (source.domain not in has_validation and number % VALIDATION_EVERY == 1)
            yield source.domain, "val" if held_out else "train", row["text"]


def train_tokenizer(documents: Iterator[str], vocab: int) -> Any:
    """A byte-level BPE tokenizer of exactly `vocab` tokens; `<|end|>` ends a document."""
    if vocab < SMALLEST_VOCABULARY:
        raise CorpusError(f"a vocabulary of {vocab} cannot hold all bytes; use at least {SMALLEST_VOCABULARY}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in documents for piece in _pieces(text)), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise CorpusError(
            f"the corpus gives only {tokenizer.get_vocab_size():,} of {vocab:,} tokens; "
            "use more text or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def fingerprint(tokenizer: Any) -> str:
    """What identifies a tokenizer: its map from tokens to ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


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


def _pieces(text: str) -> Iterator[str]:
    """Cut a long document where a line ends, so that what is made of it at a time is bounded."""
    start = 0
    while len(text) - start > CHARACTERS_AT_ONCE:
        end = text.rfind("\n", start, start + CHARACTERS_AT_ONCE) + 1 or start + CHARACTERS_AT_ONCE
        yield text[start:end]
        start = end
    yield text[start:]


def _in_groups(documents: Iterator[_Document]) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    size = 0
    for domain, part, text in documents:
        pieces = list(_pieces(text))
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
        _required_name(str(path), domain)
    return TokenStore(folder, **{name: description[name] for name in _Description.__annotations__})


class _Place(TypedDict):
    """Where batches stand."""

    step: Count
    cursors: dict[str, Count]
    weights: dict[str, Share]


class Batches:
    """Batches of sequences from a store, drawn by domain, in an order that follows from the seed alone.

    `state` says where it stands; a reader that restores it goes on with the very next batch. Each domain is read in a
    shuffled order of chunks, anew each epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        part: Part = "train",
        rows: int,
        sequence: int,
        seed: int,
        domains: Sequence[str] | None = None,
    ) -> None:
        self.store, self.part, self.rows, self.sequence, self.seed = store, part, rows, sequence, seed
        wanted = domains or store.domains
        self._tokens = {
            domain: store.tokens(domain, part) for domain in wanted if store.counts[domain][part] > sequence
        }
        if not self._tokens:
            raise CorpusError(
                f"no domain has {sequence + 1:,} tokens of {part} text; use more text or shorter sequences"
            )
        sizes = np.array([len(tokens) for tokens in self._tokens.values()], dtype=np.float64)
        self.weights = dict(zip(self._tokens, (sizes / sizes.sum()).tolist(), strict=True))
        self._cursors = dict.fromkeys(self._tokens, 0)
        self._step = 0
        self._orders: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

    def next(self) -> npt.NDArray[np.int64]:
        """[rows, sequence + 1] token ids."""
        names = list(self._tokens)
        draws = np.random.default_rng([self.seed, 0, self._step]).choice(
            len(names), size=self.rows, p=np.array([self.weights[name] for name in names])
        )
        self._step += 1
        return np.stack([self._chunk(names[draw]) for draw in draws])

    @property
    def state(self) -> dict[str, Any]:
        return {"step": self._step, "cursors": dict(self._cursors), "weights": dict(self.weights)}

    def restore(self, state: dict[str, Any]) -> None:
        require_fields(state, _Place, "where batches stand", CorpusError)
        if state["cursors"].keys() != self._tokens.keys() or state["weights"].keys() != self._tokens.keys():
            raise CorpusError(f"the state is of the domains {', '.join(state['cursors'])}, not of these batches")
        self._step, self._cursors, self.weights = state["step"], dict(state["cursors"]), dict(state["weights"])

    def _chunk(self, domain: str) -> npt.NDArray[np.int64]:
        tokens, cursor = self._tokens[domain], self._cursors[domain]
        chunks = (len(tokens) - 1) // self.sequence
        epoch, index = divmod(cursor, chunks)
        self._cursors[domain] = cursor + 1
        if (domain, epoch) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != domain}
            key = [self.seed, 1 + list(self._tokens).index(domain), epoch]
            self._orders[domain, epoch] = np.random.default_rng(key).permutation(chunks)
        start = int(self._orders[domain, epoch][index]) * self.sequence
        chunk = tokens[start : start + self.sequence + 1].astype(np.int64)
        if int(chunk.max()) >= self.store.vocab:
            raise CorpusError(
                f"{self.store.folder}: token {int(chunk.max()):,} of {domain} is not among its {self.store.vocab:,}; "
                "make a new store from the corpus"
            )
        return chunk


def _id_type(vocab: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab <= 2**16 else np.uint32
