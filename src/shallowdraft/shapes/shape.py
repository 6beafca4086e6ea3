"""Shapes of models, read from a Hugging Face config; tensors, bytes and FLOPs follow from them.

The one idea: `ModelShape.layout()` names every tensor of a checkpoint once. Parameter counts, memory checks, loading,
saving and the decoder's own parameter names all come from it. No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.limits import LIMITS, require_sizes
from shallowdraft.shapes import llama, opt, t5
from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.t5 import EncoderShape
from shallowdraft.shapes.tensors import Stored

Family = Literal["llama", "mistral", "qwen2", "qwen3", "opt", "t5"]
SUPPORTED = "Llama 1/2/3.x, Vicuna, Mistral, Qwen2, Qwen3, OPT and T5"
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
_READERS = {"llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "opt": opt, "t5": t5}
"""The module of each family: `fields` reads a config.json, `config` writes one, `layout` names the tensors."""


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
    """Key/value heads; 0 means the number of heads."""
    head_dim: int = 0
    """Width of a head, independent of d_model; 0 means d_model / heads."""
    context: int = 2048
    tied: bool = False
    """Whether the LM head is the embedding."""
    activation: str = "silu"
    norm_eps: float = 1e-6
    rope: Rope | None = field(default_factory=Rope)
    """Rotary positions; None for learned positions (OPT) and relative ones (T5)."""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """Sliding attention window in tokens."""
    full_layers: int = 0
    """The number of first layers that attend to all tokens in spite of a window."""
    embed_dim: int = 0
    """Width of the embedding where it is projected to d_model (OPT-350M); 0 means d_model."""
    post_norm: bool = False
    final_norm: bool = True
    encoder: EncoderShape | None = None
    """The encoder of an encoder–decoder (T5); layers and context are then those of the decoder."""

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
        """Whether norms are LayerNorm with bias (OPT) rather than RMSNorm."""
        return self.family == "opt"

    @property
    def learned_positions(self) -> bool:
        """Whether a table of positions is added to the embedding (OPT)."""
        return self.rope is None and self.encoder is None

    def windows(self) -> tuple[int | None, ...]:
        """Return the attention window of each layer; None for layers that attend to all tokens."""
        return tuple(None if layer < self.full_layers else self.window for layer in range(self.layers))

    def layout(self) -> dict[str, tuple[Stored, ...]]:
        """Return the checkpoint's tensors that form each of our parameters, concatenated along dimension 0."""
        return dict(_READERS[self.family].layout(self))

    def stored(self) -> Iterator[Stored]:
        """Yield every tensor of the checkpoint once."""
        return (tensor for parts in self.layout().values() for tensor in parts)

    def spare(self) -> set[str]:
        """Return the names of further tensors that a checkpoint may hold; they are copies and are ignored."""
        return {*(("lm_head.weight",) if self.tied else ()), *(t5.SPARE if self.encoder else ())}

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(prod(tensor.size) for tensor in self.stored())

    @property
    def embedding_parameters(self) -> int:
        """Parameters that are looked up rather than multiplied: input embedding and learned positions."""
        positions = (self.context + opt.POSITION_OFFSET) * self.d_model if self.learned_positions else 0
        return self.vocab * self.embed_dim + positions

    @property
    def source_parameters(self) -> int:
        """Parameters used once per source: the encoder's, and those of cross-attention's keys and values."""
        count = 0
        for name, parts in self.layout().items():
            if name.startswith("encoder.") or ".cross_kv." in name:
                count += sum(prod(tensor.size) for tensor in parts)
        return count

    @property
    def pass_parameters(self) -> int:
        """Parameters that a decoding pass reads: all but embeddings and those for a source; a tied head is read."""
        head = self.vocab * self.embed_dim if self.tied else 0
        return self.parameters - self.embedding_parameters - self.source_parameters + head

    def weight_bytes(self, dtype: str = "float32") -> int:
        """Return the bytes of all weights."""
        return self.parameters * DTYPE_BYTES[dtype]

    def pass_bytes(self, dtype: str = "float32") -> int:
        """Return the weight bytes that one decoding pass reads; divided by bandwidth, the least time it takes."""
        return self.pass_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "float32") -> int:
        """Return the bytes of keys and values that the KV cache holds for each token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def flops_per_token(self, attended: int = 0) -> int:
        """Return the FLOPs of decoding a token that attends to some cached tokens; a multiply-add counts as two."""
        attended_in_layers = sum(min(attended, window or attended) for window in self.windows())
        # Each head multiplies head_dim numbers twice per attended token: by its key, and by its value.
        return 2 * self.pass_parameters + 4 * self.heads * self.head_dim * attended_in_layers

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read the shape that a Hugging Face config.json describes; refuse unsupported models by name."""
        try:
            family = _supported_family(config)
            require_sizes(config)
            fields = _READERS[family].fields(config)
            if fields["activation"] not in ACTIVATIONS:
                supported = ", ".join(ACTIVATIONS)
                raise UnsupportedModelError(
                    f"activation {fields['activation']!r} is not supported; supported are {supported}"
                )
            return cls(family=family, **fields)
        except KeyError as missing:
            raise UnsupportedModelError(
                f"config.json lacks {missing}; it needs the fields that transformers writes"
            ) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UnsupportedModelError(f"config.json has a field of the wrong type: {error}") from None

    def to_config(self) -> dict[str, Any]:
        """Return a config.json that transformers, vLLM and llama.cpp's converter read."""
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
        of_family: dict[str, Any] = _READERS[self.family].config(self)
        return common | of_family


def _multiples(width: int, heads: int) -> str:
    """Return the multiples of a number of heads next to a width, as part of a sentence."""
    below = width // heads * heads
    return " or ".join(str(multiple) for multiple in (below, below + heads) if multiple > 0)


def _supported_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config; refuse other architectures, quantised checkpoints and mixtures of experts."""
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
        reason = f"a mixture of {experts} experts" if experts else "another architecture"
        raise UnsupportedModelError(f"model_type {kind!r} is {reason}; supported are {SUPPORTED}")
    family: Family = kind
    return family


def require_one_kind(target: ModelShape, draft: ModelShape) -> None:
    """Refuse an encoder–decoder with a decoder-only model: the first reads the prompt, the second continues it."""
    if (target.encoder is None) != (draft.encoder is None):
        with_encoder, without = ("target", "draft") if target.encoder else ("draft", "target")
        raise OptionError(
            f"the {with_encoder} is an encoder–decoder and the {without} is not; give two models of one kind"
        )


def child_shape(parent: ModelShape, sizes: ModelShape) -> ModelShape:
    """Return a shape with the parent's family, vocabulary and context, and the other shape's sizes."""
    if parent.encoder or sizes.encoder:
        raise OptionError(f"{sizes} from {parent}: one has an encoder; drafts are made of decoder-only models")
    names = ("layers", "d_model", "heads", "kv_heads", "head_dim", "ffn")
    projected = parent.embed_dim if parent.embed_dim != parent.d_model else 0
    return replace(
        parent,
        **{name: getattr(sizes, name) for name in names},
        embed_dim=projected,
        full_layers=min(parent.full_layers, sizes.layers),
    )
