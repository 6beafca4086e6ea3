"""The most that a model may be, several times the largest there are: more would fill any memory."""

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from shallowdraft.errors import UnsupportedModelError

MOST_HEADS = 16  # Medusa's: how far they guess beyond the next token
LIMITS = {  # by field of a ModelShape
    "layers": 2**12,
    "d_model": 2**18,
    "heads": 2**12,
    "kv_heads": 2**12,
    "head_dim": 2**14,
    "ffn": 2**20,
    "vocab": 2**24,
    "context": 2**26,
    "window": 2**26,
    "embed_dim": 2**18,
}
_SIZES = {  # by field of a config.json: whole numbers from 1 up
    "num_hidden_layers": LIMITS["layers"],
    "num_layers": LIMITS["layers"],
    "num_decoder_layers": LIMITS["layers"],
    "hidden_size": LIMITS["d_model"],
    "d_model": LIMITS["d_model"],
    "word_embed_proj_dim": LIMITS["embed_dim"],
    "num_attention_heads": LIMITS["heads"],
    "num_heads": LIMITS["heads"],
    "num_key_value_heads": LIMITS["kv_heads"],
    "head_dim": LIMITS["head_dim"],
    "d_kv": LIMITS["head_dim"],
    "intermediate_size": LIMITS["ffn"],
    "ffn_dim": LIMITS["ffn"],
    "d_ff": LIMITS["ffn"],
    "vocab_size": LIMITS["vocab"],
    "max_position_embeddings": LIMITS["context"],
    "n_positions": LIMITS["context"],
    "relative_attention_num_buckets": LIMITS["context"],
    "relative_attention_max_distance": LIMITS["context"],
}


def require_sizes(config: Mapping[str, Any]) -> None:
    """Refuse a config.json with sizes that are none, or that no model has."""
    for name, most in _SIZES.items():
        size = config.get(name)
        if size is None or (type(size) is int and 1 <= size <= most):
            continue
        what = f"{name} {shortened(size)}; it must be a whole number from 1 to {most:,}"
        wrong = "" if type(size) is int else "a field of the wrong type: "
        raise UnsupportedModelError(f"config.json has {wrong}{what}")


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read what a config.json says with true or false, or leaves out."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        what = f"{name} {shortened(value)}; it must be true or false"
        raise UnsupportedModelError(f"config.json has a field of the wrong type: {what}")
    return value
