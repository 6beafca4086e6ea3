"""GGUF files for llama.cpp, written with the `gguf` package: metadata, tokenizer and tensors under its names.

For rotary positions llama.cpp rotates neighbouring elements of a Llama's head, and Hugging Face element i with element
i + head_dim / 2. So the rows of a Llama's q and k are interleaved; those of a Qwen stay as they are.
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
from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.shape import ModelShape

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
_SPLITS = {  # the regular expression that splits text before BPE, and llama.cpp's name for it
    (_WORDS + r"|\s*[\r\n]+|\s+(?!\S)|\s+").format(numbers=numbers): name
    for numbers, name in ((r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2"))
}
_UNUSED_MERGE = "\u0120\u0120 \u0120\u0120"
"""A merge that never applies, since text begins as single characters. It stands for an empty list of merges, which
llama.cpp requires and a GGUF writer cannot write."""
ELSEWHERE = "export it with --engine transformers and give that folder to llama.cpp's own converter"


@dataclass(frozen=True)
class GgufTokenizer:
    """A byte-level BPE that llama.cpp implements."""

    folder: Path
    content: dict[str, Any]
    """The content of tokenizer.json."""
    split: str
    """llama.cpp's name for the way it splits text."""


class _AddedToken(TypedDict):
    """A token outside of the BPE vocabulary."""

    id: Count
    content: str
    special: bool


class _BpeModel(TypedDict):
    """The ids of the BPE's tokens."""

    vocab: dict[str, Count]


class _TokenizerFile(TypedDict):
    """The fields of tokenizer.json that are read here."""

    added_tokens: list[_AddedToken]
    model: _BpeModel


def require_gguf(shape: ModelShape) -> None:
    """Refuse a shape that this module cannot write."""
    if shape.window is not None and shape.window < shape.context:
        raise UnsupportedModelError(f"llama.cpp has no sliding window for {shape.family}; {ELSEWHERE}")


def read_tokenizer(folder: Path) -> GgufTokenizer:
    """Read the tokenizer of a folder; refuse one that llama.cpp does not implement."""
    path = folder / "tokenizer.json"
    content = read_json(path) if path.is_file() else {}
    try:
        split = _split_name(content)
    except (AttributeError, TypeError, ValueError):  # values of types that `tokenizers` does not write
        split = None
    if split is None:
        raise UnsupportedModelError(f"{folder}: its tokenizer is not one that GGUF export supports; {ELSEWHERE}")
    require_fields(content, _TokenizerFile, str(path), CheckpointError)
    return GgufTokenizer(folder, content, split)


def write_gguf(model: Model, tokenizer: GgufTokenizer, path: Path) -> None:
    """Write weights, metadata and tokenizer to one file."""
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
    """Yield the tensors under their names in GGUF; our fused tensors are split."""
    shape = model.shape
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.family], shape.layers)
    if shape.rope and shape.rope.kind == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(shape.rope, shape.head_dim)
    state = model.decoder.dense_state()
    for ours, parts in shape.layout().items():
        for part, tensor in zip(parts, state[ours].split([part.size[0] for part in parts]), strict=True):
            name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
            assert name, part.name
            yield name, _interleaved(part.name, tensor, shape)


def _interleaved(name: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Interleave the halves of every head in a Llama's q and k [heads * head_dim, d_model]."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
    if heads is None or shape.family not in ("llama", "mistral"):
        return tensor
    halves = tensor.reshape(heads, 2, shape.head_dim // 2, -1)  # biases are [heads * head_dim], here with one column
    return halves.transpose(1, 2).reshape(tensor.shape)


def _llama3_divisors(rope: Rope, head_dim: int) -> Tensor:
    """Return Llama 3's divisor of each rotary frequency: 1 for short wavelengths, `factor` for long ones."""
    wavelengths = 2 * pi * rope.theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    share = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    share = share.clamp(0, 1)
    return (1 / (share + (1 - share) / rope.factor)).float()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: GgufTokenizer, size: int) -> None:
    """Add the vocabulary; an id without a token is padding that no text has."""
    content = tokenizer.content
    added = {token["id"]: token for token in content["added_tokens"]}
    names = {index: token for token, index in content["model"]["vocab"].items()}
    names |= {index: token["content"] for index, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.split)
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([_token_type(index, names, added) for index in range(size)])
    merges = bool(content["model"].get("merges"))
    if not merges:
        writer.add_token_merges([_UNUSED_MERGE])
    try:
        special = gguf.SpecialVocab(tokenizer.folder, load_merges=merges, n_vocab=size)
        special.add_special_token.setdefault("bos", False)  # else llama.cpp adds one wherever Llama 3 has it
        special.add_to_gguf(writer, quiet=True)
    except Exception as error:  # `gguf` reads the tokenizer's files again, unchecked
        raise CheckpointError(f"{tokenizer.folder}: its tokenizer cannot be read ({first_line(error)})") from None


def _token_type(index: int, names: dict[int, str], added: dict[int, dict[str, object]]) -> gguf.TokenType:
    if index in added:
        return gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.NORMAL if index in names else gguf.TokenType.UNUSED


def _split_name(content: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for the way text is split; None if it has none, or if text is changed before."""
    pre_tokenizer, model = content.get("pre_tokenizer") or {}, content.get("model", {})
    *before, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    normalizer = content.get("normalizer") or {"type": "NFC"}
    if any(step.get("type") != "NFC" for step in normalizer.get("normalizers", [normalizer])):
        return None
    if model.get("type") != "BPE" or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True) != (not before) or len(before) > 1:
        return None
    name = _SPLITS.get(before[0].get("pattern", {}).get("Regex")) if before else "gpt-2"
    # With ignore_merges a word in the vocabulary is one token, without merging; llama.cpp does that for Llama 3 only.
    ignore_merges = bool(model.get("ignore_merges"))
    return name if ignore_merges == (name == "llama-bpe") else None
