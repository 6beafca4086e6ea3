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
    say_sizes_only,
    vocabulary_of,
    why_sizes_only,
)
from shallowdraft.shapes.shape import ModelShape

SAMPLED_VALUES = 2**20  # of a tensor, for the digest of a model in memory
SPOILER = "<0xFF>"  # as sentencepiece names it

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
    """What `load` returns and `generate` takes."""

    name: str
    decoder: Decoder = field(repr=False)
    tokenizer: Any | None = field(default=None, repr=False)
    stop_tokens: tuple[int, ...] = ()
    start_token: int = 0
    """What an encoder–decoder begins with."""
    checkpoint_digest: str = ""
    """Content of the folder it was loaded from; empty for a model that was made in memory."""
    _checks: "WeakKeyDictionary[Model, VocabularyCheck]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, it is loaded there from where it was loaded here."""
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
        """The same for the same weights, wherever they lie and whatever they are called."""
        return self.checkpoint_digest or _tensors_digest(self.decoder)

    @property
    def precision(self) -> str:
        """What its weights are read in: int8, or the dtype that it computes in."""
        return "int8" if self.decoder.packing == "bytes" else dtype_name(self.decoder.dtype)

    def encode(self, text: str) -> list[int]:
        """Text to token ids, with the special tokens that the tokenizer puts around a prompt."""
        _require_unicode(text)
        return list(self.require_tokenizer().encode(text))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation to token ids through the tokenizer's chat template, ready for the assistant's turn."""
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
        """Token ids to text without special tokens; empty where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def spoiler(self) -> int | None:
        """The token of a byte that no character has, where the tokenizer writes what it does not know as bytes."""
        if self.tokenizer is None:
            return None
        token = self.tokenizer.convert_tokens_to_ids(SPOILER)
        return token if token is not None and self.tokenizer.convert_ids_to_tokens(token) == SPOILER else None

    def save(self, folder: str | Path, *, int8: bool = False) -> None:
        """Write a Hugging Face folder: config, weights, tokenizer; `int8` rounds the weights, for us alone to read."""
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
        if self.tokenizer is None:
            raise VocabularyError(
                f"{self.name} has no tokenizer; put its files into the folder, or give token ids: "
                '--prompt-ids, or {"ids": [1, 2]} as a line of a file of prompts'
            )
        return self.tokenizer


def _tensors_digest(decoder: Decoder) -> str:
    """Digest of every tensor of a model that lies in no folder; of a large one, evenly spread values."""
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
    """Load a local folder or a hub id. By default float32 on a CPU and bfloat16 on CUDA, CUDA where there is one.

    Weights are made ready for decoding; `trainable` leaves them as they are. "int8" rounds them to 8 bits with a scale
    for each output; everything else stays float32 on a CPU, bfloat16 on CUDA.

    `parallel` splits the model over the processes of a torchrun; all of them must then make the same calls.
    """
    where = resolve_device(device)
    folder = find_folder(path)
    bytes_wanted = dtype == "int8"
    kind, split = resolve_dtype(None if bytes_wanted else dtype, where), Split()
    if parallel:
        if trainable:
            raise OptionError("a trainable model is sharded by the commands that train; load it without parallel")
        require_splittable(read_shape(folder), dtype)
        where = distributed.join(where)
        split = Split(distributed.rank(), distributed.processes())
    decoder = load_decoder(folder, dtype=kind, device=where, split=split)
    if bytes_wanted:
        _require_bytes(decoder)
    if not trainable:
        decoder.pack("bytes" if bytes_wanted else None)
    if not parallel:
        decoder.origin = str(path), "int8" if bytes_wanted else kind, where.type, trainable
    stops, start, digest = _stop_tokens(folder), _start_token(folder, decoder.shape), folder_digest(folder) or ""
    return Model(str(path), decoder, load_tokenizer(folder), stops, start, digest)


def _load_again(name: str, path: str, dtype: str | torch.dtype, device: str, trainable: bool) -> Model:
    return replace(load(path, dtype, device, trainable=trainable), name=name)


def _require_bytes(decoder: Decoder) -> None:
    """Refuse 8-bit weights where no kernel takes them."""
    if decoder.device.type == "cuda":
        if reason := fused.why_not(decoder.shape, decoder.dtype, decoder.device):
            raise OptionError(f"int8 is not for this model on a GPU: our kernels {reason}; use another dtype")
    elif best_packing(decoder.shape, decoder.dtype, decoder.device) != "panels":
        raise OptionError(f"{needs_of_bytes(decoder.shape)}; use another dtype")


def load_draft(
    path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Model:
    """Load a model that only proposes: its precision changes the speed, never the output.

    By default int8 on a CPU whose kernel takes it, elsewhere what `load` takes.
    """
    where = resolve_device(device)
    if dtype is None:
        shape = read_shape(find_folder(path))
        if rounded_by_default(shape, where):
            dtype = "int8"
        elif where.type == "cpu":
            _say_not_rounded(needs_of_bytes(shape))
    return load(path, dtype, where)


def rounded_by_default(shape: ModelShape, device: torch.device) -> bool:
    """Whether a draft of this shape has 8-bit weights unless another dtype is wanted."""
    return best_packing(shape, torch.float32, device) == "panels"


def needs_of_bytes(shape: ModelShape) -> str:
    """Say what 8-bit weights need on a CPU, and what this shape has of it."""
    return (
        f"int8 needs a CPU, gcc and heads whose width is a multiple of {cpu.lanes()}; these are {shape.head_dim} wide"
    )


@cache
def _say_not_rounded(reason: str) -> None:
    log.warning("the draft runs in float32: %s", reason)


def check_vocabulary(target: Model, draft: Model) -> VocabularyCheck:
    """Whether `draft` can propose tokens to `target`; compared once."""
    if draft not in target._checks:
        maps = vocabulary_of(target.tokenizer), vocabulary_of(draft.tokenizer)
        check = target._checks[draft] = compare(*maps, target.shape.vocab, draft.shape.vocab)
        if check.relation == "same" and (reason := why_sizes_only(*maps)):
            say_sizes_only(target.name, draft.name, reason)
    return target._checks[draft]


def resolve_device(device: str | torch.device | None) -> torch.device:
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
    """End-of-sequence ids."""
    found = _generation_field(folder, "eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(_token(folder, "eos_token_id", one) for one in ids)


def _start_token(folder: Path, shape: ModelShape) -> int:
    """What an encoder–decoder begins with; T5 with what pads."""
    if not shape.encoder:
        return 0
    found = ((name, _generation_field(folder, name)) for name in ("decoder_start_token_id", "pad_token_id"))
    return next((_token(folder, name, token, shape.vocab) for name, token in found if token is not None), 0)


def _token(folder: Path, name: str, token: Any, vocab: int = LIMITS["vocab"]) -> int:
    if type(token) is not int or not 0 <= token < vocab:
        raise CheckpointError(f"{folder}: {name} is {shortened(token)}, which is no token id; correct its config")
    return token


def _generation_field(folder: Path, name: str) -> Any:
    """generation_config.json, where chat models list their stop tokens, comes before config.json."""
    files = (folder / file for file in ("generation_config.json", "config.json"))
    found = (read_json(file).get(name) for file in files if file.is_file())
    return next((value for value in found if value is not None), None)
