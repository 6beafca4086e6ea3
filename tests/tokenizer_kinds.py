"""Small tokenizers of every kind that checkpoints come with, trained on a few sentences."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT = [
    "Once upon a time there was a girl. She was called Lily.\nShe was happy.",
    "The café had one naïve visitor: it was the king, who sat down.  He said “no”.\n\n\tAnd then?",
]
UNSEEN = " 漢字 and 😀 beside é."  # what byte fallback is for
SPECIAL = ["<unk>", "<s>", "</s>"]
SPACE = "▁"
QUIET = {"special_tokens": SPECIAL, "show_progress": False}


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, **QUIET),
    )
    return made


def sentencepiece_bpe(*, strips: bool) -> Tokenizer:
    """As Llama's: unknown characters are bytes; `strips`: a space is put before a text and taken away again."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [
        (name[:cut], name[cut:])
        for name in pieces
        for cut in range(1, len(name))
        if {name[:cut], name[cut:]} <= vocabulary.keys()
    ]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    prefix = [normalizers.Prepend(SPACE)] if strips else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


def unigram() -> Tokenizer:
    """As T5's."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **QUIET))
    return made


def word_pieces() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=120, **QUIET))
    return made


BUILT = {
    "byte-level": byte_level,
    "llama": lambda: sentencepiece_bpe(strips=True),
    "gemma": lambda: sentencepiece_bpe(strips=False),
    "unigram": unigram,
    "word pieces": word_pieces,
}
KINDS = [*BUILT, "bytes"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """As transformers reads it from the files of a checkpoint."""
    if kind == "bytes":
        return ByT5Tokenizer()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=BUILT[kind](), **named)
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        assert (Path(folder) / "tokenizer.json").is_file()
        return AutoTokenizer.from_pretrained(folder)
