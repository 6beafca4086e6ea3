"""The Triton code behind gpu.py; its launchers say what each kernel is for."""

import triton
import triton.language as tl


@triton.jit
def _enter(PDL: tl.constexpr):
    """Let the next kernel begin, and wait for what the one before has written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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
def stamp(spent, sign):
    """Add the GPU's time, or take it away."""
    tl.store(spent, tl.load(spent) + sign * tl.extra.cuda.globaltimer())


@triton.jit
def product(
    x, weight, gain, bias, residual, y, best, choice, rows, outputs, inputs, counted, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ARGMAX: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y [R, N] = norm(x [R, K]) Wᵀ, then + bias, silu(first half) * second half, + residual, or each tile's largest."""
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    known = n < outputs
    row_of = tl.minimum(n, outputs - 1).to(tl.int64) * inputs
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            ahead = tl.arange(0, PREFETCH) * 64
            _prefetch(weight + row_of[:, None] + ahead[None, :])
            if GATED:
                _prefetch(weight + outputs.to(tl.int64) * inputs + row_of[:, None] + ahead[None, :])
        tl.extra.cuda.gdc_wait()
    r = tl.arange(0, ROWS)
    real = r < rows
    if DOT:
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        gates = tl.zeros((BLOCK_N, ROWS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            at = start + k
            inside = at < inputs
            v = tl.load(x + r[None, :] * inputs + at[:, None], mask=real[None, :] & inside[:, None], other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                g = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
                v = (wide * g[:, None]).to(v.dtype)
            w_at = weight + row_of[:, None] + at[None, :]
            if EVEN:
                w = tl.load(w_at)
            else:
                w = tl.load(w_at, mask=inside[None, :], other=0.0)
            if GATED:
                gates = tl.dot(w, v, gates, input_precision="ieee")
                w_at += outputs.to(tl.int64) * inputs
                if EVEN:
                    w = tl.load(w_at)
                else:
                    w = tl.load(w_at, mask=inside[None, :], other=0.0)
            sums = tl.dot(w, v, sums, input_precision="ieee")
        sums, gates = tl.trans(sums), tl.trans(gates)
    else:
        wide_sums = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_gates = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            at = start + k
            inside = at < inputs
            w_at = weight + row_of[:, None] + at[None, :]
            if EVEN:
                w = tl.load(w_at)
            else:
                w = tl.load(w_at, mask=inside[None, :], other=0.0)
            if GATED:
                w_at += outputs.to(tl.int64) * inputs
                if EVEN:
                    second = tl.load(w_at)
                else:
                    second = tl.load(w_at, mask=inside[None, :], other=0.0)
            v = tl.load(x + r[:, None] * inputs + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            v = v.to(tl.float32)
            if NORM:
                wide_squares += v * v
                v *= tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                wide_gates += w.to(tl.float32)[None] * v[:, None]
                wide_sums += second.to(tl.float32)[None] * v[:, None]
            else:
                wide_sums += w.to(tl.float32)[None] * v[:, None]
        sums, gates, squares = tl.sum(wide_sums, 2), tl.sum(wide_gates, 2), tl.sum(wide_squares, 1)
    if NORM:
        scale = tl.rsqrt(squares / inputs + eps)[:, None]
        sums *= scale
        gates *= scale
    if BIAS:
        first = tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gates += first
            sums += tl.load(bias + outputs + n, mask=known, other=0.0).to(tl.float32)[None, :]
        else:
            sums += first
    if GATED:
        sums *= gates / (1 + tl.exp(-gates))
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
    _enter(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    found = tl.load(best + row * tiles + at, mask=at < tiles, other=-float("inf"))
    largest = tl.max(found, 0)
    where = tl.argmax(found, 0)
    tl.store(logit + row, largest)
    tl.store(token + row, tl.load(choice + row * tiles + where).to(tl.int64))


@triton.jit
def _turned(at, gain, cos, sin, d, ok, eps, D: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr):
    """Heads at pointers [n] -> normed and rotated [n, D] in float32; tables at pointers of their own."""
    head = tl.load(at[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
    across = (d + D // 2) % D
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(head * head, 1) / D + eps)[:, None]
        head *= scale * tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        other = tl.load(at[:, None] + across[None, :], mask=ok, other=0.0).to(tl.float32)
        if QK_NORM:
            other *= scale * tl.load(gain + across).to(tl.float32)[None, :]
        turn = tl.load(cos[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
        cross = tl.load(sin[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
        head = head * turn + other * cross
    return head


@triton.jit
def attend(
    qkv, positions, keys, values, cos, sin, q_gain, k_gain, mixed, partial, sizes, counters, next_weight,
    slots, scale, eps, next_lines,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate, write the new keys and values to the cache, and attend to it; one key/value head and part of it each.

    A text's tokens stand at consecutive positions. The part that comes last of a head's joins what they found.
    """
    text, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared: tl.constexpr = HEADS // GROUPS
    width: tl.constexpr = (HEADS + 2 * GROUPS) * D
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, QUERIES)
    t = i % TOKENS
    head = group * shared + i // TOKENS
    asked = i < shared * TOKENS
    place = (text * GROUPS + group).to(tl.int64) * slots
    if PREFETCH:  # attention waits more than it reads: meanwhile the next product's weight comes nearer
        mine = (text * GROUPS + group) * SPLITS + split
        line = tl.arange(0, 256)
        for start in range(mine * 256, next_lines, tl.num_programs(0) * GROUPS * SPLITS * 256):
            _prefetch(next_weight + tl.minimum(start + line, next_lines - 1).to(tl.int64) * 64)
    _enter(PDL)
    first = tl.load(positions + text * TOKENS)
    own = first + t
    q = _turned(
        qkv + (text * TOKENS + t) * width + head * D, q_gain, cos + own * D, sin + own * D, d,
        asked[:, None] & (d < D)[None, :], eps, D, QK_NORM, ROPE,
    )  # fmt: skip
    q = (q * (scale * 1.4426950408889634)).to(qkv.dtype.element_ty)  # exponentials to the base 2
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, BLOCK_D), tl.float32)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_S * BLOCK_S
    share = tl.cdiv(tl.cdiv(first - begin, SPLITS), BLOCK_S) * BLOCK_S
    begin += split * share
    s = tl.arange(0, BLOCK_S)
    for start in range(begin, tl.minimum(begin + share, first), BLOCK_S):
        slot = start + s
        there = (slot < first)[:, None] & (d < D)[None, :]
        at = (place + slot)[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = (slot < first)[None, :]
        if WINDOW > 0:
            seen = seen & (slot[None, :] > own[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        v = tl.load(values + at, mask=there, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    if split == 0:  # the new tokens, from where they were computed
        n = tl.arange(0, BLOCK_T)
        new = n < TOKENS
        ok = new[:, None] & (d < D)[None, :]
        source = qkv + (text * TOKENS + n) * width
        k_at = source + (HEADS + group) * D
        k = _turned(k_at, k_gain, cos + (first + n) * D, sin + (first + n) * D, d, ok, eps, D, QK_NORM, ROPE)
        k = k.to(qkv.dtype.element_ty)
        v = tl.load(source[:, None] + (HEADS + GROUPS + group) * D + d[None, :], mask=ok, other=0.0)
        at = (place + first + n)[:, None] * D + d[None, :]
        tl.store(keys + at, k, mask=ok)
        tl.store(values + at, v, mask=ok)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = new[None, :] & (n[None, :] <= t[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > t[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    out = mixed + ((text * TOKENS + t) * HEADS + head)[:, None] * D + d[None, :]
    ok = asked[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        tl.store(out, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=ok)
    else:
        mine = text * GROUPS + group
        at = (mine * SPLITS + split) * QUERIES + i
        tl.store(partial + at[:, None] * BLOCK_D + d[None, :], sums)
        tl.store(sizes + 2 * at, top)
        tl.store(sizes + 2 * at + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + mine, 1, sem="acq_rel") == SPLITS - 1:
            top = tl.full((QUERIES,), -1e30, tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            sums = tl.zeros((QUERIES, BLOCK_D), tl.float32)
            for other in range(SPLITS):  # always in this order: the sum must not depend on who came last
                at = (mine * SPLITS + other) * QUERIES + i
                theirs = tl.load(sizes + 2 * at, cache_modifier=".cg")
                count = tl.load(sizes + 2 * at + 1, cache_modifier=".cg")
                found = tl.load(partial + at[:, None] * BLOCK_D + d[None, :], cache_modifier=".cg")
                higher = tl.maximum(top, theirs)
                fade, grow = tl.exp2(top - higher), tl.exp2(theirs - higher)
                sums = sums * fade[:, None] + found * grow[:, None]
                total = total * fade + count * grow
                top = higher
            tl.store(out, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=ok)
            tl.store(counters + mine, 0)
