"""GGUF files for llama.cpp, through the `gguf` package: metadata, tokenizer, tensors by its names.

llama.cpp turns neighbours where Hugging Face turns halves of a head, so the rows of Llama's q and k are interleaved;
it keeps Qwen's as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any, TypedDict

import gguf
import torch
from torch import Tensor

from shallowdraft.errors import CheckpointError, UnsupportedModelError, first_line
from shallowdraft.files import Count, path_in_errors, require_fields
from shallowdraft.models.checkpoint import read_json
from shallowdraft.models.model import Model
from shallowdraft.shapes import ModelShape, Rope

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
_SPLITS = {  # how text is split before BPE, and llama.cpp's name for it
    (_WORDS + r"|\s*[\r\n]+|\s+(?!\S)|\s+").format(numbers=numbers): name
    for numbers, name in ((r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2"))
}
_NEVER = "\u0120\u0120 \u0120\u0120"
"""A merge of two symbols that no text begins as, which says that there is no merge: llama.cpp wants a list of them, and
GGUF writers take no empty one."""
ELSEWHERE = "export it with --engine transformers and give that folder to llama.cpp's own converter"


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE that llama.cpp knows."""

    folder: Path
    content: dict[str, Any]
    """Of tokenizer.json."""
    split: str
    """llama.cpp's name for how it splits text."""


class _Added(TypedDict):
    id: Count
    content: str
    special: bool


class _Merged(TypedDict):
    vocab: dict[str, Count]


class _Content(TypedDict):
    """What is read of tokenizer.json."""

    added_tokens: list[_Added]
    model: _Merged


def require_gguf(shape: ModelShape) -> None:
    """Refuse a model that this module does not write, before any work."""
    if shape.window is not None and shape.window < shape.context:
        raise UnsupportedModelError(f"llama.cpp has no sliding window for {shape.family}; {ELSEWHERE}")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Of a folder, unless GGUF cannot say what it does to text."""
    path = folder / "tokenizer.json"
    content = read_json(path) if path.is_file() else {}
    try:
        split = _split(content)
    except (AttributeError, TypeError, ValueError):  # of other types than tokenizers writes
        split = None
    if split is None:
        raise UnsupportedModelError(f"{folder}: its tokenizer is none that this writes to GGUF; {ELSEWHERE}")
    require_fields(content, _Content, str(path), CheckpointError)
    return Tokenizer(folder, content, split)


def write_gguf(model: Model, tokenizer: Tokenizer, path: Path) -> None:
    """One file with everything."""
    shape = model.shape
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[shape.family]])
    _add_shape(writer, shape)
    kind, file_type = _TYPES[model.decoder.dtype]
    writer.add_file_type(file_type)
    _add_tokenizer(writer, tokenizer, shape.vocab)
    for name, tensor in _tensors(model):
        stored = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else kind
        writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), stored), raw_dtype=stored)
    with path_in_errors(path):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_shape(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_rope_dimension_count(shape.head_dim)
    assert shape.rope
    writer.add_rope_freq_base(shape.rope.theta)
    if shape.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope.factor)


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    shape = model.shape
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.family], shape.layers)
    if shape.rope and shape.rope.kind == "llama3":
        yield "rope_freqs.weight", _slowed(shape.rope, shape.head_dim)
    state = model.decoder.dense_state()
    for ours, parts in shape.layout().items():
        for part, tensor in zip(parts, state[ours].split([part.size[0] for part in parts]), strict=True):
            name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
            assert name, part.name
            yield name, _interleaved(part.name, tensor, shape)


def _interleaved(name: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Llama's q and k: of every head the halves, row by row."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
    if heads is None or shape.family not in ("llama", "mistral"):
        return tensor
    halves = tensor.reshape(heads, 2, shape.head_dim // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape)


def _slowed(rope: Rope, head_dim: int) -> Tensor:
    """By what Llama 3 divides each frequency: nothing where waves are short, `factor` where they are long."""
    lengths = 2 * pi * rope.theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    share = (rope.original_context / lengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 / (share + (1 - share) / rope.factor)).float()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    """Ids without a token are padding that is never matched."""
    content = tokenizer.content
    added = {one["id"]: one for one in content["added_tokens"]}
    names = {index: token for token, index in content["model"]["vocab"].items()}
    names |= {index: one["content"] for index, one in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.split)
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([_kind(index, names, added) for index in range(size)])
    merges = bool(content["model"].get("merges"))
    if not merges:
        writer.add_token_merges([_NEVER])
    try:
        special = gguf.SpecialVocab(tokenizer.folder, load_merges=merges, n_vocab=size)
        special.add_special_token.setdefault("bos", False)  # llama.cpp would add one where Llama 3 has it
        special.add_to_gguf(writer, quiet=True)
    except Exception as error:  # it reads the tokenizer's files again, and trusts them
        raise CheckpointError(f"{tokenizer.folder}: its tokenizer cannot be read ({first_line(error)})") from None


def _kind(index: int, names: dict[int, str], added: dict[int, dict[str, object]]) -> gguf.TokenType:
    if index in added:
        return gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.NORMAL if index in names else gguf.TokenType.UNUSED


def _split(content: dict[str, Any]) -> str | None:
    """llama.cpp's name for how text is split; None where it is changed before, or split as nothing there does."""
    steps, model = content.get("pre_tokenizer") or {}, content.get("model", {})
    *before, last = steps.get("pretokenizers") or [steps]
    normalizer = content.get("normalizer") or {"type": "NFC"}
    if any(one.get("type") != "NFC" for one in normalizer.get("normalizers", [normalizer])):
        return None
    if model.get("type") != "BPE" or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True) != (not before) or len(before) > 1:
        return None
    name = _SPLITS.get(before[0].get("pattern", {}).get("Regex")) if before else "gpt-2"
    whole_words = bool(model.get("ignore_merges"))  # are taken as they are; llama.cpp does so for Llama 3 alone
    return name if whole_words == (name == "llama-bpe") else None
