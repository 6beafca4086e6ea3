"""One decoder for every supported family, built from a shape.

Shapes: B batch rows, T tokens of a pass, C d_model, H query heads, G key/value heads, D head width, S attended slots,
V vocabulary, d proposed tokens.
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
from shallowdraft.models.cache import EncoderInput, KVCache, rope_tables
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
    """The way in which the tokens of a pass attend to each other and to earlier ones."""

    rotation: tuple[Tensor, Tensor] | None
    """Cosines and signed sines of the rotary positions, [B, T, 1, D] or [T, 1, D]."""

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with queries [B, T, H, D] to keys and values [B, T, G, D]: mixed values [B, T, H, D]."""


class Decoder(nn.Module):
    """A decoder-only model: tokens at positions of a KV cache to hidden states, which `head` turns into logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = self.local_shape = shape
        """Shapes of the model, and of this process's part of it."""
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
        """Arguments it was loaded with: path, dtype, device, whether it is to be trained."""
        self.skips: frozenset[int] = frozenset()
        """Parts that are skipped: 2 i is the attention of layer i, 2 i + 1 its FFN."""
        self.recompute = False
        """Whether training computes a block's activations again in the backward pass instead of keeping them."""

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
        """Return an empty KV cache for this process's part of the model."""
        return KVCache(self.local_shape, rows, slots, device=self.device, dtype=self.dtype)

    def read_source(self, source: EncoderInput | None, cache: KVCache) -> None:
        """Encode a source for the continuations in this cache; a model without an encoder has none."""

    def broadcast(self, *values: Tensor | None) -> None:
        """Overwrite tensors with those of the first process, in a model that is split over several."""

    def broadcast_s(self, seconds: float) -> float:
        """Return the first process's measurement of a time."""
        return seconds

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None
    ) -> Tensor:
        """Return hidden states [B, T, C] of tokens [B, T] at positions [B, T], and add them to the cache.

        They attend to the cache's first `span` slots. They follow one another, or are the nodes of a tree's pass.
        """
        if tree is None and (fast := self._fused_for(tokens)):
            return self._projected(self._normed(fast(self._embedded(tokens, positions, fast), positions, cache)))
        x = self._embedded(tokens, positions)
        if self.native is not None:
            return self._projected(self.native(x, positions, cache, tree))
        return self._projected(self.layers(x, positions, cache, span, tree))

    def layers(self, x: Tensor, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None = None) -> Tensor:
        """Run every block and the final norm with PyTorch's own operations: the reference of all kernels."""
        return self._run_blocks(x, CachedAttention(self.shape, positions, cache, span, tree))

    def choose(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, vocab: int, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the largest of the first `vocab` logits after every token and its id, [B, T] each.

        With `last`, only those after the last token, [B, 1] each.
        """
        if fast := self._fused_for(tokens):
            x = fast(self._embedded(tokens, positions, fast), positions, cache)
            return fast.largest(x[:, -1:] if last else x, min(vocab, self.shape.vocab))
        hidden = self(tokens, positions, cache, span)
        best, token = self.head(hidden[:, -1:] if last else hidden)[..., :vocab].max(-1)
        return best, token

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, span: int, steps: int, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Continue tokens [B, T] greedily with the first `vocab` ids: new tokens [B, steps] and the logit of each."""
        if kernel := self._native_from_tokens:
            weight = self.embed.weight.detach()
            vocab = min(vocab, self.shape.vocab)
            return kernel.decode(weight, self.head.product(), vocab, tokens, positions, cache, steps)
        drafted, largest = [], []
        later = positions[:, -1:] + torch.arange(1, steps + 1, device=positions.device)[:, None, None]
        for step in range(steps):
            best, tokens = self.choose(tokens, positions, cache, span, vocab, last=True)
            drafted.append(tokens)
            largest.append(best)
            positions = later[step]
        return torch.cat(drafted, 1), torch.cat(largest, 1)

    def commit_greedy(
        self,
        proposed: Tensor,
        drafted: Tensor | None,
        tokens: Tensor,
        length: Tensor,
        limit: Tensor,
        cache: KVCache,
        not_finite: int,
    ) -> Tensor | None:
        """Run a verification pass over proposed [B, d], verify greedily and commit to tokens [B, S], in one call.

        The result is that of `kernels.gpu_choice.commit_greedy`; None where no kernel does all of it.
        """
        kernel = self._native_from_tokens
        if kernel is None:
            return None
        weights = self.embed.weight.detach(), self.head.product()
        return kernel.commit_greedy(*weights, proposed, drafted, tokens, length, limit, cache, not_finite)

    @property
    def _native_from_tokens(self) -> "native.NativeLayers | None":
        """The C kernel, if it can also embed tokens and choose the next ones."""
        return self.native if self.positions is None and self.project_in is None else None

    def read(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, T, C] of whole texts [B, T] without a cache: for training, with unpacked weights."""
        assert self.native is None, "a gated product in panels exists only inside a layer"
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._projected(
            self._run_blocks(self._embedded(tokens, positions), CausalAttention(self.shape, self.dtype, positions))
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, T, V] after each token of whole texts [B, T]."""
        logits: Tensor = self.head(self.read(tokens))
        return logits

    def _embedded(self, tokens: Tensor, positions: Tensor, fast: "fused.FusedLayers | None" = None) -> Tensor:
        """Return the embeddings [B, T, C] of tokens, with learned positions if the model has them."""
        # Tokens that only a target with a padded vocabulary has may take any row: the draft gives them probability 0.
        x: Tensor = (
            fast.embed(tokens, self.embed.weight) if fast else self.embed(tokens.clamp(max=self.shape.vocab - 1))
        )
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            # Positions past the table are those of tokens that are never emitted.
            x = x + self.positions(positions.clamp(max=self.shape.context - 1) + opt.POSITION_OFFSET)
        return x

    def _run_blocks(self, x: Tensor, attention: Attention) -> Tensor:
        """Run every block and the final norm on x [B, T, C]."""
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
        """Return the fused kernels if they support a pass over these tokens [B, T]."""
        return self.fused if self.fused and self.fused.supports(*tokens.shape) else None

    def _projected(self, x: Tensor) -> Tensor:
        return x if self.project_out is None else self.project_out(x)

    def pack(self, packing: Packing | None = None) -> "Decoder":
        """Prepare for decoding: on a CPU repack every weight for the fastest kernel, on a GPU use our kernels."""
        packing = best_packing(self.shape, self.dtype, self.device) if packing is None else packing
        for module in self.modules():
            if isinstance(module, Projection):
                module.pack(packing)
        self.packing = packing
        self._set_kernels()
        return self

    def _set_kernels(self) -> None:
        """Set the kernels that run all layers but the skipped parts."""
        if self.packing in ("panels", "int8") and self.device.type == "cpu" and not self.shape.encoder:
            assert self.shape.head_dim % cpu.lanes() == 0
            self.native = native.NativeLayers(self.shape, self.blocks, self.norm, self.skips)
        elif self.device.type == "cuda":
            self.fused = fused.fuse(self.shape, self.blocks, self.norm, self.head, self.dtype, self.skips)

    def skipping(self, skips: Collection[int]) -> "Decoder":
        """Return a decoder with the same weights that skips these parts; it may share a cache with the whole one."""
        if unknown := [part for part in skips if not 0 <= part < 2 * self.shape.layers]:
            raise OptionError(
                f"part {unknown[0]} cannot be skipped: {self.shape} has parts 0 to {2 * self.shape.layers - 1}"
            )
        view = copy.copy(self)
        view.skips = frozenset(skips)
        if self.native is not None or self.fused is not None:
            view._set_kernels()
        return view

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        if self.packing != "none":  # the kernel holds addresses of the weights
            raise OptionError(
                "a packed decoder cannot be moved or cast; load it again with the dtype and device that you need"
            )
        self.fused = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def dense_state(self) -> dict[str, Tensor]:
        """Return every parameter under its name in the layout, in its usual form, whether it is packed or not."""
        state = {}
        for name in self.shape.layout():
            module_name, _, parameter = name.rpartition(".")
            module = self.get_submodule(module_name)
            if isinstance(module, Projection):
                state[name] = getattr(module, f"dense_{parameter}")()
            else:
                state[name] = getattr(module, parameter).detach()
        return state


class Block(nn.Module):
    """A layer: attention and FFN, each added to the residual stream."""

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
        paired = shape.gated and shape.encoder is None  # only the C kernel of whole layers reads gates beside values
        self.up = Projection(width, shape.d_model, bias=shape.ffn_bias, gated=paired)
        self.down = Projection(shape.d_model, shape.ffn, bias=shape.ffn_bias)

    def forward(self, x: Tensor, attention: Attention, skips: tuple[bool, bool] = (False, False)) -> Tensor:
        """Run the block on x [B, T, C]; `skips` says whether to skip attention with its norm, and FFN with its norm."""
        post = self.shape.post_norm
        if not skips[0]:
            x = self.attn_norm(x + self.attend(x, attention)) if post else x + self.attend(self.attn_norm(x), attention)
        if not skips[1]:
            x = self.ffn_norm(x + self.feed(x)) if post else x + self.feed(self.ffn_norm(x))
        return x

    def attend(self, x: Tensor, attention: Attention) -> Tensor:
        """Return what attention adds to the residual stream, [B, T, C]."""
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
        """Return what the FFN adds to the residual stream, [B, T, C]."""
        up: Tensor = self.up(x)
        if self.shape.gated:
            gate, up = up.chunk(2, -1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(up)
        down: Tensor = self.down(inner)
        return down


class CachedAttention:
    """Attention of a pass that is added to a KV cache: each token attends to `span` slots, up to its own position."""

    def __init__(self, shape: ModelShape, positions: Tensor, cache: KVCache, span: int, tree: TreePass | None) -> None:
        self._cache, self._span = cache, span
        self._addresses = cache.addresses(positions if tree is None else tree.slots)
        groups = shape.heads // shape.kv_heads
        masked = partial(_masked, positions) if tree is None else tree.masked
        self._masks = {
            window: _mask(masked(span, window)[:, None], cache.kv.dtype).repeat(1, 1, groups, 1)
            for window in set(shape.windows())
        }
        tables = cache.rope
        self.rotation = None if tables is None else (tables[0][positions][:, :, None], tables[1][positions][:, :, None])

    def mix(self, layer: int, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, tokens, heads, width = q.shape
        self._cache.write(layer, self._addresses, keys, values)
        # Queries that share a key/value head are laid out as more tokens of one head: [B, G, (H / G) * T, D].
        q = q.transpose(1, 2).reshape(rows, keys.shape[2], -1, width)
        mixed = F.scaled_dot_product_attention(q, *self._cache.read(layer, self._span), attn_mask=self._masks[window])
        return mixed.reshape(rows, heads, tokens, width).transpose(1, 2)


class CausalAttention:
    """Causal attention of whole texts, without a cache."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, positions: Tensor) -> None:
        count = len(positions)
        limited = {window for window in shape.windows() if window is not None and window < count}
        self._masks = {window: _mask(_masked(positions, count, window), dtype) for window in limited}
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
    """Apply rotary positions to heads [B, T, H, D]; the sine has the sign of the half that it is added to."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _norm(shape: ModelShape, width: int) -> nn.Module:
    return nn.LayerNorm(width, shape.norm_eps) if shape.layer_norm else nn.RMSNorm(width, shape.norm_eps)


def _masked(positions: Tensor, span: int, window: int | None) -> Tensor:
    """Return [..., T, span]: which slots a token at positions [..., T] must not attend to.

    It attends to its own slot and those before it, `window` slots in all.
    """
    slots, own = torch.arange(span, device=positions.device), positions[..., None]
    masked = slots > own
    if window is not None:
        masked |= slots <= own - window
    return masked


def _mask(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -inf where `masked` is true, else 0."""
    return torch.zeros(masked.shape, device=masked.device, dtype=dtype).masked_fill_(masked, float("-inf"))
