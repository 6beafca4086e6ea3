"""Triton kernels for passes over few tokens, where reading the weights is all that should take time.

Shapes: R rows (tokens of a pass), N outputs, K inputs, V vocabulary, B texts, T tokens of a text's pass, H query heads,
G key/value heads, D head width, S slots. Every kernel may start before the one that feeds it has ended
(programmatic dependent launch): it does what it can without its input, then waits.
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

SPLIT_SLOTS = 64  # attention is split over the cache into parts of at least so many slots, read at once
JOINED = 8192  # numbers that are joined at once
GATED = "gated"  # silu(first half) * second half
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3}
LINE_BYTES = 128  # of the L2 cache


def power_of_two(size: int) -> int:
    """The smallest that is not smaller."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Chip:
    """What the kernels need to know of a GPU; by default an H200."""

    processors: int = 132
    shared_memory: int = 232_448
    """Bytes that the tiles in flight of a product may take."""
    early: bool = True
    """Whether a kernel may start before the one before it has ended."""


@cache
def chip(device: torch.device) -> Chip:
    """That GPU; a CPU, which interprets, is taken for one that starts nothing early."""
    if device.type != "cuda":
        return Chip(early=False)
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return Chip(found["multiprocessor_count"], found["max_shared_mem"], early)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    dot: bool
    """Whether tensor cores multiply."""
    lines: int = 0
    """Of each weight row, so many cache lines are asked for before the input is there."""
    last: bool = False
    """Whether the next kernel may start only once this one has read its weight."""
    ahead: bool = False
    """Whether the first tile of the weight is read before the input is there; not with tensor cores."""


def stamp(spent: Tensor, sign: int) -> None:
    """Add the GPU's clock in nanoseconds to an int64 number (sign 1), or take it away (-1)."""
    gpu_jit.stamp[(1,)](spent, sign, num_warps=1)


def embed(tokens: Tensor, table: Tensor, *, pdl: bool = False) -> Tensor:
    """Tokens [B, T] -> their rows [B, T, C] of a table [V, C]; one that it lacks has the last."""
    vocab, width = table.shape
    x = table.new_empty(*tokens.shape, width)
    gpu_jit.embed[(tokens.numel(),)](
        tokens.contiguous(), table, x, vocab, width, power_of_two(width), pdl, **early(pdl)
    )
    return x


@dataclass(frozen=True)
class Weight:
    """A weight as the kernels take it."""

    matrix: Tensor  # [N, K]
    scales: Tensor | None = None
    """[N] of 8-bit numbers."""
    bias: Tensor | None = None
    """[N]; what a LayerNorm before it adds is in it."""
    shift: Tensor | None = None
    """[N] what the mean that a LayerNorm before it takes away is multiplied with."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm where the weight that follows has a shift."""

    gain: Tensor
    eps: float


def product(
    x: Tensor,
    weight: Weight,
    tiling: Tiling,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Rows x [R, K] times a weight [N, K] -> [R, N], or [R, N / 2] where the first half gates the second ("gated")."""
    outputs = weight.matrix.shape[0] // (2 if activation == GATED else 1)
    y = x.new_empty(x.shape[0], outputs)
    _launch(x, weight, tiling, outputs, y, norm=norm, activation=activation, residual=residual, pdl=pdl)
    return y


def largest(
    x: Tensor, weight: Weight, tiling: Tiling, counted: int, *, norm: Norm | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """The largest of the first `counted` outputs of each row, and which it is: [R] each."""
    rows, outputs = x.shape[0], weight.matrix.shape[0]
    tiles = triton.cdiv(outputs, tiling.outputs)
    best = torch.empty(rows, tiles, device=x.device)
    choice = torch.empty(rows, tiles, device=x.device, dtype=torch.int32)
    _launch(x, weight, tiling, outputs, best=(best, choice), counted=counted, norm=norm, pdl=pdl)
    logit, token = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device, dtype=torch.int64)
    gpu_jit.pick[(rows,)](best, choice, logit, token, tiles, power_of_two(tiles), pdl, **early(pdl))
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
    norm: Norm | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pdl: bool,
) -> None:
    rows, inputs = x.shape
    assert x.is_contiguous()
    values, places = best or (x, x)
    gain, eps = (norm.gain, norm.eps) if norm else (None, 0.0)
    gpu_jit.product[(triton.cdiv(outputs, tiling.outputs),)](
        x, weight.matrix, weight.scales, weight.shift, gain, weight.bias, residual, y, values, places,
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
        **early(pdl),
    )  # fmt: skip


def _lines(weight: Tensor) -> int:
    """Cache lines of a weight row, down to a power of two."""
    lines = weight.shape[1] * weight.element_size() // LINE_BYTES
    return 1 << (lines.bit_length() - 1) if lines else 0


def early(pdl: bool) -> dict[str, bool]:
    """What a launch must say for that."""
    return {"launch_pdl": True} if pdl else {}


def splits(chip: Chip, texts: int, groups: int, slots: int) -> int:
    """Parts of a cache to attend to at once: enough to fill a GPU, each long enough to be worth it."""
    return max(1, min(2 * chip.processors // (texts * groups), -(-slots // SPLIT_SLOTS)))


def tiling(chip: Chip, weight_rows: int, inputs: int, rows: int, gated: bool) -> Tiling:
    """A good cut of a product of that size, from measurements on an H200 (docs/decisions/006-gpu-kernels.md)."""
    found = _tiling(weight_rows, inputs, rows, gated)
    width = max(16, power_of_two(rows)) + found.outputs * (2 if gated else 1)
    while found.dot and found.stages * width * found.inputs * 2 > chip.shared_memory:
        if found.stages > 2:
            found = replace(found, stages=found.stages - 1)
        else:
            found = replace(found, inputs=found.inputs // 2)
    return found


def _tiling(weight_rows: int, inputs: int, rows: int, gated: bool) -> Tiling:
    outputs = weight_rows // (2 if gated else 1)
    narrow = outputs < 2 * inputs and not gated  # back into the residual stream: few outputs, many inputs
    even = inputs % 1024 == 0
    if rows == 1:
        if narrow and outputs > 2048 and outputs % 2048:
            return Tiling(outputs=4 if outputs >= 4096 else 2, inputs=1024, warps=4, stages=1, dot=False, lines=16)
        if narrow and inputs > outputs:
            return Tiling(outputs=4, inputs=1024 if outputs > 2048 else 2048, warps=4, stages=1, dot=False, lines=8)
        if narrow and outputs > 2048:
            return Tiling(outputs=8, inputs=1024, warps=4, stages=1, dot=False, lines=16, ahead=True)
        if narrow:
            return Tiling(outputs=4, inputs=2048, warps=4, stages=1, dot=False, lines=16, ahead=True)
        if gated and even:
            return Tiling(outputs=4, inputs=1024, warps=4, stages=1, dot=False, ahead=True)
        if inputs <= 2048 or not even:
            return Tiling(outputs=4, inputs=512, warps=2, stages=3, dot=False, ahead=True)
        return Tiling(outputs=8, inputs=1024, warps=4, stages=1, dot=False, ahead=True)
    if rows == 2 and narrow and outputs < 4096:
        return Tiling(outputs=4, inputs=1024, warps=4, stages=1, dot=False, lines=16)
    if narrow and rows > 16:
        return Tiling(outputs=64, inputs=128, warps=4, stages=8, dot=True, last=True)
    if narrow and outputs < 8192:
        return Tiling(outputs=16, inputs=256, warps=2, stages=6, dot=True, last=True)
    if narrow:
        return Tiling(outputs=64, inputs=256, warps=4, stages=4, dot=True, last=True)
    if gated and inputs >= 8192 and rows <= 16:
        return Tiling(outputs=64, inputs=256, warps=4, stages=3, dot=True, last=True)
    if inputs <= 2048 and outputs < 16384 and rows <= 16:
        return Tiling(outputs=64, inputs=256, warps=4, stages=3, dot=True, last=gated)
    if gated or outputs >= 16384:
        return Tiling(outputs=128, inputs=128, warps=8, stages=3, dot=True, last=True)
    return Tiling(outputs=128, inputs=128, warps=8, stages=4, dot=True)


@dataclass(frozen=True)
class Heads:
    """What attention needs to know of a model."""

    queries: int
    groups: int
    width: int
    window: int | None
    eps: float


def attend(
    qkv: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    heads: Heads,
    *,
    gains: tuple[Tensor, Tensor] | None = None,
    counters: Tensor,
    splits: int,
    pdl: bool = False,
) -> Tensor:
    """A pass's qkv [B * T, (H + 2G) D] at positions [B, T] joins a layer's cache [B, G, S, D] -> mixed [B * T, H D]."""
    texts, tokens = positions.shape
    shared = heads.queries // heads.groups
    queries = power_of_two(shared * tokens)
    width = power_of_two(heads.width)
    mixed = qkv.new_empty(texts * tokens, heads.queries * heads.width)
    parts = texts * heads.groups * splits * max(16, queries) if splits > 1 else 0
    partial = torch.empty(parts, width, device=qkv.device)
    sizes = torch.empty(parts, 2, device=qkv.device)
    cos, sin = rope or (qkv, qkv)
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
        **early(pdl),
    )  # fmt: skip
    return mixed
