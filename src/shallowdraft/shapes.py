"""A model's shape, read from a Hugging Face config, and what follows from it: tensors, bytes, FLOPs.

The one idea: `ModelShape.layout()` names every tensor of a checkpoint once. Parameter counts, memory checks, loading,
saving and the decoder's own parameter names all come from it. No torch here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any, Literal

from shallowdraft import t5
from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.limits import LIMITS, flag, require_sizes
from shallowdraft.t5 import EncoderShape

Family = Literal["llama", "mistral", "qwen2", "qwen3", "opt", "t5"]
SUPPORTED = "Llama 1/2/3.x, Vicuna, Mistral, Qwen2, Qwen3, OPT and T5"
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPT_POSITION_OFFSET = 2  # OPT's table of learned positions starts with two rows that are never used

_DEFAULT_CONTEXT: dict[Family, int] = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "opt": 2048}
_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


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


@dataclass(frozen=True)
class Stored:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    size: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides what a decoder computes, except its weights."""

    layers: int
    d_model: int
    heads: int
    ffn: int
    vocab: int
    family: Family = "llama"
    kv_heads: int = 0
    """Key/value heads; 0 means as many as heads."""
    head_dim: int = 0
    """Width of a head, independent of d_model; 0 means d_model / heads."""
    context: int = 2048
    tied: bool = False
    """Whether the LM head is the embedding."""
    activation: str = "silu"
    norm_eps: float = 1e-6
    rope: Rope | None = field(default_factory=Rope)
    """None: learned positions (OPT), or relative ones (T5)."""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """Sliding attention window in tokens."""
    full_layers: int = 0
    """With a window: how many of the first layers attend to everything all the same."""
    embed_dim: int = 0
    """Width of the embedding where it is projected to d_model (OPT-350M); 0 means d_model."""
    post_norm: bool = False
    final_norm: bool = True
    encoder: EncoderShape | None = None
    """Of an encoder–decoder (T5); layers and context are then the decoder's."""

    def __post_init__(self) -> None:
        counts = (
            self.layers,
            self.d_model,
            self.heads,
            self.ffn,
            self.vocab,
            self.kv_heads,
            self.head_dim,
            self.context,
            self.window or 0,
            self.full_layers,
        )
        if not all(isinstance(count, int) for count in counts) or not isinstance(self.norm_eps, float):
            raise TypeError(f"sizes must be whole numbers and norm_eps a float, got {counts} and {self.norm_eps!r}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "embed_dim", self.embed_dim or self.d_model)
        if not self.head_dim:
            if self.heads and self.d_model % self.heads:
                raise OptionError(
                    f"d_model {self.d_model} is not divisible by {self.heads} heads; take another number of heads, or "
                    f"{_multiples(self.d_model, self.heads)} for d_model (a T5 may give their width instead, as /64hd)"
                )
            object.__setattr__(self, "head_dim", self.d_model // max(1, self.heads))
        sizes = (self.layers, self.d_model, self.heads, self.kv_heads, self.head_dim, self.ffn, self.vocab)
        if min(*sizes, self.context) < 1:
            raise OptionError(f"every size of a shape must be at least 1, got {self}")
        if too_large := [name for name, most in LIMITS.items() if (getattr(self, name) or 0) > most]:
            name = too_large[0]
            raise OptionError(f"{name} of a shape is {getattr(self, name):,}; it may be {LIMITS[name]:,} at most")
        if not 0 <= self.norm_eps < 1 or (self.window is not None and self.window < 1) or self.full_layers < 0:
            raise OptionError(
                f"norm_eps lies between 0 and 1, a window has a token or more, got "
                f"{self.norm_eps}, {self.window} and {self.full_layers} layers without one"
            )
        if self.heads % self.kv_heads:
            raise OptionError(f"{self.heads} heads do not divide into {self.kv_heads} key/value heads")
        if self.encoder and self.kv_heads != self.heads:
            raise OptionError(f"{self.kv_heads} key/value heads for {self.heads} heads; in T5 each head has its own")
        if self.rope and self.head_dim % 2:
            raise OptionError(f"a head is {self.head_dim} wide; rotary positions need an even width")

    def __str__(self) -> str:
        grouped = f"/{self.kv_heads}kv" if self.kv_heads != self.heads else ""
        wide = f"/{self.head_dim}hd" if self.head_dim * self.heads != self.d_model else ""
        encoder = f"{self.encoder.layers}+" if self.encoder else ""
        return f"{encoder}{self.layers}x{self.d_model}/{self.heads}h{grouped}{wide}/{self.ffn}"

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate (SwiGLU) beside its up projection."""
        return self.encoder.gated if self.encoder else self.family != "opt"

    @property
    def layer_norm(self) -> bool:
        """LayerNorm with bias (OPT) rather than RMSNorm."""
        return self.family == "opt"

    @property
    def learned_positions(self) -> bool:
        """A table of positions that are added to the embedding (OPT)."""
        return self.rope is None and self.encoder is None

    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer."""
        return tuple(None if layer < self.full_layers else self.window for layer in range(self.layers))

    def layout(self) -> dict[str, tuple[Stored, ...]]:
        """Our parameter name -> the checkpoint's tensors that it is concatenated from, along dimension 0."""
        if self.encoder:
            return {ours: tuple(Stored(*part) for part in parts) for ours, parts in t5.layout(self)}
        return dict(_opt_layout(self) if self.family == "opt" else _llama_layout(self))

    def stored(self) -> Iterator[Stored]:
        """Every tensor of the checkpoint, once."""
        return (tensor for parts in self.layout().values() for tensor in parts)

    def spare(self) -> set[str]:
        """Tensors that a checkpoint may hold beside those, and that say nothing new."""
        return {*(("lm_head.weight",) if self.tied else ()), *(t5.SPARE if self.encoder else ())}

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(prod(tensor.size) for tensor in self.stored())

    @property
    def embedding_parameters(self) -> int:
        """Parameters that are looked up rather than multiplied: input embedding and learned positions."""
        positions = (self.context + OPT_POSITION_OFFSET) * self.d_model if self.learned_positions else 0
        return self.vocab * self.embed_dim + positions

    @property
    def source_parameters(self) -> int:
        """Parameters that only a source passes through, once: the encoder, and the keys and values of what it read."""
        once = (parts for name, parts in self.layout().items() if name.startswith("encoder.") or ".cross_kv." in name)
        return sum(prod(tensor.size) for parts in once for tensor in parts)

    @property
    def pass_parameters(self) -> int:
        """Parameters that a forward pass must read: all but those looked up or for a source; a tied head is read."""
        head = self.vocab * self.embed_dim if self.tied else 0
        return self.parameters - self.embedding_parameters - self.source_parameters + head

    def weight_bytes(self, dtype: str = "float32") -> int:
        return self.parameters * DTYPE_BYTES[dtype]

    def pass_bytes(self, dtype: str = "float32") -> int:
        """Weight bytes that one forward pass must read: over bandwidth, the floor of its latency."""
        return self.pass_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "float32") -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def flops_per_token(self, attended: int = 0) -> int:
        """Multiply-adds count two; `attended` is the number of cached tokens that this one looks at."""
        scores = sum(min(attended, window or attended) for window in self.windows())
        return 2 * self.pass_parameters + 4 * self.heads * self.head_dim * scores

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """The shape that a Hugging Face config.json describes; what is not supported is refused by name."""
        try:
            family = _supported_family(config)
            require_sizes(config)
            if family == "t5":
                fields = t5.fields(config)
                return cls(family=family, **fields | {"activation": _activation(fields["activation"])})
            return (_from_opt if family == "opt" else _from_llama)(family, config)
        except KeyError as missing:
            raise UnsupportedModelError(
                f"config.json lacks {missing}; it needs the fields that transformers writes"
            ) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as wrong:
            raise UnsupportedModelError(f"config.json has a field of the wrong type: {wrong}") from None

    def to_config(self) -> dict[str, Any]:
        """A config.json that transformers, vLLM and llama.cpp's converter read."""
        if self.encoder:
            return t5.config(self)
        common = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
        }
        return common | (_opt_config(self) if self.family == "opt" else _llama_config(self))


def _multiples(width: int, heads: int) -> str:
    """The multiples of a number of heads on either side of a width."""
    below = width // heads * heads
    return " or ".join(str(multiple) for multiple in (below, below + heads) if multiple > 0)


def _llama_layout(shape: ModelShape) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    d, ffn = shape.d_model, shape.ffn
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "embed.weight", (Stored("model.embed_tokens.weight", (shape.vocab, d)),)
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        yield ours + "attn_norm.weight", (Stored(theirs + "input_layernorm.weight", (d,)),)
        qkv = ((attn + "q_proj", q), (attn + "k_proj", kv), (attn + "v_proj", kv))
        yield from _linear(ours + "qkv", qkv, d, bias=shape.qkv_bias)
        if shape.qk_norm:
            yield ours + "q_norm.weight", (Stored(attn + "q_norm.weight", (shape.head_dim,)),)
            yield ours + "k_norm.weight", (Stored(attn + "k_norm.weight", (shape.head_dim,)),)
        yield from _linear(ours + "out", ((attn + "o_proj", d),), q, bias=shape.out_bias)
        yield ours + "ffn_norm.weight", (Stored(theirs + "post_attention_layernorm.weight", (d,)),)
        yield from _linear(ours + "up", ((mlp + "gate_proj", ffn), (mlp + "up_proj", ffn)), d, bias=shape.ffn_bias)
        yield from _linear(ours + "down", ((mlp + "down_proj", d),), ffn, bias=shape.ffn_bias)
    yield "norm.weight", (Stored("model.norm.weight", (d,)),)
    if not shape.tied:
        yield "head.weight", (Stored("lm_head.weight", (shape.vocab, d)),)


def _opt_layout(shape: ModelShape) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    d, ffn, embed, root = shape.d_model, shape.ffn, shape.embed_dim, "model.decoder."
    width = shape.heads * shape.head_dim
    yield "embed.weight", (Stored(root + "embed_tokens.weight", (shape.vocab, embed)),)
    yield "positions.weight", (Stored(root + "embed_positions.weight", (shape.context + OPT_POSITION_OFFSET, d)),)
    if embed != d:
        yield "project_in.weight", (Stored(root + "project_in.weight", (d, embed)),)
        yield "project_out.weight", (Stored(root + "project_out.weight", (embed, d)),)
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}.", f"{root}layers.{layer}."
        attn = theirs + "self_attn."
        yield from _norm(ours + "attn_norm", theirs + "self_attn_layer_norm", d)
        qkv = tuple((attn + name, width) for name in ("q_proj", "k_proj", "v_proj"))
        yield from _linear(ours + "qkv", qkv, d, bias=shape.qkv_bias)
        yield from _linear(ours + "out", ((attn + "out_proj", d),), width, bias=shape.out_bias)
        yield from _norm(ours + "ffn_norm", theirs + "final_layer_norm", d)
        yield from _linear(ours + "up", ((theirs + "fc1", ffn),), d, bias=shape.ffn_bias)
        yield from _linear(ours + "down", ((theirs + "fc2", d),), ffn, bias=shape.ffn_bias)
    if shape.final_norm:
        yield from _norm("norm", root + "final_layer_norm", d)
    if not shape.tied:
        yield "head.weight", (Stored("lm_head.weight", (shape.vocab, embed)),)


def _linear(
    ours: str, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool
) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    yield ours + ".weight", tuple(Stored(name + ".weight", (rows, columns)) for name, rows in parts)
    if bias:
        yield ours + ".bias", tuple(Stored(name + ".bias", (rows,)) for name, rows in parts)


def _norm(ours: str, theirs: str, width: int) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    yield ours + ".weight", (Stored(theirs + ".weight", (width,)),)
    yield ours + ".bias", (Stored(theirs + ".bias", (width,)),)


def _supported_family(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedModelError(f"config.json has no model_type; supported are {SUPPORTED}")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        raise UnsupportedModelError(
            f"this {kind} checkpoint is quantised ({method}); use the float32, bf16 or fp16 checkpoint it was made from"
        )
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if kind not in _ARCHITECTURES or experts:
        what = f"a mixture of {experts} experts" if experts else "another architecture"
        raise UnsupportedModelError(f"model_type {kind!r} is {what}; supported are {SUPPORTED}")
    family: Family = kind
    return family


def _from_llama(family: Family, config: Mapping[str, Any]) -> ModelShape:
    heads, d_model, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    default_kv_heads = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family, heads)
    attention_bias = flag(config, "attention_bias", False)
    window, full_layers = _window(family, config, layers)
    return ModelShape(
        family=family,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or default_kv_heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else d_model // heads),
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=config.get("max_position_embeddings", _DEFAULT_CONTEXT[family]),
        tied=flag(config, "tie_word_embeddings", False),
        activation=_activation(config.get("hidden_act", "silu")),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        ffn_bias=flag(config, "mlp_bias", False),
        qk_norm=family == "qwen3",
        window=window,
        full_layers=full_layers,
    )


def _from_opt(family: Family, config: Mapping[str, Any]) -> ModelShape:
    if not flag(config, "layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("OPT without affine layer norms is not supported; every published OPT has them")
    d_model, pre_norm = config["hidden_size"], flag(config, "do_layer_norm_before", True)
    bias = flag(config, "enable_bias", True)
    return ModelShape(
        family=family,
        layers=config["num_hidden_layers"],
        d_model=d_model,
        heads=config["num_attention_heads"],
        ffn=config["ffn_dim"],
        vocab=config["vocab_size"],
        context=config.get("max_position_embeddings", 2048),
        tied=flag(config, "tie_word_embeddings", True),
        activation=_activation(config.get("activation_function", "relu")),
        norm_eps=1e-5,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        embed_dim=config.get("word_embed_proj_dim") or d_model,
        post_norm=not pre_norm,
        final_norm=pre_norm and not flag(config, "_remove_final_layer_norm", False),
    )


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return name


def _window(family: Family, config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """The sliding window and the number of leading layers without one."""
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
    """Transformers 5 writes `rope_parameters`; older configs have `rope_theta` and `rope_scaling`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    thetas = (scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)
    theta = float(next(given for given in thetas if given is not None))
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


def _llama_config(shape: ModelShape) -> dict[str, Any]:
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


def _opt_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "ffn_dim": shape.ffn,
        "activation_function": shape.activation,
        "do_layer_norm_before": not shape.post_norm,
        "_remove_final_layer_norm": not shape.post_norm and not shape.final_norm,
        "word_embed_proj_dim": shape.embed_dim,
        "enable_bias": shape.qkv_bias,
        "dropout": 0.0,
        "layerdrop": 0.0,
    }


def parse(notation: str, *, vocab: int | None = None, context: int | None = None) -> ModelShape:
    """A Llama shape from `layers x d_model / heads h [/ kv_heads kv] [/ head_dim hd] / ffn`, or one of `NAMED`.

    `2x640/10h/1728`, `32x4096/32h/8kv/14336`, `5x2560/32h/128hd/11008`; with an encoder's layers before it a T5 1.1:
    `8+8x512/6h/64hd/1024`. Without a vocabulary and a context: the named shape's own, else 32,000 and 2,048.
    """
    if named := NAMED.get(notation.lower()):
        return replace(named, vocab=vocab or named.vocab, context=context or named.context)
    match = re.fullmatch(r"(?:(\d+)\+)?(\d+)x(\d+)/(\d+)h(?:/(\d+)kv)?(?:/(\d+)hd)?/(\d+)", notation)
    if not match:
        raise OptionError(
            f"{notation!r} is no shape; write layers x d_model / heads / ffn like 2x640/10h/1728, "
            f"with /8kv and /128hd where needed, 4+2x640/10h/1728 with an encoder, or one of {', '.join(NAMED)}"
        )
    encoder_layers, layers, d_model, heads, kv_heads, head_dim, ffn = (int(group or 0) for group in match.groups())
    shape = ModelShape(
        layers,
        d_model,
        heads,
        ffn,
        vocab or 32000,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context or 2048,
        norm_eps=1e-5,
    )
    if match[1] is None:
        return shape
    encoder = EncoderShape(encoder_layers)
    return replace(shape, family="t5", activation="gelu_new", norm_eps=1e-6, rope=None, encoder=encoder)


def require_one_kind(target: ModelShape, draft: ModelShape) -> None:
    """Raise if one is an encoder–decoder and the other is not: what one reads, the other would continue."""
    if (target.encoder is None) != (draft.encoder is None):
        one, other = ("target", "draft") if target.encoder else ("draft", "target")
        raise OptionError(f"the {one} is an encoder–decoder and the {other} is not; give two models of one kind")


def child_shape(parent: ModelShape, wanted: ModelShape) -> ModelShape:
    """The parent's family, vocabulary and context in the wanted sizes."""
    if parent.encoder or wanted.encoder:
        raise OptionError(f"{wanted} from {parent}: one has an encoder; drafts are made of decoder-only models")
    sizes = {name: getattr(wanted, name) for name in ("layers", "d_model", "heads", "kv_heads", "head_dim", "ffn")}
    projected = parent.embed_dim if parent.embed_dim != parent.d_model else 0
    return replace(parent, **sizes, embed_dim=projected, full_layers=min(parent.full_layers, wanted.layers))


def _opt(layers: int, heads: int, d_model: int, ffn: int, *, like_350m: bool = False) -> ModelShape:
    shape = ModelShape(
        layers,
        d_model,
        heads,
        ffn,
        50272,
        family="opt",
        tied=True,
        activation="relu",
        norm_eps=1e-5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )
    return replace(shape, embed_dim=512, post_norm=True, final_norm=False) if like_350m else shape


def _t5(layers: int, d_model: int, heads: int, ffn: int, *, first: bool = False) -> ModelShape:
    """T5 1.1, or the first T5."""
    return ModelShape(
        layers,
        d_model,
        heads,
        ffn,
        32128,
        family="t5",
        head_dim=64,
        tied=first,
        activation="relu" if first else "gelu_new",
        rope=None,
        encoder=EncoderShape(layers, gated=not first, scaled=first),
    )


_LLAMA_31: dict[str, Any] = {
    "kv_heads": 8,
    "context": 131072,
    "norm_eps": 1e-5,
    "rope": Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
}

NAMED: dict[str, ModelShape] = {
    "opt-125m": _opt(12, 12, 768, 3072),
    "opt-350m": _opt(24, 16, 1024, 4096, like_350m=True),
    "opt-1.3b": _opt(24, 32, 2048, 8192),
    "opt-2.7b": _opt(32, 32, 2560, 10240),
    "opt-6.7b": _opt(32, 32, 4096, 16384),
    "opt-13b": _opt(40, 40, 5120, 20480),
    "opt-30b": _opt(48, 56, 7168, 28672),
    "opt-66b": _opt(64, 72, 9216, 36864),
    # Table 6: OPT-350M's parameters spread over fewer, wider layers
    "opt-350m-20l": _opt(20, 20, 1280, 3448, like_350m=True),
    "opt-350m-16l": _opt(16, 22, 1408, 4096, like_350m=True),
    "opt-350m-12l": _opt(12, 28, 1792, 3448, like_350m=True),
    "opt-350m-8l": _opt(8, 36, 2304, 3448, like_350m=True),
    "opt-350m-4l": _opt(4, 56, 3584, 3448, like_350m=True),
    "t5-small": _t5(6, 512, 8, 2048, first=True),
    "t5-base": _t5(12, 768, 12, 3072, first=True),
    "t5-large": _t5(24, 1024, 16, 4096, first=True),
    "flan-t5-small": _t5(8, 512, 6, 1024),
    "flan-t5-base": _t5(12, 768, 12, 2048),
    "flan-t5-large": _t5(24, 1024, 16, 2816),
    "flan-t5-xl": _t5(24, 2048, 32, 5120),
    "flan-t5-xxl": _t5(24, 4096, 64, 10240),
    "llama-7b": ModelShape(32, 4096, 32, 11008, 32000),
    "llama-13b": ModelShape(40, 5120, 40, 13824, 32000),
    "llama-33b": ModelShape(60, 6656, 52, 17920, 32000),
    "llama-65b": ModelShape(80, 8192, 64, 22016, 32000, norm_eps=1e-5),
    "vicuna-33b": ModelShape(60, 6656, 52, 17920, 32000),
    "llama-2-70b": ModelShape(80, 8192, 64, 28672, 32000, kv_heads=8, context=4096, norm_eps=1e-5),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 14336, 128256, **_LLAMA_31),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 28672, 128256, **_LLAMA_31),
    "sheared-llama-1.3b": ModelShape(24, 2048, 16, 5504, 32000, context=4096, norm_eps=1e-5),
    "tiny-llama-1.1b": ModelShape(22, 2048, 32, 5632, 32000, kv_heads=4, norm_eps=1e-5),
    # Table 1: the 796M, 543M and 290M drafts have d_model 2560 and 32 heads of 128, not the printed d_model 4096
    "noft-1.3b": ModelShape(24, 2048, 16, 5504, 32000, context=4096, norm_eps=1e-5),
    "noft-wide-1.3b": ModelShape(12, 2560, 20, 9280, 32000, context=4096, norm_eps=1e-5),
    "noft-wide-796m": ModelShape(5, 2560, 32, 11008, 32000, head_dim=128, context=4096, norm_eps=1e-5),
    "noft-wide-543m": ModelShape(3, 2560, 32, 11008, 32000, head_dim=128, context=4096, norm_eps=1e-5),
    "noft-wide-290m": ModelShape(1, 2560, 32, 11008, 32000, head_dim=128, context=4096, norm_eps=1e-5),
}
