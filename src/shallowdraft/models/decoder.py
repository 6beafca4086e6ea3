"""One decoder for every supported family, driven by a shape.

Shapes: B rows, T tokens of a pass, C d_model, H query heads, G key/value heads, D head width, S attended slots.
"""

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shallowdraft.errors import OptionError
from shallowdraft.kernels import cpu
from shallowdraft.models import fused, native
from shallowdraft.models.cache import KVCache, Source, rope_tables
from shallowdraft.models.projection import Packing, Projection, best_packing
from shallowdraft.models.tree import TreePass
from shallowdraft.shapes import opt
from shallowdraft.shapes.shape import ModelShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Attention(Protocol):
    """How the tokens of a pass look at each other and at what came before."""

    rotation: tuple[Tensor, Tensor] | None
    """cos and signed sin, [B, T, 1, D] or [T, 1, D]."""

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [B, T, H, D], keys and values [B, T, G, D] -> mixed values [B, T, H, D]."""


class Decoder(nn.Module):
    """Tokens at given positions of a cache -> hidden states; `head` turns those into logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = self.own = shape
        """Of the model, and of what this process has of it."""
        self.embed = nn.Embedding(shape.vocab, shape.embed_dim)
        places = shape.context + opt.POSITION_OFFSET
        self.positions = nn.Embedding(places, shape.d_model) if shape.learned_positions else None
        projected = shape.embed_dim != shape.d_model
        self.project_in = Projection(shape.d_model, shape.embed_dim, bias=False) if projected else None
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = _norm(shape, shape.d_model) if shape.final_norm else None
        self.project_out = Projection(shape.embed_dim, shape.d_model, bias=False) if projected else None
        self.head = Projection(shape.vocab, shape.embed_dim, bias=False)
        if shape.tied:
            self.tie()
        self.native: native.NativeLayers | None = None
        self.fused: fused.FusedLayers | None = None
        self.packing: Packing = "none"
        self.origin: tuple[str, str | torch.dtype, str, bool] | None = None
        """What it was loaded with: path, dtype, device, whether to be trained."""
        self.skips: frozenset[int] = frozenset()
        """Parts that are left out: 2 i is the attention of layer i, 2 i + 1 its FFN."""
        self.recompute = False
        """In training: compute a block's activations again on the way back instead of keeping them."""

    def tie(self) -> None:
        """Make the head's weight the embedding's."""
        self.head.weight = self.embed.weight  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache(self.own, rows, slots, device=self.device, dtype=self.dtype)

    def read_source(self, source: Source | None, cache: KVCache) -> None:
        """Make a cache ready for continuations of a source; without an encoder there is none."""

    def share(self, *values: Tensor | None) -> None:
        """Let every process that has a part of this model go on with the first one's values; alone it does already."""

    def shared_s(self, seconds: float) -> float:
        """The same for a time."""
        return seconds

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None
    ) -> Tensor:
        """Tokens [B, T] at positions [B, T], attending to the cache's first `span` slots -> hidden [B, T, C].

        They follow one another, or are the nodes of a tree and stand at its positions.
        """
        if tree is None and (fast := self._fused_for(tokens)):
            return self._finish(self._normed(fast(self._enter(tokens, positions, fast), positions, cache)))
        x = self._enter(tokens, positions)
        if self.native is not None:
            return self._finish(self.native(x, positions, cache, tree))
        return self._finish(self.layers(x, positions, cache, span, tree))

    def layers(self, x: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None) -> Tensor:
        """Every block and the final norm in PyTorch's own operations: the reference of the other kernels."""
        return self._through(x, CachedAttention(self.shape, positions, cache, span, tree))

    def choose(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, vocab: int, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The largest of the first `vocab` logits after every token, or the last, and its id: [B, T] or [B, 1] each."""
        if fast := self._fused_for(tokens):
            x = fast(self._enter(tokens, positions, fast), positions, cache)
            return fast.largest(x[:, -1:] if last else x, min(vocab, self.shape.vocab))
        hidden = self(tokens, positions, cache, span)
        best, token = self.head(hidden[:, -1:] if last else hidden)[..., :vocab].max(-1)
        return best, token

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, steps: int, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Continue tokens [B, T] greedily, of the first `vocab` ids -> (new ones [B, steps], the logit of each)."""
        if kernel := self._native_throughout:
            weight = self.embed.weight.detach()
            vocab = min(vocab, self.shape.vocab)
            return kernel.decode(weight, self.head.product(), vocab, tokens, positions, cache, steps)
        found, largest = [], []
        later = positions[:, -1:] + torch.arange(1, steps + 1, device=positions.device)[:, None, None]
        for step in range(steps):
            best, tokens = self.choose(tokens, positions, cache, span, vocab, last=True)
            found.append(tokens)
            largest.append(best)
            positions = later[step]
        return torch.cat(found, 1), torch.cat(largest, 1)

    def settle(
        self,
        proposed: Tensor,
        drafted: Tensor | None,
        tokens: Tensor,
        length: Tensor,
        limit: Tensor,
        cache: KVCache,
        unsound: int,
    ) -> Tensor | None:
        """A pass over what is proposed [B, d], greedy verification and commit to tokens [B, S], as in
        `kernels.gpu_choice.settle`; None where no kernel does all of it.
        """
        kernel = self._native_throughout
        if kernel is None:
            return None
        known = self.embed.weight.detach(), self.head.product()
        return kernel.settle(*known, proposed, drafted, tokens, length, limit, cache, unsound)

    @property
    def _native_throughout(self) -> "native.NativeLayers | None":
        """The C kernel, if it can go from tokens to tokens."""
        return self.native if self.positions is None and self.project_in is None else None

    def read(self, tokens: Tensor) -> Tensor:
        """Whole texts [B, T] without a cache -> hidden [B, T, C]: for training, before weights are packed for a CPU."""
        assert self.native is None, "a gated product in panels exists only inside a layer"
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._finish(
            self._through(self._enter(tokens, positions), CausalAttention(self.shape, self.dtype, positions))
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Whole texts [B, T] -> logits [B, T, V] of what follows each token."""
        found: Tensor = self.head(self.read(tokens))
        return found

    def _enter(self, tokens: Tensor, positions: Tensor, fast: "fused.FusedLayers | None" = None) -> Tensor:
        # A target may know more tokens than its draft (a padded vocabulary): those read some row; its q is 0 there.
        x: Tensor = (
            fast.embed(tokens, self.embed.weight) if fast else self.embed(tokens.clamp(max=self.shape.vocab - 1))
        )
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            # Positions past the table belong to tokens that are never emitted.
            x = x + self.positions(positions.clamp(max=self.shape.context - 1) + opt.POSITION_OFFSET)
        return x

    def _through(self, x: Tensor, attention: Attention) -> Tensor:
        for index, block in enumerate(self.blocks):
            skips = 2 * index in self.skips, 2 * index + 1 in self.skips
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, attention, skips, use_reentrant=False)
            else:
                x = block(x, attention, skips)
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def _fused_for(self, tokens: Tensor) -> "fused.FusedLayers | None":
        """The fused kernels, where a pass over these tokens is for them."""
        return self.fused if self.fused and self.fused.takes(*tokens.shape) else None

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.project_out is None else self.project_out(x)

    def pack(self, packing: Packing | None = None) -> "Decoder":
        """Make ready for decoding: on a CPU repack every weight the fastest way there is, on a GPU take our kernels."""
        packing = best_packing(self.shape, self.dtype, self.device) if packing is None else packing
        for module in self.modules():
            if isinstance(module, Projection):
                module.pack(packing)
        self.packing = packing
        self._take_kernels()
        return self

    def _take_kernels(self) -> None:
        """For whole layers, less what is skipped."""
        if self.packing in ("panels", "bytes") and self.device.type == "cpu" and not self.shape.encoder:
            assert self.shape.head_dim % cpu.lanes() == 0
            self.native = native.NativeLayers(self.shape, self.blocks, self.norm, self.skips)
        elif self.device.type == "cuda":
            self.fused = fused.fuse(self.shape, self.blocks, self.norm, self.head, self.dtype, self.skips)

    def skipping(self, skips: Collection[int]) -> "Decoder":
        """The same weights without some parts, which `skips` names; it may share a cache with the whole."""
        if wrong := [part for part in skips if not 0 <= part < 2 * self.shape.layers]:
            raise OptionError(
                f"part {wrong[0]} cannot be skipped: {self.shape} has parts 0 to {2 * self.shape.layers - 1}"
            )
        view = copy.copy(self)
        view.skips = frozenset(skips)
        if self.native is not None or self.fused is not None:
            view._take_kernels()
        return view

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        if self.packing != "none":  # the kernel knows the weights by address
            raise OptionError(
                "a packed decoder cannot be moved or cast; load it again with the dtype and device wanted"
            )
        self.fused = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def dense_state(self) -> dict[str, Tensor]:
        """Every parameter under its layout name, in its ordinary form, packed or not."""
        state = {}
        for name in self.shape.layout():
            owner = self.get_submodule(name.rpartition(".")[0])
            packed = isinstance(owner, Projection)
            kind = name.rpartition(".")[2]
            state[name] = getattr(owner, f"dense_{kind}")() if packed else getattr(owner, kind).detach()
        return state


class Block(nn.Module):
    """Attention and FFN around the residual stream."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.window = shape.windows()[layer]
        self.activation = _ACTIVATIONS[shape.activation]
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm = _norm(shape, shape.d_model)
        self.qkv = Projection(width + 2 * kv_width, shape.d_model, bias=shape.qkv_bias)
        self.q_norm = _norm(shape, shape.head_dim) if shape.qk_norm else None
        self.k_norm = _norm(shape, shape.head_dim) if shape.qk_norm else None
        self.out = Projection(shape.d_model, width, bias=shape.out_bias)
        self.ffn_norm = _norm(shape, shape.d_model)
        width = shape.ffn * (2 if shape.gated else 1)
        paired = shape.gated and shape.encoder is None  # gates beside values are for the kernel of whole layers
        self.up = Projection(width, shape.d_model, bias=shape.ffn_bias, gated=paired)
        self.down = Projection(shape.d_model, shape.ffn, bias=shape.ffn_bias)

    def forward(self, x: Tensor, attention: Attention, skips: tuple[bool, bool] = (False, False)) -> Tensor:
        """`skips`: attention and its norm, FFN and its norm."""
        post = self.shape.post_norm
        if not skips[0]:
            x = self.attn_norm(x + self.attend(x, attention)) if post else x + self.attend(self.attn_norm(x), attention)
        if not skips[1]:
            x = self.ffn_norm(x + self.feed(x)) if post else x + self.feed(self.ffn_norm(x))
        return x

    def attend(self, x: Tensor, attention: Attention) -> Tensor:
        rows, tokens, _ = x.shape
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = self.qkv(x).view(rows, tokens, heads + 2 * kv_heads, self.shape.head_dim)
        qk, values = qkv.split((heads + kv_heads, kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((heads, kv_heads), 2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        if attention.rotation:
            qk = rotate(qk, *attention.rotation)
        q, keys = qk.split((heads, kv_heads), 2)
        mixed = attention.mix(self.layer, self.window, q, keys, values)
        out: Tensor = self.out(mixed.reshape(rows, tokens, -1))
        return out

    def feed(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if self.shape.gated:
            gate, up = up.chunk(2, -1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(up)
        down: Tensor = self.down(inner)
        return down


class CachedAttention:
    """Tokens join a cache and attend to its first `span` slots, each up to its own position."""

    def __init__(self, shape: ModelShape, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None) -> None:
        self._cache, self._span = cache, span
        self._addresses = cache.addresses(positions if tree is None else tree.slots)
        groups = shape.heads // shape.kv_heads
        hidden = partial(_hidden, positions) if tree is None else tree.hidden
        self._masks = {
            window: _mask(hidden(span, window)[:, None], cache.kv.dtype).repeat(1, 1, groups, 1)
            for window in set(shape.windows())
        }
        tables = cache.rope
        self.rotation = None if tables is None else (tables[0][positions][:, :, None], tables[1][positions][:, :, None])

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, tokens, heads, width = q.shape
        self._cache.write(layer, self._addresses, keys, values)
        # Queries that share a key/value head stand in for more tokens of one head: [B, G, (H / G) * T, D].
        q = q.transpose(1, 2).reshape(rows, keys.shape[2], -1, width)
        mixed = F.scaled_dot_product_attention(q, *self._cache.read(layer, self._span), attn_mask=self._masks[window])
        return mixed.reshape(rows, heads, tokens, width).transpose(1, 2)


class CausalAttention:
    """Tokens of whole texts attend to what stands before them."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, positions: Tensor) -> None:
        count = len(positions)
        limited = {window for window in shape.windows() if window is not None and window < count}
        self._masks = {window: _mask(_hidden(positions, count, window), dtype) for window in limited}
        self.rotation = None
        if shape.rope:
            cos, sin = rope_tables(shape.rope, shape.head_dim, count, positions.device, dtype)
            self.rotation = cos[:, None], sin[:, None]

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mask = None if window is None else self._masks.get(window)
        q, keys, values = (heads.transpose(1, 2) for heads in (q, keys, values))
        grouped = q.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return mixed.transpose(1, 2)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on heads [B, T, H, D]; `sin` carries the sign of the half it lands on."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _norm(shape: ModelShape, width: int) -> nn.Module:
    return nn.LayerNorm(width, shape.norm_eps) if shape.layer_norm else nn.RMSNorm(width, shape.norm_eps)


def _hidden(positions: Tensor, span: int, window: int | None) -> Tensor:
    """Positions [..., T] -> [..., T, span]: a token sees up to `window` slots that end with its own, not the others."""
    slots, own = torch.arange(span, device=positions.device), positions[..., None]
    hidden = slots > own
    if window is not None:
        hidden |= slots <= own - window
    return hidden


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where hidden, else 0."""
    return torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(hidden, float("-inf"))
