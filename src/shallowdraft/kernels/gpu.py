"""Triton kernels for passes over few tokens, where nothing but reading the weights should take time.

Shapes: R rows (tokens of a pass), N outputs, K inputs, V vocabulary, B texts, T tokens of a text's pass, H query heads,
G key/value heads, D head width, S slots. Every kernel may start before the one that computes its input has ended
(programmatic dependent launch, `pdl`): it reads or prefetches weights, then waits for its input.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from shallowdraft.errors import OptionError

try:
    import triton

    from shallowdraft.kernels import gpu_jit
except ImportError:
    raise OptionError("decoding on a GPU needs triton; install it (pip install triton), or use --device cpu") from None

SPLIT_SLOTS = 64  # least slots of the KV cache in a part that one program attends to; also the slots of a tile
JOINED = 8192  # numbers of partial results that a program joins at once
GATED = "gated"  # activation silu(first half) * second half
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3}  # numbers of the kernel
LINE_BYTES = 128  # of the L2 cache


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not smaller than `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU that the kernels depend on; by default an H200's."""

    processors: int = 132
    """Streaming multiprocessors."""
    shared_memory: int = 232_448
    """Bytes that the tiles in flight of a product may take."""
    early: bool = True
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch)."""


@cache
def chip(device: torch.device) -> Chip:
    """Return the properties of a GPU, or for a CPU (Triton's interpreter) an H200's without early starts."""
    if device.type != "cuda":
        return Chip(early=False)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return Chip(properties["multiprocessor_count"], properties["max_shared_mem"], early)


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch settings of a product."""

    outputs: int
    """Outputs that a program computes."""
    inputs: int
    """Inputs that it reads at once."""
    warps: int
    stages: int
    """Tiles of the weight in flight at once."""
    dot: bool
    """Whether tensor cores multiply."""
    lines: int = 0
    """Cache lines of each weight row that are prefetched before the input is ready."""
    last: bool = False
    """Whether the next kernel may start only once this one has read its weight."""
    ahead: bool = False
    """Whether the first tile of the weight is read before the input is ready; not with tensor cores."""


def stamp(spent: Tensor, sign: int) -> None:
    """Add the GPU's clock in nanoseconds to an int64 number (sign 1), or subtract it (-1)."""
    gpu_jit.stamp[(1,)](spent, sign, num_warps=1)


def embed(tokens: Tensor, table: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the rows [B, T, C] of table [V, C] for tokens [B, T]; a token past its end has the last row."""
    vocab, width = table.shape
    x = table.new_empty(*tokens.shape, width)
    gpu_jit.embed[(tokens.numel(),)](
        tokens.contiguous(), table, x, vocab, width, power_of_two(width), pdl, **launch_options(pdl)
    )
    return x


@dataclass(frozen=True)
class Weight:
    """A weight in the form that the kernels read, with the effect of a LayerNorm before it worked in."""

    matrix: Tensor  # [N, K]
    scales: Tensor | None = None
    """[N], of a matrix of 8-bit integers."""
    bias: Tensor | None = None
    """[N]; a LayerNorm's bias adds matrix @ bias to it."""
    shift: Tensor | None = None
    """[N]; matrix @ gain of a LayerNorm: the mean of a row times this is subtracted from its outputs."""


@dataclass(frozen=True)
class InputNorm:
    """RMSNorm of a product's input, or LayerNorm if the weight has a shift."""

    gain: Tensor
    eps: float


def product(
    x: Tensor,
    weight: Weight,
    tiling: Tiling,
    *,
    norm: InputNorm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Multiply x [R, K] with a weight [N, K]: [R, N], or [R, N / 2] if the first half gates the second (GATED).

    The input's norm, bias, activation and the residual [R, N] to add are part of the same kernel.
    """
    outputs = weight.matrix.shape[0] // (2 if activation == GATED else 1)
    y = x.new_empty(x.shape[0], outputs)
    _launch(x, weight, tiling, outputs, y, norm=norm, activation=activation, residual=residual, pdl=pdl)
    return y


def largest(
    x: Tensor, weight: Weight, tiling: Tiling, counted: int, *, norm: InputNorm | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the largest of the first `counted` outputs of each row of x [R, K], and its index: [R] each."""
    rows, outputs = x.shape[0], weight.matrix.shape[0]
    tiles = triton.cdiv(outputs, tiling.outputs)
    best = torch.empty(rows, tiles, device=x.device)
    choice = torch.empty(rows, tiles, device=x.device, dtype=torch.int32)
    _launch(x, weight, tiling, outputs, best=(best, choice), counted=counted, norm=norm, pdl=pdl)
    logit, token = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device, dtype=torch.int64)
    gpu_jit.pick[(rows,)](best, choice, logit, token, tiles, power_of_two(tiles), pdl, **launch_options(pdl))
    return logit, token


def _launch(
    x: Tensor,
    weight: Weight,
    tiling: Tiling,
    outputs: int,
    y: Tensor | None = None,
    best: tuple[Tensor, Tensor] | None = None,
    counted: int = 0,
    *,
    norm: InputNorm | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pdl: bool,
) -> None:
    """Launch the product, one program a tile of outputs; results go to y [R, outputs] or to `best` [R, tiles] each."""
    rows, inputs = x.shape
    assert x.is_contiguous()
    values, indices = best or (x, x)  # stand-ins where unused
    gain, eps = (norm.gain, norm.eps) if norm else (None, 0.0)
    gpu_jit.product[(triton.cdiv(outputs, tiling.outputs),)](
        x, weight.matrix, weight.scales, weight.shift, gain, weight.bias, residual, y, values, indices,
        rows, outputs, inputs, counted, eps,
        ROWS=max(16 if tiling.dot else 1, power_of_two(rows)),
        BLOCK_N=tiling.outputs,
        BLOCK_K=tiling.inputs,
        DOT=tiling.dot,
        EVEN=inputs % tiling.inputs == 0,
        SCALED=weight.scales is not None,
        NORM=norm is not None,
        CENTRED=weight.shift is not None,
        BIAS=weight.bias is not None,
        GATED=activation == GATED,
        ACTIVATION=ACTIVATIONS.get(activation or "", 0),
        ADD=residual is not None,
        ARGMAX=best is not None,
        PREFETCH=min(tiling.lines, _lines(weight.matrix)),
        LINE=LINE_BYTES // weight.matrix.element_size(),
        PDL=pdl,
        LAST=tiling.last,
        AHEAD=tiling.ahead,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(pdl),
    )  # fmt: skip


def _lines(weight: Tensor) -> int:
    """Return the number of whole cache lines in a weight row, rounded down to a power of two."""
    lines = weight.shape[1] * weight.element_size() // LINE_BYTES
    return 1 << (lines.bit_length() - 1) if lines else 0


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the keyword of a launch that may start before the previous kernel has ended."""
    return {"launch_pdl": True} if pdl else {}


def splits(chip: Chip, texts: int, groups: int, slots: int) -> int:
    """Return into how many parts to split a cache for attention: enough to fill the GPU, none below SPLIT_SLOTS."""
    return max(1, min(2 * chip.processors // (texts * groups), -(-slots // SPLIT_SLOTS)))


def tiling(chip: Chip, weight_rows: int, inputs: int, rows: int, gated: bool) -> Tiling:
    """Choose the tiling of a product by rules from measurements on an H200 (docs/decisions/006-gpu-kernels.md).

    `weight_rows` counts the rows of the weight; a gated one has two for each output.
    """
    outputs = weight_rows // (2 if gated else 1)
    narrow = outputs < 2 * inputs and not gated  # back into the residual stream (out, down): few outputs, many inputs
    if rows == 1 and narrow:
        best = _narrow_for_one_row(outputs, inputs)
    elif rows == 1:
        best = _wide_for_one_row(inputs, gated)
    elif narrow:
        best = _narrow_for_rows(outputs, rows)
    else:
        best = _wide_for_rows(outputs, inputs, rows, gated)
    return _fitting(best, chip.shared_memory, rows, gated) if best.dot else best


def _fitting(tiling: Tiling, shared_memory: int, rows: int, gated: bool) -> Tiling:
    """Reduce stages, then inputs, until the 16-bit tiles in flight, of weight and input, fit into shared memory."""
    width = max(16, power_of_two(rows)) + tiling.outputs * (2 if gated else 1)
    while tiling.stages * width * tiling.inputs * 2 > shared_memory:
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        else:
            tiling = replace(tiling, inputs=tiling.inputs // 2)
    return tiling


def _narrow_for_one_row(outputs: int, inputs: int) -> Tiling:
    """Choose for one row and a narrow product: of its few outputs a program gets few, and lines are prefetched."""
    if outputs > 2048 and outputs % 2048:  # 2,560 or 5,120, say
        return Tiling(outputs=4 if outputs >= 4096 else 2, inputs=1024, warps=4, stages=1, dot=False, lines=16)
    if inputs > outputs:
        return Tiling(outputs=4, inputs=1024 if outputs > 2048 else 2048, warps=4, stages=1, dot=False, lines=8)
    if outputs > 2048:
        return Tiling(outputs=8, inputs=1024, warps=4, stages=1, dot=False, lines=16, ahead=True)
    return Tiling(outputs=4, inputs=2048, warps=4, stages=1, dot=False, lines=16, ahead=True)


def _wide_for_one_row(inputs: int, gated: bool) -> Tiling:
    """Choose for one row and any other product: with the first tile read ahead no lines need prefetching."""
    even = inputs % 1024 == 0  # tiles of 1024 inputs fit
    if gated and even:
        return Tiling(outputs=4, inputs=1024, warps=4, stages=1, dot=False, ahead=True)
    if inputs <= 2048 or not even:
        return Tiling(outputs=4, inputs=512, warps=2, stages=3, dot=False, ahead=True)
    return Tiling(outputs=8, inputs=1024, warps=4, stages=1, dot=False, ahead=True)


def _narrow_for_rows(outputs: int, rows: int) -> Tiling:
    """Choose for several rows and a narrow product: tensor cores, except for two rows and few outputs."""
    if rows == 2 and outputs < 4096:
        return Tiling(outputs=4, inputs=1024, warps=4, stages=1, dot=False, lines=16)
    if rows > 16:
        return Tiling(outputs=64, inputs=128, warps=4, stages=8, dot=True, last=True)
    if outputs < 8192:
        return Tiling(outputs=16, inputs=256, warps=2, stages=6, dot=True, last=True)
    return Tiling(outputs=64, inputs=256, warps=4, stages=4, dot=True, last=True)


def _wide_for_rows(outputs: int, inputs: int, rows: int, gated: bool) -> Tiling:
    """Choose for several rows and any other product: tensor cores, with tiles of 64 or 128 outputs."""
    if rows <= 16 and ((gated and inputs >= 8192) or (inputs <= 2048 and outputs < 16384)):
        # Attention comes after the product that is not gated (qkv), and reads its cache early: it must start early.
        return Tiling(outputs=64, inputs=256, warps=4, stages=3, dot=True, last=gated)
    if gated or outputs >= 16384:
        return Tiling(outputs=128, inputs=128, warps=8, stages=3, dot=True, last=True)
    return Tiling(outputs=128, inputs=128, warps=8, stages=4, dot=True)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a layer's attention."""

    queries: int
    """Query heads."""
    groups: int
    """Key/value heads."""
    width: int
    """Numbers in a head."""
    window: int | None
    """Positions that a token may attend to, its own included; None: all."""
    eps: float
    """Of the norms of queries and keys."""


def attend(
    qkv: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    heads: AttentionShape,
    *,
    gains: tuple[Tensor, Tensor] | None = None,
    counters: Tensor,
    splits: int,
    pdl: bool = False,
) -> Tensor:
    """Add the keys and values of a pass to a layer's KV cache, and attend to it: mixed values [B * T, H * D].

    `qkv` is [B * T, (H + 2 G) * D], `positions` [B, T], `keys` and `values` [B, G, S, D]; `rope` are tables of cosines
    and signed sines [positions, D], `gains` the norms of queries and keys [D]. `counters` [B * G] are 0, and left so.
    """
    texts, tokens = positions.shape
    shared = heads.queries // heads.groups
    queries = power_of_two(shared * tokens)
    width = power_of_two(heads.width)
    mixed = qkv.new_empty(texts * tokens, heads.queries * heads.width)
    # Results of the parts of a split cache, which the last of them joins.
    parts = texts * heads.groups * splits * max(16, queries) if splits > 1 else 0
    partial = torch.empty(parts, width, device=qkv.device)
    sizes = torch.empty(parts, 2, device=qkv.device)
    cos, sin = rope or (qkv, qkv)  # stand-ins where unused
    q_gain, k_gain = gains or (qkv, qkv)
    gpu_jit.attend[(texts, heads.groups, splits)](
        qkv, positions, keys, values, cos, sin, q_gain, k_gain, mixed, partial, sizes, counters, tokens, keys.shape[2],
        heads.width**-0.5, heads.eps,
        HEADS=heads.queries,
        GROUPS=heads.groups,
        D=heads.width,
        BLOCK_D=width,
        QUERIES=max(16, queries),
        BLOCK_S=SPLIT_SLOTS,
        BLOCK_T=max(16, power_of_two(tokens)),
        SPLITS=splits,
        PARTS=power_of_two(splits),
        JOIN=max(1, min(queries, JOINED // (width * power_of_two(splits)))),
        WINDOW=heads.window or 0,
        QK_NORM=gains is not None,
        ROPE=rope is not None,
        PDL=pdl,
        num_warps=4,
        num_stages=2,
        **launch_options(pdl),
    )  # fmt: skip
    return mixed
