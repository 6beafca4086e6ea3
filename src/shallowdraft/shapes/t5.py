"""T5: its encoder, the fields of its config.json, its tensors. No torch here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.limits import flag
from shallowdraft.shapes.tensors import Named, Stored

if TYPE_CHECKING:
    from shallowdraft.shapes.shape import ModelShape

CONTEXT = 2048  # tokens that the decoder may write; positions are relative, so T5 itself sets no limit
# Tensors of old files that are copies of others, or that no model uses.
SPARE = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)


@dataclass(frozen=True)
class EncoderShape:
    """The encoder of a T5, as wide as the decoder, and settings of attention and FFN that both share."""

    layers: int
    context: int = 512
    """The longest source in tokens: the config's n_positions, or the length T5 was trained with; T5 sets no limit."""
    buckets: int = 32
    """The number of ranges into which distances between tokens are divided; each has a bias for each head."""
    farthest: int = 128
    """The distance in tokens from which on all are in one range."""
    gated: bool = True
    """Whether FFNs have a gate: in T5 1.1, not in 1.0."""
    scaled: bool = False
    """Whether the decoder's output is divided by sqrt(d_model) before the head: in T5 1.0, not in 1.1."""

    def __post_init__(self) -> None:
        counts = (self.layers, self.context, self.buckets, self.farthest)
        if not all(isinstance(count, int) for count in counts):
            raise TypeError(f"sizes of an encoder must be whole numbers, got {counts}")
        if min(counts) < 1 or self.buckets < 4 or self.farthest <= self.buckets // 2:
            raise OptionError(f"an encoder needs a layer, 4 buckets and distances beyond the near half of them: {self}")


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ModelShape from a T5's config.json."""
    kind = config.get("feed_forward_proj", "relu")
    gate, _, activation = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise UnsupportedModelError(f"feed_forward_proj {kind!r} is not supported; it must be NAME or gated-NAME")
    untied = not flag(config, "tie_word_embeddings", True)
    return {
        "layers": config.get("num_decoder_layers") or config["num_layers"],
        "d_model": config["d_model"],
        "heads": config["num_heads"],
        "head_dim": config["d_kv"],
        "ffn": config["d_ff"],
        "vocab": config["vocab_size"],
        "context": config.get("max_position_embeddings", CONTEXT),
        "tied": not untied,
        "activation": "gelu_new" if kind == "gated-gelu" else activation,
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "rope": None,
        "encoder": EncoderShape(
            layers=config["num_layers"],
            context=config.get("n_positions") or EncoderShape.context,
            buckets=config.get("relative_attention_num_buckets", EncoderShape.buckets),
            farthest=config.get("relative_attention_max_distance", EncoderShape.farthest),
            gated=bool(gate),
            # Transformers 5 has a field for scaling; earlier, a model was scaled if it was tied.
            scaled=flag(config, "scale_decoder_outputs", not untied),
        ),
    }


def config(shape: "ModelShape") -> dict[str, Any]:
    """Return a config.json that transformers reads; only this package reads the decoder's context."""
    encoder = shape.encoder
    assert encoder is not None
    activation = "gelu" if encoder.gated and shape.activation == "gelu_new" else shape.activation
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": shape.vocab,
        "d_model": shape.d_model,
        "d_kv": shape.head_dim,
        "d_ff": shape.ffn,
        "num_layers": encoder.layers,
        "num_decoder_layers": shape.layers,
        "num_heads": shape.heads,
        "n_positions": encoder.context,
        "max_position_embeddings": shape.context,
        "relative_attention_num_buckets": encoder.buckets,
        "relative_attention_max_distance": encoder.farthest,
        "feed_forward_proj": f"gated-{activation}" if encoder.gated else activation,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "scale_decoder_outputs": encoder.scaled,
    }


def layout(shape: "ModelShape") -> Iterator[Named]:
    """Yield our name of each parameter with the checkpoint's tensors that form it."""
    assert shape.encoder is not None
    table = (shape.vocab, shape.d_model)
    yield "embed.weight", (Stored("shared.weight", table),)
    yield from _stack(shape, "encoder.", "encoder.", shape.encoder.layers)
    yield from _stack(shape, "", "decoder.", shape.layers)
    if not shape.tied:
        yield "head.weight", (Stored("lm_head.weight", table),)


def _stack(shape: "ModelShape", ours: str, theirs: str, layers: int) -> Iterator[Named]:
    """Yield the parameters of the encoder or the decoder; `ours` and `theirs` begin our names and the checkpoint's."""
    encoder, d, width = shape.encoder, shape.d_model, shape.heads * shape.head_dim
    assert encoder is not None
    biases = theirs + "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield ours + "distances.weight", (Stored(biases, (encoder.buckets, shape.heads)),)
    for layer in range(layers):
        block, parts = f"{ours}blocks.{layer}.", f"{theirs}block.{layer}.layer."
        attention, cross, ffn = f"{parts}0.SelfAttention.", f"{parts}1.EncDecAttention.", f"{parts}1."
        yield block + "attn_norm.weight", (Stored(parts + "0.layer_norm.weight", (d,)),)
        yield block + "qkv.weight", tuple(Stored(f"{attention}{name}.weight", (width, d)) for name in "qkv")
        yield block + "out.weight", (Stored(attention + "o.weight", (d, width)),)
        if theirs == "decoder.":
            yield block + "cross_norm.weight", (Stored(parts + "1.layer_norm.weight", (d,)),)
            yield block + "cross_q.weight", (Stored(cross + "q.weight", (width, d)),)
            yield block + "cross_kv.weight", tuple(Stored(f"{cross}{name}.weight", (width, d)) for name in "kv")
            yield block + "cross_out.weight", (Stored(cross + "o.weight", (d, width)),)
            ffn = f"{parts}2."
        names = ("wi_0", "wi_1") if encoder.gated else ("wi",)
        yield block + "ffn_norm.weight", (Stored(ffn + "layer_norm.weight", (d,)),)
        yield block + "up.weight", tuple(Stored(f"{ffn}DenseReluDense.{name}.weight", (shape.ffn, d)) for name in names)
        yield block + "down.weight", (Stored(ffn + "DenseReluDense.wo.weight", (d, shape.ffn)),)
    yield ours + "norm.weight", (Stored(theirs + "final_layer_norm.weight", (d,)),)
