"""OPT: fields of config.json, the config itself, tensors."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shallowdraft.errors import UnsupportedModelError
from shallowdraft.limits import flag
from shallowdraft.shapes.tensors import Named, Stored, linear, norm

if TYPE_CHECKING:
    from shallowdraft.shapes.shape import ModelShape

POSITION_OFFSET = 2  # OPT's table of learned positions starts with two rows that are never used


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ModelShape from a config.json."""
    if not flag(config, "layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("OPT without affine layer norms is not supported; every published OPT has them")
    d_model, pre_norm = config["hidden_size"], flag(config, "do_layer_norm_before", True)
    bias = flag(config, "enable_bias", True)
    return {
        "layers": config["num_hidden_layers"],
        "d_model": d_model,
        "heads": config["num_attention_heads"],
        "ffn": config["ffn_dim"],
        "vocab": config["vocab_size"],
        "context": config.get("max_position_embeddings", 2048),
        "tied": flag(config, "tie_word_embeddings", True),
        "activation": config.get("activation_function", "relu"),
        "norm_eps": 1e-5,
        "rope": None,
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "embed_dim": config.get("word_embed_proj_dim") or d_model,
        "post_norm": not pre_norm,
        "final_norm": pre_norm and not flag(config, "_remove_final_layer_norm", False),
    }


def config(shape: "ModelShape") -> dict[str, Any]:
    """Return the fields of a config.json that only this family has."""
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


def layout(shape: "ModelShape") -> Iterator[Named]:
    """Yield our name of each parameter with the checkpoint's tensors that form it."""
    d, ffn, embed, root = shape.d_model, shape.ffn, shape.embed_dim, "model.decoder."
    width = shape.heads * shape.head_dim
    yield "embed.weight", (Stored(root + "embed_tokens.weight", (shape.vocab, embed)),)
    yield "positions.weight", (Stored(root + "embed_positions.weight", (shape.context + POSITION_OFFSET, d)),)
    if embed != d:
        yield "project_in.weight", (Stored(root + "project_in.weight", (d, embed)),)
        yield "project_out.weight", (Stored(root + "project_out.weight", (embed, d)),)
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}.", f"{root}layers.{layer}."
        attn = theirs + "self_attn."
        yield from norm(ours + "attn_norm", theirs + "self_attn_layer_norm", d)
        qkv = tuple((attn + name, width) for name in ("q_proj", "k_proj", "v_proj"))
        yield from linear(ours + "qkv", qkv, d, bias=shape.qkv_bias)
        yield from linear(ours + "out", ((attn + "out_proj", d),), width, bias=shape.out_bias)
        yield from norm(ours + "ffn_norm", theirs + "final_layer_norm", d)
        yield from linear(ours + "up", ((theirs + "fc1", ffn),), d, bias=shape.ffn_bias)
        yield from linear(ours + "down", ((theirs + "fc2", d),), ffn, bias=shape.ffn_bias)
    if shape.final_norm:
        yield from norm("norm", root + "final_layer_norm", d)
    if not shape.tied:
        yield "head.weight", (Stored("lm_head.weight", (shape.vocab, embed)),)
