"""A decoder's layers as one call of the C kernel; `Decoder.layers` is its reference."""

import ctypes
from collections.abc import Collection

import torch
from torch import Tensor, nn

from shallowdraft.kernels import cpu
from shallowdraft.models.cache import KVCache
from shallowdraft.models.tree import TreePass
from shallowdraft.shapes.shape import ModelShape


class NativeLayers:
    """The packed blocks of a decoder, held by address: the decoder must outlive this object."""

    def __init__(
        self, shape: ModelShape, blocks: nn.ModuleList, norm: nn.Module | None, skips: Collection[int] = ()
    ) -> None:
        # SKIP_ATTENTION and SKIP_FFN of cpu_vectors.h
        skipped = ((2 * layer in skips) + 2 * (2 * layer + 1 in skips) for layer in range(shape.layers))
        self._layers = (cpu.LayerWeights * shape.layers)(*map(_layer, blocks, shape.windows(), skipped))
        self._model = cpu.DecoderWeights(
            shape.layers,
            shape.d_model,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.ffn,
            shape.gated,
            cpu.ACTIVATIONS[shape.activation],
            shape.post_norm,
            shape.norm_eps,
            self._layers,
            _norm(norm),
        )
        heads = 2 * shape.heads + 2 * shape.kv_heads
        self._floats_per_row = shape.d_model + heads * shape.head_dim + shape.ffn

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache, tree: TreePass | None = None) -> Tensor:
        """Run all layers on embedded tokens [B, T, C] at positions [B, T]; the result may overwrite x."""
        library = cpu.library()
        assert library is not None
        rows, tokens, _ = x.shape
        x, positions = x.contiguous(), positions.contiguous()
        threads = torch.get_num_threads()
        scratch = self._scratch(rows * tokens, cache, threads)
        library.forward(
            ctypes.byref(self._model),
            x.data_ptr(),
            positions.data_ptr(),
            None if tree is None else ctypes.byref(_tree(tree)),
            rows,
            tokens,
            *_addresses(cache),
            scratch.data_ptr(),
            threads,
        )
        return x

    def decode(
        self,
        embedding: Tensor,
        head: cpu.PackedWeight,
        vocab: int,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """Continue tokens [B, T] greedily in one call: new tokens [B, steps] and the logit of each.

        They are chosen among the first `vocab` outputs of the head.
        """
        library = cpu.library()
        assert library is not None
        (rows, count), width = tokens.shape, embedding.shape[1]
        tokens, positions = tokens.contiguous(), positions.contiguous()
        threads = torch.get_num_threads()
        drafted, largest = tokens.new_empty(rows, steps), embedding.new_empty(rows, steps)
        floats = embedding.new_empty(rows * (count * width + width + head.outputs) + threads * rows)
        integers = tokens.new_empty(rows * count + threads * rows)
        scratch = self._scratch(rows * count, cache, threads)
        library.decode(
            ctypes.byref(self._model),
            embedding.data_ptr(),
            len(embedding),
            ctypes.byref(head),
            vocab,
            tokens.data_ptr(),
            positions.data_ptr(),
            rows,
            count,
            steps,
            drafted.data_ptr(),
            largest.data_ptr(),
            *_addresses(cache),
            floats.data_ptr(),
            integers.data_ptr(),
            scratch.data_ptr(),
            threads,
        )
        return drafted, largest

    def commit_greedy(
        self,
        embedding: Tensor,
        head: cpu.PackedWeight,
        proposed: Tensor,
        drafted: Tensor | None,
        tokens: Tensor,
        length: Tensor,
        limit: Tensor,
        cache: KVCache,
        not_finite: int,
    ) -> Tensor:
        """Run the pass, verify greedily and commit, in one call; the result is that of `gpu_choice.commit_greedy`."""
        library = cpu.library()
        assert library is not None
        (rows, count), width = proposed.shape, embedding.shape[1]
        assert all(tensor.is_contiguous() for tensor in (tokens, length, limit))
        proposed, drafted = proposed.contiguous(), None if drafted is None else drafted.float().contiguous()
        pass_rows, threads = rows * (count + 1), torch.get_num_threads()
        packed = tokens.new_empty(rows, count + 2)
        floats = embedding.new_empty(pass_rows * (width + head.outputs + threads))
        integers = tokens.new_empty(pass_rows * (1 + threads))
        scratch = self._scratch(pass_rows, cache, threads)
        library.commit_greedy(
            ctypes.byref(self._model),
            embedding.data_ptr(),
            len(embedding),
            ctypes.byref(head),
            proposed.data_ptr(),
            None if drafted is None else drafted.data_ptr(),
            rows,
            count,
            tokens.data_ptr(),
            tokens.shape[1],
            length.data_ptr(),
            limit.data_ptr(),
            not_finite,
            packed.data_ptr(),
            *_addresses(cache),
            floats.data_ptr(),
            integers.data_ptr(),
            scratch.data_ptr(),
            threads,
        )
        return packed

    def _scratch(self, rows: int, cache: KVCache, threads: int) -> Tensor:
        """Allocate the memory that `run_layers` of cpu.c asks for."""
        floats = rows * self._floats_per_row + threads * cpu.QUERIES * (cache.slots + cpu.lanes())
        return torch.empty(floats, dtype=torch.float32)


def _addresses(cache: KVCache) -> tuple[int, int, int | None, int | None]:
    """Return the arguments for a cache: address of keys and values, slots, addresses of cosines and sines."""
    cos, sin = (None, None) if cache.rope is None else (table.data_ptr() for table in cache.rope)
    return cache.kv.data_ptr(), cache.slots, cos, sin


def _tree(tree: TreePass) -> cpu.TreeNodes:
    assert tree.base.is_contiguous()
    return cpu.TreeNodes(*(part.data_ptr() for part in (tree.base, tree.nodes, tree.seen, tree.depths)))


def _layer(block: nn.Module, window: int | None, skips: int) -> cpu.LayerWeights:
    """Return a block's weights by address."""
    norms = (_norm(getattr(block, name)) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm"))
    products = (getattr(block, name).product() for name in ("qkv", "out", "up", "down"))
    return cpu.LayerWeights(*norms, *products, window or 0, skips)


def _norm(norm: nn.Module | None) -> cpu.NormWeights:
    if norm is None:
        return cpu.NormWeights(None, None)
    bias = getattr(norm, "bias", None)
    weight = norm.get_parameter("weight")
    return cpu.NormWeights(weight.data_ptr(), None if bias is None else bias.data_ptr())
