"""The Triton code behind gpu.py; its launchers say what each kernel is for."""

import triton
import triton.language as tl


@triton.jit
def _prefetch(pointers):
    """Ask the L2 cache for lines."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tile(at, inside, EVEN: tl.constexpr):
    """Weights at pointers [n, k], zero where k is not inside; a mask costs time where every tile is whole."""
    if EVEN:
        weights = tl.load(at)
    else:
        weights = tl.load(at, mask=inside[None, :], other=0.0)
    return weights


@triton.jit
def _tiles(weight, row_of, at, outputs, inputs, EVEN: tl.constexpr, GATED: tl.constexpr):
    """Of the weight, and where it is gated of its second half."""
    w_at = weight + row_of[:, None] + at[None, :]
    w = _tile(w_at, at < inputs, EVEN)
    second = w
    if GATED:
        second = _tile(w_at + outputs.to(tl.int64) * inputs, at < inputs, EVEN)
    return w, second


@triton.jit
def _added(
    x, gain, w, second, r, at, rows, inputs, sums, gates, squares, means,
    NORM: tl.constexpr, CENTRED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Go on with the sums [R, n, k] of a product, and of the squares and numbers [R, k] of its rows."""
    inside = at < inputs
    v = tl.load(x + r[:, None] * inputs + at[None, :], mask=(r < rows)[:, None] & inside[None, :], other=0.0)
    v = v.to(tl.float32)
    if NORM:
        squares += v * v
        if CENTRED:
            means += v
        v *= tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gates += w.to(tl.float32)[None] * v[:, None]
    sums += second.to(tl.float32)[None] * v[:, None]
    return sums, gates, squares, means


@triton.jit
def stamp(spent, sign):
    """Add the GPU's time, or take it away."""
    tl.store(spent, tl.load(spent) + sign * tl.extra.cuda.globaltimer())


@triton.jit
def embed(tokens, table, x, vocab, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A token's row of the table; one token each.

    A pass begins here, and attention looks at positions and cache before it waits: nothing of this pass may start
    before all of the last one has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.load(tokens + at), vocab - 1)
    c = tl.arange(0, BLOCK)
    tl.store(x + at * width + c, tl.load(table + token * width + c, mask=c < width), mask=c < width)


@triton.jit
def product(
    x, weight, scales, shift, gain, bias, residual, y, best, choice, rows, outputs, inputs, counted, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, ARGMAX: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The norm of x [R, K] times Wᵀ, + bias; silu(first half) * second half or an activation; + residual -> y [R, N].

    Or the largest of each tile. The norm's gain is applied on the way in, its divisor at the end; LayerNorm's mean
    leaves with `shift`, the gain times each row of W.
    """
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    known = n < outputs
    row_of = tl.minimum(n, outputs - 1).to(tl.int64) * inputs
    k = tl.arange(0, BLOCK_K)
    if PDL:
        if not LAST:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            ahead = tl.arange(0, PREFETCH) * LINE
            _prefetch(weight + row_of[:, None] + ahead[None, :])
            if GATED:
                _prefetch(weight + outputs.to(tl.int64) * inputs + row_of[:, None] + ahead[None, :])
    if AHEAD:
        w, second = _tiles(weight, row_of, k, outputs, inputs, EVEN, GATED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    r = tl.arange(0, ROWS)
    real = r < rows
    if DOT:
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        gates = tl.zeros((BLOCK_N, ROWS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        means = tl.zeros((ROWS,), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            at = start + k
            inside = at < inputs
            v = tl.load(x + r[None, :] * inputs + at[:, None], mask=real[None, :] & inside[:, None], other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                if CENTRED:
                    means += tl.sum(wide, 0)
                g = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
                v = (wide * g[:, None]).to(v.dtype)
            w_at = weight + row_of[:, None] + at[None, :]
            w = _tile(w_at, inside, EVEN)
            if GATED:
                gates = tl.dot(w.to(v.dtype), v, gates, input_precision="ieee")
                w_at += outputs.to(tl.int64) * inputs
                w = _tile(w_at, inside, EVEN)
            sums = tl.dot(w.to(v.dtype), v, sums, input_precision="ieee")
        sums, gates = tl.trans(sums), tl.trans(gates)
    else:
        wide_sums = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_gates = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
        wide_means = tl.zeros((ROWS, BLOCK_K), tl.float32)
        if AHEAD:
            wide_sums, wide_gates, wide_squares, wide_means = _added(
                x, gain, w, second, r, k, rows, inputs, wide_sums, wide_gates, wide_squares, wide_means,
                NORM, CENTRED, GATED,
            )  # fmt: skip
        for start in range(BLOCK_K if AHEAD else 0, inputs, BLOCK_K):
            w, second = _tiles(weight, row_of, start + k, outputs, inputs, EVEN, GATED)
            wide_sums, wide_gates, wide_squares, wide_means = _added(
                x, gain, w, second, r, start + k, rows, inputs, wide_sums, wide_gates, wide_squares, wide_means,
                NORM, CENTRED, GATED,
            )  # fmt: skip
        sums, gates, squares = tl.sum(wide_sums, 2), tl.sum(wide_gates, 2), tl.sum(wide_squares, 1)
        means = tl.sum(wide_means, 1)
    if PDL and LAST:
        tl.extra.cuda.gdc_launch_dependents()
    if SCALED:
        first = tl.load(scales + n, mask=known, other=0.0)[None, :]
        if GATED:
            gates *= first
            sums *= tl.load(scales + outputs + n, mask=known, other=0.0)[None, :]
        else:
            sums *= first
    if CENTRED:  # no gated model has LayerNorm
        means /= inputs
        squares -= inputs * means * means
        sums -= means[:, None] * tl.load(shift + n, mask=known, other=0.0)[None, :]
    if NORM:
        scale = tl.rsqrt(squares / inputs + eps)[:, None]
        sums *= scale
        gates *= scale
    if BIAS:
        offset = tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gates += offset
            sums += tl.load(bias + outputs + n, mask=known, other=0.0).to(tl.float32)[None, :]
        else:
            sums += offset
    if GATED:
        sums *= gates / (1 + tl.exp(-gates))
    if ACTIVATION == 1:
        sums = tl.maximum(sums, 0.0)
    elif ACTIVATION == 2:
        sums *= 0.5 * (1 + tl.erf(sums * 0.7071067811865476))
    elif ACTIVATION == 3:
        steep = -1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
        sums /= 1 + tl.exp(tl.minimum(steep, 80.0))
    where = r[:, None] * outputs + n[None, :]
    kept = real[:, None] & known[None, :]
    if ADD:
        sums += tl.load(residual + where, mask=kept, other=0.0).to(tl.float32)
    if ARGMAX:
        sums = tl.where(sums == sums, sums, float("inf"))  # not a number: the largest, so that it is noticed
        sums = tl.where((n < counted)[None, :], sums, -float("inf"))
        tiles = tl.num_programs(0)
        tl.store(best + r * tiles + tile, tl.max(sums, 1), mask=real)
        tl.store(choice + r * tiles + tile, tile * BLOCK_N + tl.argmax(sums, 1), mask=real)
    else:
        tl.store(y + where, sums.to(y.dtype.element_ty), mask=kept)


@triton.jit
def pick(best, choice, logit, token, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest of each row's tiles, the first of equals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    found = tl.load(best + row * tiles + at, mask=at < tiles, other=-float("inf"))
    largest = tl.max(found, 0)
    where = tl.argmax(found, 0)
    tl.store(logit + row, largest)
    tl.store(token + row, tl.load(choice + row * tiles + where).to(tl.int64))


@triton.jit
def _turned(head, other, turn, cross, gain, d, eps, D: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr):
    """Heads [n, D], normed and rotated, in float32; `other` is the half that each number turns with."""
    head = head.to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(head * head, 1) / D + eps)[:, None]
        head *= scale * tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        across = other.to(tl.float32)
        if QK_NORM:
            across *= scale * tl.load(gain + (d + D // 2) % D).to(tl.float32)[None, :]
        head = head * turn.to(tl.float32) + across * cross.to(tl.float32)
    return head


@triton.jit
def _attended(q, k, v, seen, top, total, sums):
    """Go on with a softmax: queries [Q, D] over keys and values [S, D] where they are seen [Q, S]."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), -1e30)
    higher = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - higher)
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
    sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), sums


@triton.jit
def attend(
    qkv, positions, keys, values, cos, sin, q_gain, k_gain, mixed, partial, sizes, counters, tokens, slots, scale, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    JOIN: tl.constexpr, WINDOW: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate, write the new keys and values to the cache, and attend to it; one key/value head and part of it each.

    A text's tokens stand at consecutive positions. Its length decides how many parts there are; the one that comes last
    of a head's joins what they found. What lies in the cache was written by earlier passes: its first tile is read
    before the queries are there.
    """
    text, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared: tl.constexpr = HEADS // GROUPS
    width: tl.constexpr = (HEADS + 2 * GROUPS) * D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + text * tokens)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_S * BLOCK_S
    share = tl.maximum(tl.cdiv(tl.cdiv(first - begin, SPLITS), BLOCK_S), 1) * BLOCK_S
    parts = tl.maximum(tl.cdiv(first - begin, share), 1)
    if split >= parts:
        return
    begin += split * share
    end = tl.minimum(begin + share, first)

    d = tl.arange(0, BLOCK_D)
    within = (d < D)[None, :]
    across = ((d + D // 2) % D)[None, :]
    place = (text * GROUPS + group).to(tl.int64) * slots
    slot = begin + tl.arange(0, BLOCK_S)
    at = (place + slot)[:, None] * D + d[None, :]
    k = tl.load(keys + at, mask=(slot < end)[:, None] & within, other=0.0)
    v = tl.load(values + at, mask=(slot < end)[:, None] & within, other=0.0)
    i = tl.arange(0, QUERIES)
    t = i % tokens
    own = first + t
    asked = (i < shared * tokens)[:, None] & within
    n = tl.arange(0, BLOCK_T)
    new = (n < tokens)[:, None] & within & (split == 0)
    q_turn, q_cross, k_turn, k_cross = 0.0, 0.0, 0.0, 0.0
    if ROPE:
        q_row, k_row = own[:, None] * D + d[None, :], (first + n)[:, None] * D + d[None, :]
        q_turn, q_cross = tl.load(cos + q_row, mask=asked, other=0.0), tl.load(sin + q_row, mask=asked, other=0.0)
        k_turn, k_cross = tl.load(cos + k_row, mask=new, other=0.0), tl.load(sin + k_row, mask=new, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    q_at = qkv + ((text * tokens + t) * width + (group * shared + i // tokens) * D)[:, None]
    k_at = qkv + ((text * tokens + n) * width + (HEADS + group) * D)[:, None]
    q = tl.load(q_at + d[None, :], mask=asked, other=0.0)
    new_k = tl.load(k_at + d[None, :], mask=new, other=0.0)
    new_v = tl.load(k_at + GROUPS * D + d[None, :], mask=new, other=0.0)
    q_other, k_other = q, new_k
    if ROPE:
        q_other = tl.load(q_at + across, mask=asked, other=0.0)
        k_other = tl.load(k_at + across, mask=new, other=0.0)
    q = _turned(q, q_other, q_turn, q_cross, q_gain, d, eps, D, QK_NORM, ROPE)
    q = (q * (scale * 1.4426950408889634)).to(qkv.dtype.element_ty)  # exponentials to the base 2
    new_k = _turned(new_k, k_other, k_turn, k_cross, k_gain, d, eps, D, QK_NORM, ROPE).to(qkv.dtype.element_ty)
    new_at = (place + first + n)[:, None] * D + d[None, :]
    tl.store(keys + new_at, new_k, mask=new)
    tl.store(values + new_at, new_v, mask=new)

    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    if split == 0:
        seen = (n < tokens)[None, :] & (n[None, :] <= t[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > t[:, None] - WINDOW)
        top, total, sums = _attended(q, new_k, new_v, seen, top, total, sums)
    for _ in range(begin, end, BLOCK_S):
        seen = (slot < end)[None, :] & (i < shared * tokens)[:, None]
        if WINDOW > 0:
            seen = seen & (slot[None, :] > own[:, None] - WINDOW)
        top, total, sums = _attended(q, k, v, seen, top, total, sums)
        slot += BLOCK_S
        at += BLOCK_S * D
        k = tl.load(keys + at, mask=(slot < end)[:, None] & within, other=0.0)
        v = tl.load(values + at, mask=(slot < end)[:, None] & within, other=0.0)

    if parts == 1:
        out = mixed + ((text * tokens + t) * HEADS + group * shared + i // tokens)[:, None] * D + d[None, :]
        tl.store(out, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=asked)
    else:
        mine = text * GROUPS + group
        found_at = (mine * SPLITS + split) * QUERIES + i
        tl.store(partial + found_at[:, None] * BLOCK_D + d[None, :], sums, mask=asked)
        tl.store(sizes + 2 * found_at, top, mask=i < shared * tokens)
        tl.store(sizes + 2 * found_at + 1, total, mask=i < shared * tokens)
        tl.debug_barrier()
        if tl.atomic_add(counters + mine, 1, sem="acq_rel") == parts - 1:
            part = tl.arange(0, PARTS)[:, None]
            for start in range(0, shared * tokens, JOIN):
                query = start + tl.arange(0, JOIN)
                there = (part < parts) & (query < shared * tokens)[None, :]
                theirs = (mine * SPLITS + part) * QUERIES + query[None, :]
                tops = tl.load(sizes + 2 * theirs, mask=there, other=-1e30, cache_modifier=".cg")
                totals = tl.load(sizes + 2 * theirs + 1, mask=there, other=1.0, cache_modifier=".cg")
                their_sums = tl.load(
                    partial + theirs[:, :, None] * BLOCK_D + d[None, None, :],
                    mask=there[:, :, None] & within[None, :, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                grow = tl.exp2(tops - tl.max(tops, 0)[None, :])
                joined = tl.sum(their_sums * grow[:, :, None], 0) / tl.sum(totals * grow, 0)[:, None]
                row = (text * tokens + query % tokens) * HEADS + group * shared + query // tokens
                ok = (query < shared * tokens)[:, None] & within
                tl.store(mixed + row[:, None] * D + d[None, :], joined.to(mixed.dtype.element_ty), mask=ok)
            tl.store(counters + mine, 0)
