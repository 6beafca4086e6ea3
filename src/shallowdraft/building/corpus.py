"""Text by domain, and the packed token store that training reads.

A corpus is a folder of files named `domain.jsonl`, `domain-00.jsonl.xz`, `domain.txt` …: the domain is what stands
before the first dash or dot. JSON lines carry a `text` field; a plain text file is one document. Files named
`domain-val…` are the validation part; without one, every hundredth document of the domain is, or its last hundredth. A
folder that the package `datasets` saved will do too.

A store holds each domain's documents end to end as one memory-mapped array of token ids, an end token after each.
"""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from shallowdraft.errors import CorpusError

Part = Literal["train", "val"]
_Document = tuple[str, Part, str]
VALIDATION_EVERY = 100
SMALLEST_VOCABULARY = 257  # the bytes and the end token
DOCUMENTS_AT_ONCE = 256  # tokenizers uses all cores within a group
_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
_OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}


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
        plain = path.name.removesuffix(path.suffix) if path.suffix in _OPENERS else path.name
        if plain.endswith((".jsonl", ".txt")):
            stem = plain.rpartition(".")[0]
            sources.append(Source(path, stem.partition("-")[0], stem.partition("-")[2].startswith("val")))
    if not sources:
        raise CorpusError(
            f"{folder}: holds no .jsonl or .txt file, nor .xz or .gz of one; name them domain.jsonl or domain.txt"
        )
    return sources


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The documents of one file: `text`, and whatever else stands beside it."""
    opener = _OPENERS.get(path.suffix)
    plain = path.name.removesuffix(path.suffix) if opener else path.name
    try:
        with opener(path, "rt", encoding="utf-8") if opener else path.open(encoding="utf-8") as lines:
            if plain.endswith(".txt"):
                yield {"text": lines.read()}
                return
            for number, line in enumerate(lines, 1):
                yield _row(path, number, line)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it first") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
        raise CorpusError(f"{path}: cannot be decompressed ({error}); copy it again") from None


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        text = row["text"]
    except (ValueError, KeyError, TypeError):
        raise CorpusError(f'{path}:{number}: no JSON object with a "text" field; each line must be one') from None
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
    found = load_from_disk(str(folder))
    splits = {"train": found} if isinstance(found, Dataset) else dict(found)
    if unknown := [name for name, split in splits.items() if "text" not in split.column_names]:
        raise CorpusError(f'{folder}: split {unknown[0]} has no "text" column, only {splits[unknown[0]].column_names}')
    for name in splits.keys() & {"train", "validation"}:
        for number, row in enumerate(splits[name]):
            held_out = name == "validation" or ("validation" not in splits and number % VALIDATION_EVERY == 1)
            yield row.get("domain", folder.name), "val" if held_out else "train", row["text"]


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
    tokenizer.train_from_iterator(documents, trainer)
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
        return np.memmap(self.folder / f"{domain}.{part}.bin", dtype=_id_type(self.vocab), mode="r")

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
        for some in _in_groups(read_corpus(corpus), DOCUMENTS_AT_ONCE):
            encoded = tokenizer([text for _, _, text in some], add_special_tokens=False)["input_ids"]
            for (domain, part, _), ids in zip(some, encoded, strict=True):
                name = f"{domain}.{part}.bin"
                if name not in files:
                    files[name] = (folder / name).open("wb")
                files[name].write(np.array([*ids, end], dtype=_id_type(vocab)).tobytes())
                counts.setdefault(domain, {"train": 0, "val": 0})[part] += len(ids) + 1
    finally:
        for file in files.values():
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
    tokens[:kept].tofile(folder / f"{domain}.train.bin")
    tokens[kept:].tofile(folder / f"{domain}.val.bin")
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
        (folder / f"{domain}.{part}.bin").write_bytes(tokens.astype(_id_type(store.vocab)).tobytes())
    counts = store.counts | {domain: {"train": train.size, "val": val.size}}
    return _complete(TokenStore(folder, store.tokenizer, store.vocab, store.end, counts))


def _complete(store: TokenStore) -> TokenStore:
    """Write the description, which makes a folder a store."""
    description = json.dumps({k: v for k, v in asdict(store).items() if k != "folder"}, indent=2)
    partial = store.folder / "store.json.partial"
    partial.write_text(description + "\n", encoding="utf-8")
    partial.replace(store.folder / "store.json")
    return store


def _in_groups(items: Iterator[_Document], size: int) -> Iterator[list[_Document]]:
    while group := list(islice(items, size)):
        yield group


def open_store(folder: Path) -> TokenStore:
    try:
        return TokenStore(folder, **json.loads((folder / "store.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CorpusError(f"{folder}: no complete token store ({error}); make one from a corpus") from None


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
        return tokens[start : start + self.sequence + 1].astype(np.int64)


def _id_type(vocab: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab <= 2**16 else np.uint32
