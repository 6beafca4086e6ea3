"""Reading and writing of Hugging Face folders: config.json, safetensors (one file or shards), older .bin files.

All tensors are checked against the shape's layout before any weight is read, so that a broken folder fails at once.
"""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shallowdraft import files
from shallowdraft.errors import CheckpointError, OptionError, UnsupportedModelError, first_line
from shallowdraft.models import zoo
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.projection import round_to_int8
from shallowdraft.models.seq2seq import Seq2Seq
from shallowdraft.models.tensor_parallel import Split, SplitDecoder
from shallowdraft.models.vocabulary import SIDE_FILES
from shallowdraft.records import write_whole
from shallowdraft.shapes.shape import DTYPE_BYTES, ModelShape
from shallowdraft.shapes.tensors import Stored

SHORT_TEXT = 1024  # tokens of KV cache that must fit beside the weights for a model to be loaded

# Tensors that old checkpoints carry and that follow from the config.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
_SCALE = ".int8_scale"  # suffix of the scales [N] of a matrix of 8-bit integers [N, K]
_OTHER_FORMATS = ["*/*", "consolidated*"]  # of the same weights, in folders on the hub
_FLOATS = ("F32", "BF16", "F16", "F64", "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of a weight file that has not been read yet."""

    size: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]
    int8: bool = False
    """Whether it is stored as 8-bit integers with a scale for each row."""


def find_folder(name: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a zoo name, a local folder, or a hub id, which is downloaded unless it is cached.

    Without `weights` only the config and the tokenizer's files are downloaded.
    """
    if str(name).startswith(zoo.PREFIX):
        return zoo.folder(str(name))
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the weights")
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{text}: no such folder; give a folder with config.json and weights, or a hub id like org/name"
        )
    try:
        for pattern in ("*.safetensors", "*.bin") if weights else ("config.json",):
            allowed = [*SIDE_FILES, pattern]
            folder = Path(snapshot_download(text, allow_patterns=allowed, ignore_patterns=_OTHER_FORMATS))
            if any(folder.glob(pattern)):
                break
    except Exception as error:  # huggingface_hub raises a different class for each of a dozen causes
        reason = first_line(error)
        raise CheckpointError(
            f"{text}: no such folder, and the hub gave no such model ({reason}); "
            "check the name, the network and HF_TOKEN, or download it first"
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint folder."""
    try:
        return files.read_json(path, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; a checkpoint folder needs config.json and weights") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); copy the file again") from None


def read_shape(folder: Path) -> ModelShape:
    """Read the shape from a folder's config.json."""
    try:
        return ModelShape.from_config(read_json(folder / "config.json"))
    except (OptionError, UnsupportedModelError) as error:
        raise type(error)(f"{folder}: {error}") from None


def require_decoder_only(*names: str) -> None:
    """Refuse encoder–decoders, which few commands take, before anything is loaded."""
    for name in names:
        if read_shape(find_folder(name, weights=False)).encoder:
            raise OptionError(
                f"{name} is an encoder–decoder, which only generate and inspect take; name a decoder-only model"
            )


def check_folder(folder: Path) -> ModelShape:
    """Return the shape of a checkpoint after checking that all tensors exist in the right size; read no weight."""
    with _open_tensors(folder, read_shape(folder)) as (shape, tensors):
        _check(folder, shape, tensors)
    return shape


def has_int8_weights(folder: Path) -> bool:
    """Return whether the weights are stored in our 8-bit form, which no other engine reads."""
    with _open_tensors(folder, read_shape(folder)) as (_, tensors):
        return any(tensor.int8 for tensor in tensors.values())


def load_decoder(folder: Path, *, dtype: torch.dtype, device: torch.device, split: Split | None = None) -> Decoder:
    """Check and read a folder's weights into a decoder, or one process's share of them."""
    split = split or Split()
    with _open_tensors(folder, read_shape(folder)) as (shape, tensors), torch.inference_mode(False):
        _check(folder, shape, tensors)
        require_memory(
            _bytes_to_decode(split.part(shape), dtype), device, f"{folder.name} ({shape}, {dtype_name(dtype)})"
        )
        state = {
            name: torch.cat([split.cut(name, _read(folder, part, tensors)).to(device, dtype) for part in parts])
            for name, parts in shape.layout().items()
        }
    return assemble(shape, state, split)


def _bytes_to_decode(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of the weights, of a tied head's second, packed copy, and of a short text's KV cache."""
    name = dtype_name(dtype)
    head = shape.vocab * shape.embed_dim * DTYPE_BYTES[name] if shape.tied else 0
    return shape.weight_bytes(name) + head + shape.kv_bytes_per_token(name) * min(shape.context, SHORT_TEXT)


def assemble(shape: ModelShape, state: Mapping[str, Tensor], split: Split | None = None) -> Decoder:
    """Build a decoder from tensors that are named as in the shape's layout; nothing is copied."""
    split = split or Split()
    with torch.device("meta"):
        decoder = _empty(shape, split)
    full = dict(state) | ({"head.weight": split.cut("head.weight", state["embed.weight"])} if shape.tied else {})
    decoder.load_state_dict(full, assign=True)
    if shape.tied:
        decoder.tie()
    return decoder.requires_grad_(False).eval()


def _empty(shape: ModelShape, split: Split) -> Decoder:
    """Build a decoder of the class for this shape and split."""
    if shape.encoder:
        return Seq2Seq(shape)
    return SplitDecoder(shape, split) if split.ranks > 1 else Decoder(shape)


def save_decoder(
    decoder: Decoder, folder: Path, *, extra_config: Mapping[str, Any] | None = None, int8: bool = False
) -> None:
    """Write config.json and safetensors shards that transformers, vLLM and llama.cpp's converter read.

    With `int8` every matrix is rounded to 8-bit integers with a scale for each row: a quarter of the size of float32,
    and a format that only this package reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = decoder.dense_state()
    stored: dict[str, Tensor] = {}
    for name, parts in decoder.shape.layout().items():
        pieces = state[name].split([part.size[0] for part in parts])
        stored |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    if int8:
        stored = _in_int8(stored)
    try:
        save_torch_state_dict(stored, folder, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the weights cannot be written ({error}); is the disk full?") from None
    use_default_mode(*folder.glob("*.safetensors"))
    dtype = dtype_name(decoder.dtype)
    write_config(folder, decoder.shape.to_config() | {"dtype": dtype, "torch_dtype": dtype} | dict(extra_config or {}))


def use_default_mode(*paths: Path) -> None:
    """Give files the permissions that any new file has: safetensors makes its own readable by their owner only."""
    for path in paths:
        new = path.with_name(path.name + ".mode")
        new.touch()
        shutil.copymode(new, path)
        new.unlink()


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json in one step, as the last file: a folder that has it is complete."""
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _in_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices to 8-bit integers, with their scales beside them; keep vectors."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            stored[name] = tensor
            continue
        stored[name], scale = round_to_int8(tensor.float())
        stored[name + _SCALE] = scale.squeeze(1)
    return stored


@contextmanager
def _open_tensors(folder: Path, shape: ModelShape) -> Iterator[tuple[ModelShape, dict[str, _StoredTensor]]]:
    """Open a folder's weight files: the tensors by their Hugging Face names, and the shape corrected by them."""
    with ExitStack() as stack:
        tensors: dict[str, _StoredTensor] = {}
        for file in _weight_files(folder):
            tensors |= _safetensors(file, stack) if file.suffix == ".safetensors" else _pickled(file)
        if shape.family == "opt":
            tensors = {_full_name(name): tensor for name, tensor in tensors.items()}
        # Transformers 5 writes that every T5's head is tied; the head of T5 1.1, which has no scale, need not be.
        if shape.encoder and not shape.encoder.scaled and "lm_head.weight" in tensors:
            shape = replace(shape, tied=False)
        yield shape, tensors


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: safetensors before .bin, shards before a single file."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            weight_map = read_json(folder / index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{folder / index}: has no weight_map from tensors to files; copy it again")
            names = sorted(set(weight_map.values()))
            if paths := [name for name in names if not files.is_plain_name(name)]:
                raise CheckpointError(
                    f"{folder / index}: names {shortened(paths[0])}, which is not a file in this folder; copy it again"
                )
            shards = [folder / name for name in names]
            if absent := [file.name for file in shards if not file.is_file()]:
                raise CheckpointError(
                    f"{folder}: {', '.join(absent)[:200]} missing, named by {index}; complete the download"
                )
            return shards
        if (folder / single).is_file():
            return [folder / single]
    raise CheckpointError(
        f"{folder}: no model.safetensors, no pytorch_model.bin and no index of shards; complete the download"
    )


def _safetensors(file: Path, stack: ExitStack) -> dict[str, _StoredTensor]:
    """Open a safetensors file, which stays open as long as the stack, and return its tensors unread."""
    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: truncated or corrupt ({first_line(error)}); copy or download it again"
        ) from None
    tensors = {
        name: _StoredTensor(tuple(part.get_shape()), part.get_dtype(), lambda name=name: opened.get_tensor(name))  # type: ignore[misc]
        for name, part in ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (no mapping)
    }
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_SCALE)}
    for name in tensors.keys() & {scale.removesuffix(_SCALE) for scale in scales}:
        tensors[name] = _dequantised(tensors[name], scales[name + _SCALE])
    return tensors


def _dequantised(integers: _StoredTensor, scale: _StoredTensor) -> _StoredTensor:
    """Return a tensor that is read as 8-bit integers times the scales of their rows."""
    return _StoredTensor(integers.size, scale.dtype, lambda: integers.read() * scale.read()[:, None], int8=True)


def _pickled(file: Path) -> dict[str, _StoredTensor]:
    """Open an older .bin file and return its tensors, memory-mapped where possible."""
    zipped = zipfile.is_zipfile(file)  # only torch's newer format can be memory-mapped
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # the unpickler raises anything on a corrupt file
        raise CheckpointError(
            f"{file}: not readable as plain tensors ({first_line(error)}); copy it again or convert it to safetensors"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file}: holds no map from names to tensors; convert it to safetensors")
    return {name: _StoredTensor(tuple(t.shape), str(t.dtype), lambda t=t: t) for name, t in tensors.items()}  # type: ignore[misc]


def _full_name(name: str) -> str:
    """Return the name of an OPT tensor: early checkpoints have `decoder.…` instead of `model.decoder.…`."""
    return f"model.{name}" if name.startswith("decoder.") else name


def _check(folder: Path, shape: ModelShape, tensors: Mapping[str, _StoredTensor]) -> None:
    """Refuse missing tensors, other sizes and dtypes than we read, and tensors that the shape does not have."""
    sizes = {part.name: part.size for part in shape.stored()}
    if missing := [name for name in sizes if name not in tensors]:
        raise CheckpointError(
            f"{folder}: {_first_of(missing)} missing; the weights do not belong to this config.json ({shape})"
        )
    for name, size in sizes.items():
        if tensors[name].size != size:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensors[name].size)}, config.json says {list(size)}; "
                "take config.json and weights from the same model"
            )
        if tensors[name].dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{folder}: {name} is stored as {tensors[name].dtype}; "
                "use the float32, bf16 or fp16 checkpoint it was made from"
            )
    expected = sizes.keys() | shape.spare()
    if unknown := [name for name in tensors if name not in expected and not name.endswith(_DERIVED_SUFFIXES)]:
        raise CheckpointError(
            f"{folder}: {_first_of(unknown)} not part of a {shape.family} model; "
            "the weights do not belong to this config.json, or hold an adapter to be merged first"
        )


def _first_of(names: list[str]) -> str:
    """Name the first tensor and count the others."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


def _read(folder: Path, part: Stored, tensors: Mapping[str, _StoredTensor]) -> Tensor:
    """Read one tensor."""
    try:
        return tensors[part.name].read()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: {part.name} cannot be read ({first_line(error)}); copy or download it again"
        ) from None
