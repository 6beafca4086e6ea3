"""Loading of tokenizers, and the comparison of a draft's vocabulary with its target's."""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal

from shallowdraft.errors import CheckpointError, UnsupportedModelError, VocabularyError, first_line
from shallowdraft.files import LARGEST_TEXT, read_json, require_regular

log = logging.getLogger(__name__)

LARGEST_TAIL = 1024  # tokens at the end that only one of two vocabularies may have: special tokens added later
SIDE_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Patterns of the files of a checkpoint beside its weights."""
_NEVER_OPENED = ("special_tokens_map_file",)  # in many a tokenizer_config.json this is a path of its author's
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # a key of transformers
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> Any | None:
    """Load a folder's tokenizer, or return None if it has none; never run code from a checkpoint."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    _require_own_files(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises bare Exceptions, tokenizers panics
        _require_config(folder)
        raise VocabularyError(
            f"{folder}: the tokenizer cannot be loaded ({first_line(error)}); copy its files again"
        ) from error
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True  # no warning: this package checks lengths itself
    return tokenizer


def _require_own_files(folder: Path) -> None:
    """Raise for files that transformers would hang on, and for settings that make it read files outside the folder."""
    for pattern in SIDE_FILES:
        for file in folder.glob(pattern):
            require_regular(file, VocabularyError)
            if file.is_file() and file.stat().st_size > LARGEST_TEXT:
                raise VocabularyError(f"{file}: larger than {LARGEST_TEXT:,} bytes, as no file of a tokenizer is")
    settings = folder / "tokenizer_config.json"
    entries = read_json(settings, VocabularyError) if settings.is_file() else {}
    for key, value in entries.items():
        if key in _NEVER_OPENED or not key.endswith(("_file", "_files")):
            continue
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and Path(name).name != name and (folder / name).exists():
                raise VocabularyError(
                    f"{settings}: {key} names {shortened(name)}, which is not in this folder; remove that entry"
                )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be written ({first_line(error)}); is the disk full?"
        ) from None


def _require_config(folder: Path) -> None:
    """Raise with transformers' own reason if it refuses the config, which it reads to find the tokenizer's class."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a config can make it raise anything
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UnsupportedModelError(
            f"{folder}: transformers refuses config.json ({reason}); correct it, or use another checkpoint"
        ) from error


def vocabulary_of(tokenizer: Any | None) -> dict[str, int] | None:
    """Return a tokenizer's map from tokens to ids, or None if there is no tokenizer."""
    return None if tokenizer is None else dict(tokenizer.get_vocab())


@dataclass(frozen=True)
class VocabularyCheck:
    """The relation of a draft's vocabulary to its target's."""

    relation: Literal["same", "padded", "different"]
    shared: int
    """Tokens with the same id in both."""
    target_tokens: int
    draft_tokens: int
    detail: str

    def require(self) -> None:
        """Raise if the draft cannot propose tokens to the target."""
        if self.relation == "different":
            raise VocabularyError(
                f"the draft's vocabulary is not the target's: {self.detail}; {self.shared:,} tokens are shared of "
                f"{self.target_tokens:,} (target) and {self.draft_tokens:,} (draft); "
                "use a draft with the target's tokenizer"
            )


def sizes_only_reason(target: object | None, draft: object | None) -> str:
    """Return why only sizes can be compared: a tokenizer (or its map or digest) is missing; empty if none is."""
    missing = [role for role, tokenizer in (("target", target), ("draft", draft)) if tokenizer is None]
    return f"sizes compared only, no tokenizer of the {' or the '.join(missing)}" if missing else ""


@cache
def warn_sizes_only(target: str, draft: str, reason: str) -> None:
    """Warn once for two models that only the sizes of their vocabularies were compared."""
    log.warning("the vocabularies of %s and %s are taken to be the same: %s", target, draft, reason)


def compare(
    target_vocab: dict[str, int] | None, draft_vocab: dict[str, int] | None, target_size: int, draft_size: int
) -> VocabularyCheck:
    """Compare two maps from tokens to ids and the sizes of the two embeddings.

    The relation is "same" for equal maps and "padded" if one map or embedding is longer at its end: the tail is
    never proposed. Without a map only the sizes are compared.
    """
    if target_vocab is None or draft_vocab is None:
        return _compare_sizes(target_size, draft_size, sizes_only_reason(target_vocab, draft_vocab))
    target_names = {index: token for token, index in target_vocab.items() if index < target_size}
    draft_names = {index: token for token, index in draft_vocab.items() if index < draft_size}
    common = target_names.keys() & draft_names.keys()
    clashes = sorted(index for index in common if target_names[index] != draft_names[index])
    only = sorted(target_names.keys() ^ draft_names.keys())
    counts = (len(common) - len(clashes), len(target_names), len(draft_names))
    if clashes:
        first = clashes[0]
        detail = f"id {first} is {target_names[first]!r} in the target and {draft_names[first]!r} in the draft"
        return VocabularyCheck("different", *counts, detail)
    if only and only[0] < max(common, default=0):
        owner = "target" if only[0] in target_names else "draft"
        return VocabularyCheck("different", *counts, f"id {only[0]} exists only in the {owner}")
    if not common or len(only) > max(LARGEST_TAIL, len(common) // 100):
        return VocabularyCheck("different", *counts, f"{len(only):,} tokens exist in one of them only")
    if only or target_size != draft_size:
        return VocabularyCheck(
            "padded",
            *counts,
            f"same map up to {len(common):,}, sizes {target_size:,} and {draft_size:,}; the tail is masked",
        )
    return VocabularyCheck("same", *counts, "same map")


def _compare_sizes(target_size: int, draft_size: int, reason: str) -> VocabularyCheck:
    """Compare vocabularies of which only the sizes are known."""
    if target_size == draft_size:
        return VocabularyCheck("same", target_size, target_size, draft_size, reason)
    return VocabularyCheck("different", 0, target_size, draft_size, f"sizes {target_size:,} and {draft_size:,}")
