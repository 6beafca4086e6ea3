"""Shapes of published models, and of the drafts in "Decoding Speculative Decoding" ("the paper")."""

from dataclasses import replace
from typing import Any

from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.shapes.t5 import EncoderShape


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
    """Return the shape of a T5 1.1, or of the first T5."""
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
