"""Training of tokenizers, and a fingerprint by which two are compared."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from shallowdraft.errors import CorpusError

SMALLEST_VOCABULARY = 257  # the bytes and the end token
CHARACTERS_AT_ONCE = 2**20  # `tokenizers` needs 0.2 KB of memory for every token that it encodes at once


def train_tokenizer(documents: Iterator[str], vocab: int) -> Any:
    """Train a byte-level BPE tokenizer of exactly `vocab` tokens; `<|end|>` ends a document."""
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
    tokenizer.train_from_iterator((piece for text in documents for piece in split_text(text)), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise CorpusError(
            f"the corpus gives only {tokenizer.get_vocab_size():,} of {vocab:,} tokens; "
            "use more text or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's map from tokens to ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def split_text(text: str) -> Iterator[str]:
    """Cut a long document at line ends, so that the memory for encoding a piece is bounded."""
    start = 0
    while len(text) - start > CHARACTERS_AT_ONCE:
        end = text.rfind("\n", start, start + CHARACTERS_AT_ONCE) + 1 or start + CHARACTERS_AT_ONCE
        yield text[start:end]
        start = end
    yield text[start:]
