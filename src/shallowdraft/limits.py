"""The largest sizes that a config.json may give, several times those of any model; larger ones fill any memory."""

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from shallowdraft.errors import UnsupportedModelError

MAX_LOOKAHEAD = 32  # draft tokens per iteration
MOST_NODES = 63  # of a tree, beside its root: the nodes that one attends to are bits of a 64-bit number
MOST_HEADS = 16  # Medusa heads, each of which proposes one token
LIMITS = {  # by field of a `ModelShape`
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
_SIZES = {  # by field of a config.json, which must be a whole number from 1 to this
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
    """Refuse a config.json with a size that is not a whole number above 0, or larger than any model's."""
    for name, most in _SIZES.items():
        size = config.get(name)
        if size is None or (type(size) is int and 1 <= size <= most):
            continue
        problem = f"{name} {shortened(size)}; it must be a whole number from 1 to {most:,}"
        prefix = "" if type(size) is int else "a field of the wrong type: "
        raise UnsupportedModelError(f"config.json has {prefix}{problem}")


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a field of a config.json that is true, false or missing."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        problem = f"{name} {shortened(value)}; it must be true or false"
        raise UnsupportedModelError(f"config.json has a field of the wrong type: {problem}")
    return value
