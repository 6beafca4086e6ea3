"""A loaded model: decoder, tokenizer and stop tokens."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shallowdraft import distributed
from shallowdraft.errors import CheckpointError, OptionError, PromptError, VocabularyError
from shallowdraft.identity import DIGITS, folder_digest
from shallowdraft.kernels import cpu
from shallowdraft.limits import LIMITS
from shallowdraft.models import fused, templates
from shallowdraft.models.checkpoint import find_folder, load_decoder, read_json, read_shape, save_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.memory import dtype_name
from shallowdraft.models.projection import best_packing
from shallowdraft.models.tensor_parallel import Split, require_splittable
from shallowdraft.models.vocabulary import (
    VocabularyCheck,
    compare,
    load_tokenizer,
    save_tokenizer,
    sizes_only_reason,
    vocabulary_of,
    warn_sizes_only,
)
from shallowdraft.shapes.shape import ModelShape

SAMPLED_VALUES = 2**20  # of each tensor, at most, for the digest of a model in memory
INVALID_BYTE = "<0xFF>"  # sentencepiece's name of the token of a byte that never occurs in UTF-8

log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder with its tokenizer and stop tokens, as `load` returns it."""

    name: str
    decoder: Decoder = field(repr=False)
    tokenizer: Any | None = field(default=None, repr=False)
    stop_tokens: tuple[int, ...] = ()
    start_token: int = 0
    """First token of an encoder–decoder's output."""
    checkpoint_digest: str = ""
    """Digest of the folder that it was loaded from; empty for a model made in memory."""
    _checks: "WeakKeyDictionary[Model, VocabularyCheck]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `load`: another process loads the model again."""
        if self.decoder.origin is None:
            raise OptionError(f"{self.name} is in no checkpoint that other processes can load; save it first")
        return _load_again, (self.name, *self.decoder.origin)

    @property
    def shape(self) -> ModelShape:
        return self.decoder.shape

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def digest(self) -> str:
        """Digest of the content: the same for the same weights, whatever their path or name."""
        return self.checkpoint_digest or _tensors_digest(self.decoder)

    @property
    def precision(self) -> str:
        """Precision of the weights: int8, or the name of the dtype that the model computes in."""
        return "int8" if self.decoder.packing == "int8" else dtype_name(self.decoder.dtype)

    def encode(self, text: str) -> list[int]:
        """Encode text to token ids, with the special tokens that the tokenizer puts around a prompt."""
        _require_unicode(text)
        return list(self.require_tokenizer().encode(text))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode a conversation with the tokenizer's chat template, up to where the assistant's turn begins."""
        tokenizer = self.require_tokenizer()
        if not tokenizer.chat_template:
            raise PromptError(
                f"{self.name} has no chat template; give the prompt as plain text, or serve it with --chat-template"
            )
        for message in messages:
            _require_unicode(message["content"])
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise PromptError(f"{self.name}: {error}") from None
        text = templates.render(template, messages, tokenizer.special_tokens_map)
        _require_unicode(text)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text without special tokens; the text is empty if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def invalid_byte_token(self) -> int | None:
        """Token of a byte that no character contains, if the tokenizer falls back to tokens of bytes."""
        if self.tokenizer is None:
            return None
        token = self.tokenizer.convert_tokens_to_ids(INVALID_BYTE)
        return token if token is not None and self.tokenizer.convert_ids_to_tokens(token) == INVALID_BYTE else None

    def save(self, folder: str | Path, *, int8: bool = False) -> None:
        """Write a Hugging Face folder: config, weights, tokenizer. Only this package reads the `int8` form."""
        stops: list[int] = list(self.stop_tokens)
        extra = {
            "bos_token_id": getattr(self.tokenizer, "bos_token_id", None),
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            "pad_token_id": getattr(self.tokenizer, "pad_token_id", None),
        }
        if self.shape.encoder:
            extra |= {"decoder_start_token_id": self.start_token, "pad_token_id": extra["pad_token_id"] or 0}
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, Path(folder))
        save_decoder(self.decoder, Path(folder), extra_config=extra, int8=int8)

    def require_tokenizer(self) -> Any:
        """Return the tokenizer, or raise if there is none."""
        if self.tokenizer is None:
            raise VocabularyError(
                f"{self.name} has no tokenizer; put its files into the folder, or give token ids: "
                '--prompt-ids, or {"ids": [1, 2]} as a line of a file of prompts'
            )
        return self.tokenizer


def _tensors_digest(decoder: Decoder) -> str:
    """Return a digest of every tensor of a model made in memory; of large tensors, of evenly spread values."""
    digest = hashlib.sha256(str(decoder.shape).encode())
    for name, tensor in decoder.dense_state().items():
        step = max(1, tensor.numel() // SAMPLED_VALUES)
        digest.update(name.encode() + tensor.detach().flatten()[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError("the prompt is not valid Unicode; give UTF-8 text") from None


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    trainable: bool = False,
    parallel: bool = False,
) -> Model:
    """Load a zoo name, a local folder or a hub id; by default to CUDA, if there is a GPU.

    The default dtype is float32 on a CPU and bfloat16 on CUDA. "int8" rounds the weights to 8-bit integers with a scale
    for each output; everything else has the default dtype. Weights are packed for decoding, unless `trainable`.

    `parallel` splits the model over the processes of a torchrun; all of them must then make the same calls.
    """
    resolved = resolve_device(device)
    folder = find_folder(path)
    int8 = dtype == "int8"
    float_dtype, split = resolve_dtype(None if int8 else dtype, resolved), Split()
    if parallel:
        if trainable:
            raise OptionError("a trainable model is sharded by the commands that train; load it without parallel")
        require_splittable(read_shape(folder), dtype)
        resolved = distributed.join(resolved)
        split = Split(distributed.rank(), distributed.processes())
    decoder = load_decoder(folder, dtype=float_dtype, device=resolved, split=split)
    if int8:
        _require_int8_support(decoder)
    if not trainable:
        decoder.pack("int8" if int8 else None)
    if not parallel:
        decoder.origin = str(path), "int8" if int8 else float_dtype, resolved.type, trainable
    stops, start, digest = _stop_tokens(folder), _start_token(folder, decoder.shape), folder_digest(folder) or ""
    return Model(str(path), decoder, load_tokenizer(folder), stops, start, digest)


def _load_again(name: str, path: str, dtype: str | torch.dtype, device: str, trainable: bool) -> Model:
    return replace(load(path, dtype, device, trainable=trainable), name=name)


def _require_int8_support(decoder: Decoder) -> None:
    """Raise if no kernel reads 8-bit weights of this model on its device."""
    if decoder.device.type == "cuda":
        if reason := fused.unsupported_reason(decoder.shape, decoder.dtype, decoder.device):
            raise OptionError(f"int8 is not supported for this model on a GPU: our kernels {reason}; use another dtype")
    elif best_packing(decoder.shape, decoder.dtype, decoder.device) != "panels":
        raise OptionError(f"{int8_requirements(decoder.shape)}; use another dtype")


def load_draft(
    path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Model:
    """Load a draft: its precision changes the speed, never the output.

    The default dtype is int8 on a CPU if the kernel supports the model, otherwise that of `load`.
    """
    resolved = resolve_device(device)
    if dtype is None:
        shape = read_shape(find_folder(path))
        if int8_by_default(shape, resolved):
            dtype = "int8"
        elif resolved.type == "cpu":
            _warn_float32_draft(int8_requirements(shape))
    return load(path, dtype, resolved)


def int8_by_default(shape: ModelShape, device: torch.device) -> bool:
    """Return whether a draft of this shape has 8-bit weights by default."""
    return best_packing(shape, torch.float32, device) == "panels"


def int8_requirements(shape: ModelShape) -> str:
    """Describe what 8-bit weights need on a CPU, and the head width of this shape."""
    return (
        f"int8 needs a CPU, gcc and heads whose width is a multiple of {cpu.lanes()}; these are {shape.head_dim} wide"
    )


@cache
def _warn_float32_draft(reason: str) -> None:
    log.warning("the draft runs in float32: %s", reason)


def check_vocabulary(target: Model, draft: Model) -> VocabularyCheck:
    """Compare the vocabularies of target and draft; the result is kept for the next call."""
    if draft not in target._checks:
        maps = vocabulary_of(target.tokenizer), vocabulary_of(draft.tokenizer)
        check = target._checks[draft] = compare(*maps, target.shape.vocab, draft.shape.vocab)
        if check.relation == "same" and (reason := sizes_only_reason(*maps)):
            warn_sizes_only(target.name, draft.name, reason)
    return target._checks[draft]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device that an option names, by default CUDA if there is a GPU; raise for unusable ones."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise OptionError(f"device {str(device)!r} is unknown; use cpu, cuda or cuda:N") from None
    if resolved.type not in ("cpu", "cuda"):
        raise OptionError(f"device {str(device)!r} is not supported; use cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device {str(device)!r} is not there; this machine has {torch.cuda.device_count()} CUDA GPUs"
        )
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype that an option names, by default bfloat16 on CUDA and float32 on a CPU."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise OptionError(f"dtype {dtype!r} is unknown; use float32, bfloat16, float16 or int8")
        return _DTYPES[dtype]
    if dtype not in _DTYPES.values():
        raise OptionError(f"dtype {dtype} is not supported; use float32, bfloat16 or float16")
    return dtype


def _stop_tokens(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids: one, a list, or none."""
    field = _generation_field(folder, "eos_token_id")
    ids = field if isinstance(field, list) else [] if field is None else [field]
    return tuple(_token(folder, "eos_token_id", token) for token in ids)


def _start_token(folder: Path, shape: ModelShape) -> int:
    """Read the first token of an encoder–decoder's output; T5 begins with the padding token."""
    if not shape.encoder:
        return 0
    for name in ("decoder_start_token_id", "pad_token_id"):
        token = _generation_field(folder, name)
        if token is not None:
            return _token(folder, name, token, shape.vocab)
    return 0


def _token(folder: Path, name: str, token: Any, vocab: int = LIMITS["vocab"]) -> int:
    """Return a token id of a config after checking it."""
    if type(token) is not int or not 0 <= token < vocab:
        raise CheckpointError(f"{folder}: {name} is {shortened(token)}, which is not a token id; correct its config")
    return token


def _generation_field(folder: Path, name: str) -> Any:
    """Read a field from generation_config.json, where chat models list their stop tokens, or else from config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        if file.is_file() and (value := read_json(file).get(name)) is not None:
            return value
    return None
