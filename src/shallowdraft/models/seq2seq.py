"""Encoder–decoders (T5): an encoder that reads a source text, and a decoder that also attends to the encoder's output.

Everything runs on PyTorch's own operations. Shapes: L layers, B batch rows, R tokens of a source, T tokens of a pass, C
d_model, H heads, D head width, S attended slots.
"""

import math
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.models.cache import CrossCache, EncoderInput, KVCache
from shallowdraft.models.decoder import Attention, Block, Decoder
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.projection import Projection
from shallowdraft.models.tree import TreePass
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.shapes.t5 import EncoderShape


class Seq2Seq(Decoder):
    """An encoder–decoder: a decoder whose cache also holds the keys and values of a source."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        assert shape.encoder is not None
        self.encoder = Encoder(shape, shape.encoder)
        self.blocks = nn.ModuleList(CrossBlock(shape, layer) for layer in range(shape.layers))
        self.distances = nn.Embedding(shape.encoder.buckets, shape.heads)
        self._scale = shape.d_model**-0.5 if shape.encoder.scaled else None

    def new_cache(self, rows: int, slots: int) -> CrossCache:
        distances, sizes = torch.arange(slots, device=self.device), self.encoder.sizes
        biases = _biases(self.distances, _buckets(distances, sizes.buckets, sizes.farthest))
        return CrossCache(self.shape, rows, slots, biases, device=self.device, dtype=self.dtype)

    def read_source(self, source: EncoderInput | None, cache: KVCache) -> None:
        assert source is not None
        assert isinstance(cache, CrossCache)
        rows, tokens = source.tokens.shape
        needed = rows * tokens * self.shape.kv_bytes_per_token(dtype_name(self.dtype))
        require_memory(needed, self.device, f"keys and values of {rows} sources of {tokens} tokens")
        positions = torch.arange(tokens, device=self.device)
        mask = torch.zeros(rows, 1, 1, tokens, device=self.device, dtype=self.dtype)
        mask.masked_fill_((positions >= source.length[:, None])[:, None, None], float("-inf"))
        encoded = self.encoder(self._embedded(source.tokens, positions), mask)
        blocks = cast("list[CrossBlock]", self.blocks)
        cache.write_source(torch.stack([block.source_kv(encoded) for block in blocks]), mask)

    def layers(self, x: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None) -> Tensor:
        assert isinstance(cache, CrossCache)
        return self._run_blocks(x, SourceAttention(positions, cache, span, tree))

    def _projected(self, x: Tensor) -> Tensor:
        return x if self._scale is None else x * self._scale


class Encoder(nn.Module):
    """A stack of blocks over whole sources: each token attends to all of its source, with a bias by distance."""

    def __init__(self, shape: ModelShape, sizes: EncoderShape) -> None:
        super().__init__()
        self.sizes = sizes
        self.blocks = nn.ModuleList(Block(replace(shape, layers=sizes.layers), layer) for layer in range(sizes.layers))
        self.norm = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.distances = nn.Embedding(sizes.buckets, shape.heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Encode embedded tokens [B, R, C], with a mask [B, 1, 1, R] of -inf beyond each source's end: [B, R, C]."""
        positions = torch.arange(x.shape[1], device=x.device)
        ahead = positions - positions[:, None]
        half = self.sizes.buckets // 2  # of the buckets are for earlier tokens, the others for later ones
        buckets = _buckets(ahead.abs(), half, self.sizes.farthest) + half * (ahead > 0)
        attention = BiasedAttention(_biases(self.distances, buckets) + mask)
        for block in self.blocks:
            x = block(x, attention)
        encoded: Tensor = self.norm(x)
        return encoded


class CrossBlock(Block):
    """A decoder's block that also attends to the source; if its attention is skipped, so is that to the source."""

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
        """Return what attention to the source adds to the residual stream, [B, T, C]."""
        q = self.cross_q(x).view(*x.shape[:2], self.shape.heads, self.shape.head_dim)
        out: Tensor = self.cross_out(attention.mix_source(self.layer, q).flatten(2))
        return out

    def source_kv(self, encoded: Tensor) -> Tensor:
        """Return the keys and values [2, B, H, R, D] of the encoder's output [B, R, C]."""
        kv: Tensor = self.cross_kv(encoded).view(*encoded.shape[:2], 2, self.shape.heads, self.shape.head_dim)
        return kv.permute(2, 0, 3, 1, 4)


class BiasedAttention:
    """Attention of the encoder: tokens of a pass attend to each other, with a bias."""

    rotation: tuple[Tensor, Tensor] | None = None

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask  # [B, H, T, S]: a bias, -inf where a token must not attend

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return _attend(q, keys.transpose(1, 2), values.transpose(1, 2), self._mask)


class SourceAttention:
    """Attention of the decoder: to the source, and to `span` slots of the cache up to a token's own, with a bias."""

    rotation: tuple[Tensor, Tensor] | None = None

    def __init__(self, positions: Tensor, cache: CrossCache, span: int, tree: TreePass | None) -> None:
        assert cache.source is not None
        self._cache, self._span = cache, span
        self._source, self._source_mask = cache.source
        self._addresses = cache.addresses(positions if tree is None else tree.slots)
        attended = torch.arange(span, device=positions.device) if tree is None else tree.slot_positions(span)
        distances = positions[..., None] - attended  # [B, T, S]
        masked = distances < 0 if tree is None else tree.masked(span, None)
        biases = cache.biases[:, distances.clamp(min=0)].transpose(0, 1)
        self._mask = biases.masked_fill(masked[:, None], float("-inf"))

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(layer, self._addresses, keys, values)
        return _attend(q, *self._cache.read(layer, self._span), self._mask)

    def mix_source(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries [B, T, H, D] to the source: mixed values [B, T, H, D]."""
        keys, values = self._source[layer]
        return _attend(q, keys, values, self._source_mask)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with queries [B, T, H, D] to keys and values [B, H, S, D]: [B, T, H, D]; T5 does not scale scores."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, scale=1.0).transpose(1, 2)


def _biases(table: nn.Embedding, buckets: Tensor) -> Tensor:
    """Return the bias of each head, [H, …], for buckets […]."""
    return table.weight.T[:, buckets]


def _buckets(distances: Tensor, count: int, farthest: int) -> Tensor:
    """Return which of `count` buckets each distance falls into.

    Half of them hold one distance each, the others grow with the logarithm. The arithmetic is transformers', step by
    step, so that no distance falls on the other side of a border.
    """
    near = count // 2
    ratio = torch.log(distances.clamp(min=1).float() / near) / math.log(farthest / near)
    wide = near + (ratio * (count - near)).long()
    return torch.where(distances < near, distances, wide.clamp(max=count - 1))
