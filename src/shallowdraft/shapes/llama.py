"""The Llama family (Llama, Mistral, Qwen2, Qwen3): fields of config.json, the config itself, tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.limits import flag
from shallowdraft.shapes.tensors import Named, Stored, linear

if TYPE_CHECKING:
    from shallowdraft.shapes.shape import ModelShape

DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `kind` is Hugging Face's rope_type: default, linear or llama3."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "kind"}
        for name, value in numbers.items():
            if not (isfinite(value) and value > 0):
                raise OptionError(f"{name} of rotary positions is {value}; it must be a number above 0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise OptionError(f"low_freq_factor must be less than high_freq_factor, got {self}")


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ModelShape from a config.json."""
    family = config["model_type"]
    heads, d_model, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    default_kv_heads = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family, heads)
    attention_bias = flag(config, "attention_bias", False)
    window, full_layers = _window(family, config, layers)
    return {
        "layers": layers,
        "d_model": d_model,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or default_kv_heads,
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else d_model // heads),
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": config.get("max_position_embeddings", DEFAULT_CONTEXT[family]),
        "tied": flag(config, "tie_word_embeddings", False),
        "activation": config.get("hidden_act", "silu"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": _rope(config),
        "qkv_bias": family == "qwen2" or attention_bias,
        "out_bias": family != "qwen2" and attention_bias,
        "ffn_bias": flag(config, "mlp_bias", False),
        "qk_norm": family == "qwen3",
        "window": window,
        "full_layers": full_layers,
    }


def _window(family: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Return the sliding window, and the number of leading layers without one."""
    if family == "mistral":
        return config.get("sliding_window", 4096), 0
    if not flag(config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return None, 0
    kinds = config.get("layer_types")
    full = kinds.count("full_attention") if kinds else min(config.get("max_window_layers", 28), layers)
    if kinds and kinds != ["full_attention"] * full + ["sliding_attention"] * (layers - full):
        raise UnsupportedModelError("layer_types mixes full and sliding attention; full layers must come first")
    return config["sliding_window"], full


def _rope(config: Mapping[str, Any]) -> Rope:
    """Read rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    thetas = (scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)
    theta = float(next(value for value in thetas if value is not None))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(scaling["factor"]))
    if kind != "llama3":
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported are default, linear and llama3")
    return Rope(
        theta,
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def config(shape: "ModelShape") -> dict[str, Any]:
    """Return the fields of a config.json that only this family has."""
    rope = shape.rope or Rope()
    config: dict[str, Any] = {
        "intermediate_size": shape.ffn,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
    }
    if shape.family in ("llama", "qwen3"):
        config["attention_bias"] = shape.qkv_bias
    if shape.family == "llama":
        config["mlp_bias"] = shape.ffn_bias
    if shape.family != "llama":
        config["sliding_window"] = shape.window
    if shape.family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = shape.window is not None
        config["max_window_layers"] = shape.full_layers
    return config


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def layout(shape: "ModelShape") -> Iterator[Named]:
    """Yield our name of each parameter with the checkpoint's tensors that form it."""
    d, ffn = shape.d_model, shape.ffn
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "embed.weight", (Stored("model.embed_tokens.weight", (shape.vocab, d)),)
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        yield ours + "attn_norm.weight", (Stored(theirs + "input_layernorm.weight", (d,)),)
        qkv = ((attn + "q_proj", q), (attn + "k_proj", kv), (attn + "v_proj", kv))
        yield from linear(ours + "qkv", qkv, d, bias=shape.qkv_bias)
        if shape.qk_norm:
            yield ours + "q_norm.weight", (Stored(attn + "q_norm.weight", (shape.head_dim,)),)
            yield ours + "k_norm.weight", (Stored(attn + "k_norm.weight", (shape.head_dim,)),)
        yield from linear(ours + "out", ((attn + "o_proj", d),), q, bias=shape.out_bias)
        yield ours + "ffn_norm.weight", (Stored(theirs + "post_attention_layernorm.weight", (d,)),)
        yield from linear(ours + "up", ((mlp + "gate_proj", ffn), (mlp + "up_proj", ffn)), d, bias=shape.ffn_bias)
        yield from linear(ours + "down", ((mlp + "down_proj", d),), ffn, bias=shape.ffn_bias)
    yield "norm.weight", (Stored("model.norm.weight", (d,)),)
    if not shape.tied:
        yield "head.weight", (Stored("lm_head.weight", (shape.vocab, d)),)
