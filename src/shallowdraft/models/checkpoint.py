"""Hugging Face folders in and out: config.json, safetensors (one file or shards), older .bin files.

Everything is checked against the shape's layout before any weight is read, so that a broken folder fails at once.
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
from shallowdraft.models.seq2seq import Seq2Seq
from shallowdraft.models.tensor_parallel import Split, SplitDecoder
from shallowdraft.models.vocabulary import SIDE_FILES
from shallowdraft.records import write_whole
from shallowdraft.shapes.shape import DTYPE_BYTES, ModelShape
from shallowdraft.shapes.tensors import Stored

SHORT_TEXT = 1024  # tokens of cache that a model is checked for before it is loaded

# Tensors that old checkpoints carry and that follow from the config.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
_SCALE = ".int8_scale"  # beside a matrix of 8-bit integers: what each row is multiplied by
_ELSEWHERE = ["*/*", "consolidated*"]  # other formats of the same weights
_FLOATS = ("F32", "BF16", "F16", "F64", "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


@dataclass(frozen=True)
class _Source:
    """A tensor that can be read when it is wanted."""

    size: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]
    rounded: bool = False
    """Stored in 8 bits with a scale a row."""


def find_folder(name: str | Path, *, weights: bool = True) -> Path:
    """A zoo name, a local folder as it is, or a hub id through huggingface_hub's cache; works offline once cached."""
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
        for wanted in ("*.safetensors", "*.bin") if weights else ("config.json",):
            folder = Path(snapshot_download(text, allow_patterns=[*SIDE_FILES, wanted], ignore_patterns=_ELSEWHERE))
            if any(folder.glob(wanted)):
                break
    except Exception as error:  # huggingface_hub raises a different class for each of a dozen causes
        reason = first_line(error)
        raise CheckpointError(
            f"{text}: no such folder, and the hub gave no such model ({reason}); "
            "check the name, the network and HF_TOKEN, or download it first"
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; a checkpoint folder needs config.json and weights") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); copy the file again") from None


def read_shape(folder: Path) -> ModelShape:
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
    """The shape of a checkpoint whose tensors are all there and of the right size; no weight is read."""
    with _sources(folder, read_shape(folder)) as (shape, sources):
        _check(folder, shape, sources)
    return shape


def is_for_us_alone(folder: Path) -> bool:
    """Whether the weights lie there in 8 bits, which no other engine reads."""
    with _sources(folder, read_shape(folder)) as (_, sources):
        return any(source.rounded for source in sources.values())


def load_decoder(folder: Path, *, dtype: torch.dtype, device: torch.device, split: Split | None = None) -> Decoder:
    """Read and check a folder's weights into a decoder, or one process's share of them."""
    split = split or Split()
    with _sources(folder, read_shape(folder)) as (shape, sources), torch.inference_mode(False):
        _check(folder, shape, sources)
        require_memory(
            _bytes_to_decode(split.part(shape), dtype), device, f"{folder.name} ({shape}, {dtype_name(dtype)})"
        )
        state = {
            name: torch.cat([split.cut(name, _read(folder, part, sources)).to(device, dtype) for part in parts])
            for name, parts in shape.layout().items()
        }
    return assemble(shape, state, split)


def _bytes_to_decode(shape: ModelShape, dtype: torch.dtype) -> int:
    """Weights, a tied head's second, packed copy, and the cache of a short text."""
    name = dtype_name(dtype)
    head = shape.vocab * shape.embed_dim * DTYPE_BYTES[name] if shape.tied else 0
    return shape.weight_bytes(name) + head + shape.kv_bytes_per_token(name) * min(shape.context, SHORT_TEXT)


def assemble(shape: ModelShape, state: Mapping[str, Tensor], split: Split | None = None) -> Decoder:
    """A decoder over the given tensors, named as in the shape's layout; nothing is copied."""
    split = split or Split()
    with torch.device("meta"):
        decoder = _empty(shape, split)
    full = dict(state) | ({"head.weight": split.cut("head.weight", state["embed.weight"])} if shape.tied else {})
    decoder.load_state_dict(full, assign=True)
    if shape.tied:
        decoder.tie()
    return decoder.requires_grad_(False).eval()


def _empty(shape: ModelShape, split: Split) -> Decoder:
    if shape.encoder:
        return Seq2Seq(shape)
    return SplitDecoder(shape, split) if split.ranks > 1 else Decoder(shape)


def save_decoder(
    decoder: Decoder, folder: Path, *, extra_config: Mapping[str, Any] | None = None, int8: bool = False
) -> None:
    """Write config.json and safetensors shards that transformers, vLLM and llama.cpp's converter read.

    With `int8` every matrix is rounded to 8 bits, with a scale a row: a quarter of the size, for us alone to read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = decoder.dense_state()
    stored: dict[str, Tensor] = {}
    for name, parts in decoder.shape.layout().items():
        pieces = state[name].split([part.size[0] for part in parts])
        stored |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    if int8:
        stored = dict(item for name, tensor in stored.items() for item in _rounded(name, tensor))
    try:
        save_torch_state_dict(stored, folder, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the weights cannot be written ({error}); is the disk full?") from None
    set_usual_mode(*folder.glob("*.safetensors"))
    dtype = dtype_name(decoder.dtype)
    write_config(folder, decoder.shape.to_config() | {"dtype": dtype, "torch_dtype": dtype} | dict(extra_config or {}))


def set_usual_mode(*files: Path) -> None:
    """That of any new file: safetensors writes its own so that only their owner can read them."""
    for file in files:
        new = file.with_name(file.name + ".mode")
        new.touch()
        shutil.copymode(new, file)
        new.unlink()


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, whole; it comes last: a folder with it is complete."""
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _rounded(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.dim() < 2:
        yield name, tensor
        return
    scale = tensor.float().abs().amax(1).clamp(min=1e-12) / 127
    yield name, (tensor.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    yield name + _SCALE, scale


@contextmanager
def _sources(folder: Path, shape: ModelShape) -> Iterator[tuple[ModelShape, dict[str, _Source]]]:
    """Every tensor of a folder by its Hugging Face name, unread; the shape as they have it."""
    with ExitStack() as stack:
        sources: dict[str, _Source] = {}
        for file in _weight_files(folder):
            sources |= _safetensors(file, stack) if file.suffix == ".safetensors" else _pickled(file)
        if shape.family == "opt":
            sources = {_full_name(name): source for name, source in sources.items()}
        # Transformers 5 writes that every T5's head is tied; that of T5 1.1, which has no scale, need not be.
        if shape.encoder and not shape.encoder.scaled and "lm_head.weight" in sources:
            shape = replace(shape, tied=False)
        yield shape, sources


def _weight_files(folder: Path) -> list[Path]:
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
                    f"{folder / index}: names {shortened(paths[0])}, which is no file of this folder; copy it again"
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


def _safetensors(file: Path, stack: ExitStack) -> dict[str, _Source]:
    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: truncated or corrupt ({first_line(error)}); copy or download it again"
        ) from None
    sources = {
        name: _Source(tuple(part.get_shape()), part.get_dtype(), lambda name=name: opened.get_tensor(name))  # type: ignore[misc]
        for name, part in ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (no mapping)
    }
    scales = {name: sources.pop(name) for name in list(sources) if name.endswith(_SCALE)}
    for name in sources.keys() & {scale.removesuffix(_SCALE) for scale in scales}:
        sources[name] = _dequantised(sources[name], scales[name + _SCALE])
    return sources


def _dequantised(rounded: _Source, scale: _Source) -> _Source:
    return _Source(rounded.size, scale.dtype, lambda: rounded.read() * scale.read()[:, None], rounded=True)


def _pickled(file: Path) -> dict[str, _Source]:
    zipped = zipfile.is_zipfile(file)  # only torch's newer format can be memory-mapped
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # junk makes the unpickler fail in any way it likes
        raise CheckpointError(
            f"{file}: not readable as plain tensors ({first_line(error)}); copy it again or convert it to safetensors"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file}: holds no map from names to tensors; convert it to safetensors")
    return {name: _Source(tuple(t.shape), str(t.dtype), lambda t=t: t) for name, t in tensors.items()}  # type: ignore[misc]


def _full_name(name: str) -> str:
    """The first OPT checkpoints name their tensors `decoder.…` rather than `model.decoder.…`."""
    return f"model.{name}" if name.startswith("decoder.") else name


def _check(folder: Path, shape: ModelShape, sources: Mapping[str, _Source]) -> None:
    wanted = {part.name: part.size for part in shape.stored()}
    if missing := [name for name in wanted if name not in sources]:
        raise CheckpointError(
            f"{folder}: {_some(missing)} missing; the weights do not belong to this config.json ({shape})"
        )
    for name, size in wanted.items():
        if sources[name].size != size:
            raise CheckpointError(
                f"{folder}: {name} is {list(sources[name].size)}, config.json says {list(size)}; "
                "take config.json and weights from the same model"
            )
        if sources[name].dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{folder}: {name} is stored as {sources[name].dtype}; "
                "use the float32, bf16 or fp16 checkpoint it was made from"
            )
    known = wanted.keys() | shape.spare()
    if unknown := [n for n in sources if n not in known and not n.endswith(_DERIVED_SUFFIXES)]:
        raise CheckpointError(
            f"{folder}: {_some(unknown)} not part of a {shape.family} model; "
            "the weights do not belong to this config.json, or hold an adapter to be merged first"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


def _read(folder: Path, part: Stored, sources: Mapping[str, _Source]) -> Tensor:
    try:
        return sources[part.name].read()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: {part.name} cannot be read ({first_line(error)}); copy or download it again"
        ) from None
