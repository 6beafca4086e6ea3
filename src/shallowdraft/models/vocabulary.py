"""Tokenizers, and whether a draft speaks its target's vocabulary."""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal

from shallowdraft.errors import CheckpointError, UnsupportedModelError, VocabularyError, first_line
from shallowdraft.files import LARGEST_TEXT, read_json, require_regular

log = logging.getLogger(__name__)

LARGEST_TAIL = 1024  # tokens that one map may have beyond the other: special tokens added later
SIDE_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Of a checkpoint, beside its weights."""
_NEVER_OPENED = ("special_tokens_map_file",)  # many a tokenizer_config.json has its author's path there
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # what transformers calls it
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None where it has none; code from a checkpoint is never run."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    _require_own_files(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exceptions of transformers, panics of tokenizers
        _require_config(folder)
        raise VocabularyError(
            f"{folder}: the tokenizer cannot be loaded ({first_line(error)}); copy its files again"
        ) from error
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True  # as if it were said: lengths are checked here
    return tokenizer


def _require_own_files(folder: Path) -> None:
    """Refuse what transformers would hang on, or read from elsewhere because a file of the checkpoint says so."""
    for file in (file for ending in SIDE_FILES for file in folder.glob(ending)):
        require_regular(file, VocabularyError)
        if file.is_file() and file.stat().st_size > LARGEST_TEXT:
            raise VocabularyError(f"{file}: larger than {LARGEST_TEXT:,} bytes, as no file of a tokenizer is")
    settings = folder / "tokenizer_config.json"
    given = read_json(settings, VocabularyError) if settings.is_file() else {}
    for key, value in given.items():
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
    """Raise with transformers' own reason where it refuses the config, which it reads to know the tokenizer's kind."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a config makes it raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UnsupportedModelError(
            f"{folder}: transformers refuses config.json ({reason}); mend it, or take another checkpoint"
        ) from error


def vocabulary_of(tokenizer: Any | None) -> dict[str, int] | None:
    """Token -> id, or None where there is no tokenizer."""
    return None if tokenizer is None else dict(tokenizer.get_vocab())


@dataclass(frozen=True)
class VocabularyCheck:
    """How a draft's vocabulary relates to its target's."""

    relation: Literal["same", "padded", "different"]
    shared: int
    """Tokens that have the same id in both."""
    target_tokens: int
    draft_tokens: int
    detail: str

    def require(self) -> None:
        if self.relation == "different":
            raise VocabularyError(
                f"the draft's vocabulary is not the target's: {self.detail}; {self.shared:,} tokens are shared of "
                f"{self.target_tokens:,} (target) and {self.draft_tokens:,} (draft); "
                "use a draft with the target's tokenizer"
            )


def why_sizes_only(target: object | None, draft: object | None) -> str:
    """The reason that only sizes can be compared, if a tokenizer or what stands for it is missing."""
    missing = [role for role, there in (("target", target), ("draft", draft)) if there is None]
    return f"sizes compared only, no tokenizer of the {' or the '.join(missing)}" if missing else ""


@cache
def say_sizes_only(target: str, draft: str, reason: str) -> None:
    """Say once of two models how little is known of their vocabularies."""
    log.warning("the vocabularies of %s and %s are taken to be the same: %s", target, draft, reason)


def compare(
    target_vocab: dict[str, int] | None, draft_vocab: dict[str, int] | None, target_size: int, draft_size: int
) -> VocabularyCheck:
    """Compare two token -> id maps and the sizes of the two embeddings.

    Same map: accepted. Same map but one embedding or map is longer at its end: padded, the tail is never proposed.
    """
    if target_vocab is None or draft_vocab is None:
        same = target_size == draft_size
        shared = target_size if same else 0
        sizes = f"sizes {target_size:,} and {draft_size:,}"
        detail = why_sizes_only(target_vocab, draft_vocab) if same else sizes
        return VocabularyCheck("same" if same else "different", shared, target_size, draft_size, detail)
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
