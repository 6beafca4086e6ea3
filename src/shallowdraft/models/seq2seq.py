"""Encoder–decoders (T5): a decoder with a stack beside it that reads a source, and attention to what that found.

Everything runs on PyTorch's own operations. Shapes: L layers, B rows, R tokens of a source, T tokens of a pass, C
d_model, H heads, D head width, S attended slots.
"""

import math
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.models.cache import CrossCache, KVCache, Source
from shallowdraft.models.decoder import Attention, Block, Decoder
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.projection import Projection
from shallowdraft.models.tree import TreePass
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.shapes.t5 import EncoderShape


class Seq2Seq(Decoder):
    """Tokens at given positions of a cache that has read a source -> hidden states."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        assert shape.encoder is not None
        self.encoder = Encoder(shape, shape.encoder)
        self.blocks = nn.ModuleList(CrossBlock(shape, layer) for layer in range(shape.layers))
        self.distances = nn.Embedding(shape.encoder.buckets, shape.heads)
        self._scale = shape.d_model**-0.5 if shape.encoder.scaled else None

    def new_cache(self, rows: int, slots: int) -> CrossCache:
        back, sizes = torch.arange(slots, device=self.device), self.encoder.sizes
        biases = _biases(self.distances, _buckets(back, sizes.buckets, sizes.farthest))
        return CrossCache(self.shape, rows, slots, biases, device=self.device, dtype=self.dtype)

    def read_source(self, source: Source | None, cache: KVCache) -> None:
        assert source is not None
        assert isinstance(cache, CrossCache)
        rows, tokens = source.tokens.shape
        needed = rows * tokens * self.shape.kv_bytes_per_token(dtype_name(self.dtype))
        require_memory(needed, self.device, f"keys and values of {rows} sources of {tokens} tokens")
        place = torch.arange(tokens, device=self.device)
        mask = torch.zeros(rows, 1, 1, tokens, device=self.device, dtype=self.dtype)
        mask.masked_fill_((place >= source.length[:, None])[:, None, None], float("-inf"))
        found = self.encoder(self._enter(source.tokens, place), mask)
        blocks = cast("list[CrossBlock]", self.blocks)
        cache.write_source(torch.stack([block.source_kv(found) for block in blocks]), mask)

    def layers(self, x: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None) -> Tensor:
        assert isinstance(cache, CrossCache)
        return self._through(x, SourceAttention(positions, cache, span, tree))

    def _finish(self, x: Tensor) -> Tensor:
        return x if self._scale is None else x * self._scale


class Encoder(nn.Module):
    """Reads whole sources: each token attends to all others of its source, with a bias by distance."""

    def __init__(self, shape: ModelShape, sizes: EncoderShape) -> None:
        super().__init__()
        self.sizes = sizes
        self.blocks = nn.ModuleList(Block(replace(shape, layers=sizes.layers), layer) for layer in range(sizes.layers))
        self.norm = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.distances = nn.Embedding(sizes.buckets, shape.heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Embedded tokens [B, R, C] and -inf where a source has ended [B, 1, 1, R] -> what was found [B, R, C]."""
        place = torch.arange(x.shape[1], device=x.device)
        ahead = place - place[:, None]
        half = self.sizes.buckets // 2  # for what lies behind, half for what lies ahead
        buckets = _buckets(ahead.abs(), half, self.sizes.farthest) + half * (ahead > 0)
        attention = BiasedAttention(_biases(self.distances, buckets) + mask)
        for block in self.blocks:
            x = block(x, attention)
        found: Tensor = self.norm(x)
        return found


class CrossBlock(Block):
    """A decoder's block that also attends to the source; skipping its attention skips both."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__(shape, layer)
        width = shape.heads * shape.head_dim
        self.cross_norm = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.cross_q = Projection(width, shape.d_model, bias=False)
        self.cross_kv = Projection(2 * width, shape.d_model, bias=False)
        self.cross_out = Projection(shape.d_model, width, bias=False)

    def forward(self, x: Tensor, attention: Attention, skips: tuple[bool, bool] = (False, False)) -> Tensor:
        assert isinstance(attention, SourceAttention)
        if not skips[0]:
            x = x + self.attend(self.attn_norm(x), attention)
            x = x + self.attend_source(self.cross_norm(x), attention)
        return x if skips[1] else x + self.feed(self.ffn_norm(x))

    def attend_source(self, x: Tensor, attention: "SourceAttention") -> Tensor:
        q = self.cross_q(x).view(*x.shape[:2], self.shape.heads, self.shape.head_dim)
        out: Tensor = self.cross_out(attention.mix_source(self.layer, q).flatten(2))
        return out

    def source_kv(self, found: Tensor) -> Tensor:
        """What the encoder found [B, R, C] -> keys and values [2, B, H, R, D]."""
        kv: Tensor = self.cross_kv(found).view(*found.shape[:2], 2, self.shape.heads, self.shape.head_dim)
        return kv.permute(2, 0, 3, 1, 4)


class BiasedAttention:
    """Tokens of a pass attend to each other."""

    rotation: tuple[Tensor, Tensor] | None = None

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask  # [B, H, T, S] bias, -inf where a token must not look

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return _attend(q, keys.transpose(1, 2), values.transpose(1, 2), self._mask)


class SourceAttention:
    """Tokens join a cache and attend to its first `span` slots, each up to its own, with a bias by distance; and to the
    source.
    """

    rotation: tuple[Tensor, Tensor] | None = None

    def __init__(self, positions: Tensor, cache: CrossCache, span: int, tree: TreePass | None) -> None:
        assert cache.source is not None
        self._cache, self._span = cache, span
        self._source, self._source_mask = cache.source
        self._addresses = cache.addresses(positions if tree is None else tree.slots)
        there = torch.arange(span, device=positions.device) if tree is None else tree.slot_positions(span)
        back = positions[..., None] - there  # [B, T, S]
        hidden = back < 0 if tree is None else tree.hidden(span, None)
        biases = cache.biases[:, back.clamp(min=0)].transpose(0, 1)
        self._mask = biases.masked_fill(hidden[:, None], float("-inf"))

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(layer, self._addresses, keys, values)
        return _attend(q, *self._cache.read(layer, self._span), self._mask)

    def mix_source(self, layer: int, q: Tensor) -> Tensor:
        """Queries [B, T, H, D] -> mixed values of the source [B, T, H, D]."""
        keys, values = self._source[layer]
        return _attend(q, keys, values, self._source_mask)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, T, H, D], keys and values [B, H, S, D] -> [B, T, H, D]; T5 does not scale scores."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, scale=1.0).transpose(1, 2)


def _biases(table: nn.Embedding, buckets: Tensor) -> Tensor:
    """A bias for each head, [H, …], of buckets […]."""
    return table.weight.T[:, buckets]


def _buckets(away: Tensor, count: int, farthest: int) -> Tensor:
    """Which of `count` buckets distances fall into: half of them are for one distance each, the others ever wider.

    The arithmetic is transformers', step by step, so that none falls on the other side of a border.
    """
    near = count // 2
    wide = near + (torch.log(away.clamp(min=1).float() / near) / math.log(farthest / near) * (count - near)).long()
    return torch.where(away < near, away, wide.clamp(max=count - 1))
