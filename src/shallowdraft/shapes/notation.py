"""The short notation of shapes: `2x640/10h/1728`, or the name of a published model."""

import re
from dataclasses import replace

from shallowdraft.errors import OptionError
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.shapes.t5 import EncoderShape


def parse_shape(notation: str, *, vocab: int | None = None, context: int | None = None) -> ModelShape:
    """Read a Llama shape from `layers x d_model / heads h [/ kv_heads kv] [/ head_dim hd] / ffn`, or one of `NAMED`.

    Examples are `2x640/10h/1728`, `32x4096/32h/8kv/14336` and `5x2560/32h/128hd/11008`. With the layers of an encoder
    before it, as in `8+8x512/6h/64hd/1024`, it is a T5 1.1. Vocabulary and context are by default those of the named
    shape, otherwise 32,000 and 2,048.
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
