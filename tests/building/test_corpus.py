import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from shallowdraft.building.batches import Batches
from shallowdraft.building.corpus import read_corpus
from shallowdraft.building.token_store import open_store, write_store
from shallowdraft.building.tokenizer import train_tokenizer
from shallowdraft.errors import CorpusError
from shallowdraft.models.synthetic import byte_tokenizer


def document(number: int) -> str:
    return f"Document {number} has some words, more words and the number {number * 37}.\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": document(number)}) + "\n" for number in range(300)]
    (folder / "notes-00.jsonl").write_text("".join(lines[:100]))
    with lzma.open(folder / "notes-01.jsonl.xz", "wt") as file:
        file.writelines(lines[100:200])
    with gzip.open(folder / "tales.jsonl.gz", "wt") as file:
        file.writelines(lines[200:290])
    (folder / "tales-val.jsonl").write_text("".join(lines[290:]))
    (folder / "book.txt").write_text("One whole book. " * 200)
    (folder / "README.md").write_text("not text to train on")
    return folder


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer(320)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(300)
    return tokenizer


def test_domains_and_parts(corpus: Path):
    documents = list(read_corpus(corpus))
    count = {(domain, part): sum(d == domain and p == part for d, p, _ in documents) for domain, part, _ in documents}
    assert count == {
        ("book", "train"): 1,
        ("notes", "train"): 198,
        ("notes", "val"): 2,
        ("tales", "train"): 90,
        ("tales", "val"): 10,
    }
    assert {text for _, _, text in documents} >= {document(number) for number in range(300)}


def test_a_single_document_is_held_out_in_part(corpus: Path, tokenizer, tmp_path: Path):
    store = write_store(corpus, tokenizer, tmp_path / "store")
    whole = len(tokenizer("One whole book. " * 200, add_special_tokens=False)["input_ids"]) + 1
    assert store.counts["book"] == {"train": whole - whole // 100, "val": whole // 100}
    assert len(store.tokens("book", "val")) == whole // 100


def test_a_trained_trainedknows_its_text(corpus: Path):
    trained = train_tokenizer((text for _, _, text in read_corpus(corpus)), 400)
    assert len(trained) == 400
    assert trained.decode(trained.encode(document(7) + "Ünïcode 漢字")) == document(7) + "Ünïcode 漢字"
    assert len(trained.encode(document(7))) < len(document(7)) / 2
    with pytest.raises(CorpusError, match=r"only .* of 30,000"):
        train_tokenizer(iter([document(1)]), 30000)


def test_the_store_holds_every_document(corpus: Path, tokenizer, tmp_path: Path):
    store = write_store(corpus, tokenizer, tmp_path / "store")
    assert open_store(tmp_path / "store") == store
    text = tokenizer.decode(store.tokens("tales", "train"))
    assert text.count("Document") == 90
    assert sum(store.tokens("tales", "train") == tokenizer.eos_token_id) == 90
    store.require_tokenizer(tokenizer)
    with pytest.raises(CorpusError, match="another tokenizer"):
        store.require_tokenizer(byte_tokenizer(330))
    with pytest.raises(CorpusError, match="already holds"):
        write_store(corpus, tokenizer, tmp_path / "store")


def batches(corpus: Path, tokenizer, tmp_path: Path, **options) -> Batches:
    folder = tmp_path / "store"
    store = open_store(folder) if folder.exists() else write_store(corpus, tokenizer, folder)
    return Batches(store, **{"rows": 6, "sequence": 32, "seed": 1} | options)


def test_batches_follow_from_the_seed_and_can_go_on(corpus: Path, tokenizer, tmp_path: Path):
    first, second = (batches(corpus, tokenizer, tmp_path) for _ in "ab")
    seen = [first.next() for _ in range(200)]
    for index in range(120):
        assert np.array_equal(second.next(), seen[index])
    third = batches(corpus, tokenizer, tmp_path)
    third.restore(json.loads(json.dumps(second.state)))
    assert all(np.array_equal(third.next(), batch) for batch in seen[120:])
    assert not np.array_equal(batches(corpus, tokenizer, tmp_path, seed=2).next(), seen[0])


def test_an_epoch_reads_every_chunk_once(corpus: Path, tokenizer, tmp_path: Path):
    reader = batches(corpus, tokenizer, tmp_path, rows=1, domains=["notes"])
    tokens = reader.store.tokens("notes", "train")
    chunks = (len(tokens) - 1) // 32
    for _ in range(2):
        starts = sorted(tuple(reader.next()[0, :-1]) for _ in range(chunks))
        assert starts == sorted(tuple(tokens[i * 32 : i * 32 + 32].tolist()) for i in range(chunks))


def test_weights_choose_the_domain(corpus: Path, tokenizer, tmp_path: Path):
    reader = batches(corpus, tokenizer, tmp_path, rows=50)
    assert sum(reader.weights.values()) == pytest.approx(1)
    reader.weights = {"book": 1.0, "notes": 0.0, "tales": 0.0}
    assert all("Document" not in tokenizer.decode(row) for row in reader.next())


BROKEN = {
    "no folder": (lambda f: f / "nowhere", "no such folder"),
    "no files": (lambda f: (f / "empty").mkdir() or f / "empty", "holds no .jsonl"),
    "not JSON": (
        lambda f: (f / "notes-00.jsonl").write_text("hello\n") and f,
        'notes-00.jsonl:1: no JSON object with a "text"',
    ),
    "no text": (lambda f: (f / "notes-00.jsonl").write_text('{"txt": 1}\n') and f, '"text" field'),
    "text is a number": (lambda f: (f / "notes-00.jsonl").write_text('{"text": 1}\n') and f, "no string"),
    "another encoding": (lambda f: (f / "book.txt").write_bytes("Bücher".encode("latin-1")) and f, "not UTF-8"),
    "half an archive": (
        lambda f: (f / "notes-01.jsonl.xz").write_bytes((f / "notes-01.jsonl.xz").read_bytes()[:90]) and f,
        "cannot be decompressed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_corpora(corpus: Path, tokenizer, tmp_path: Path, case: str):
    damage, said = BROKEN[case]
    with pytest.raises(CorpusError, match=said):
        write_store(damage(corpus), tokenizer, tmp_path / "store")
    with pytest.raises(CorpusError, match="no complete token store"):
        open_store(tmp_path / "store")


def test_a_corpus_without_text(tmp_path: Path, tokenizer):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("  \n")
    with pytest.raises(CorpusError, match="no text to train on"):
        write_store(tmp_path / "c", tokenizer, tmp_path / "store")


def test_too_little_text_for_a_sequence(corpus: Path, tokenizer, tmp_path: Path):
    with pytest.raises(CorpusError, match="no domain has 1,000,001 tokens"):
        batches(corpus, tokenizer, tmp_path, sequence=1_000_000)


@pytest.mark.parametrize("split", [False, True])
def test_a_saved_data_set_is_a_corpus(tmp_path: Path, split: bool):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"text": f"text {i}", "domain": "even" if i % 2 == 0 else "odd"} for i in range(4)]
    )
    saved = datasets.DatasetDict({"train": rows, "validation": rows.select([0])}) if split else rows
    saved.save_to_disk(str(tmp_path / "set"))
    documents = list(read_corpus(tmp_path / "set"))
    assert sorted(documents)[:2] == [("even", "train", "text 0"), ("even", "train", "text 2")]
    assert len(documents) == 4 + split
    assert [text for _, part, text in documents if part == "val"] == (["text 0"] if split else ["text 1"])
    datasets.Dataset.from_dict({"words": ["a"]}).save_to_disk(str(tmp_path / "wrong"))
    with pytest.raises(CorpusError, match='no "text" column'):
        list(read_corpus(tmp_path / "wrong"))
