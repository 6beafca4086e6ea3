"""The Triton code behind gpu.py, whose launchers say what each kernel computes.

Shapes as in gpu.py: R rows, N outputs, K inputs, B texts, T tokens of a text's pass, H query heads, G key/value heads,
D head width, S slots. Names in capitals are compile-time constants: a kernel is compiled anew for each set of them.
Sizes of tiles are powers of two, so each load and store masks what lies beyond the real sizes.

PDL (programmatic dependent launch): `gdc_launch_dependents` lets the next kernel in the stream start while this one
runs; `gdc_wait` in that one waits until this one has ended and its results can be read. Weights, cached keys and
values, and rotary tables may be read before the wait, what the previous kernel writes only after it.
"""

import triton
import triton.language as tl


@triton.jit
def _prefetch(pointers):
    """Bring the cache lines of these addresses into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_tile(pointers, inside, EVEN: tl.constexpr):
    """Load weights [n, k], zero where `inside` [k] is false; EVEN, where every tile is whole, saves the mask's time."""
    if EVEN:
        weights = tl.load(pointers)
    else:
        weights = tl.load(pointers, mask=inside[None, :], other=0.0)
    return weights


@triton.jit
def _load_tiles(weight, row_offset, k, outputs, inputs, EVEN: tl.constexpr, GATED: tl.constexpr):
    """Load a tile [n, k] of the weight; if it is gated, of its first half (gates) and its second half (values)."""
    pointers = weight + row_offset[:, None] + k[None, :]
    w = _load_tile(pointers, k < inputs, EVEN)
    second = w
    if GATED:
        second = _load_tile(pointers + outputs.to(tl.int64) * inputs, k < inputs, EVEN)
    return w, second


@triton.jit
def _accumulate(
    x, gain, w, second, r, k, rows, inputs, sums, gates, squares, means,
    NORM: tl.constexpr, CENTRED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add a tile's products to sums and gates [R, n, k], and the rows' squares and values to squares and means [R, k].

    Nothing is summed over k before the last tile: each thread keeps its own sums, and no tile waits for a reduction.
    """
    inside = k < inputs
    v = tl.load(x + r[:, None] * inputs + k[None, :], mask=(r < rows)[:, None] & inside[None, :], other=0.0)
    v = v.to(tl.float32)
    if NORM:
        squares += v * v
        if CENTRED:
            means += v
        v *= tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gates += w.to(tl.float32)[None] * v[:, None]
    sums += second.to(tl.float32)[None] * v[:, None]
    return sums, gates, squares, means


@triton.jit
def stamp(spent, sign):
    """Add sign times the GPU's clock, in nanoseconds, to `spent`."""
    tl.store(spent, tl.load(spent) + sign * tl.extra.cuda.globaltimer())


@triton.jit
def embed(tokens, table, x, vocab, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a token's row of table [V, C] to x [tokens, C]; one program a token.

    Every pass begins with this kernel, and attention reads positions and KV cache before it waits. So this one does not
    let the next kernel start early: no kernel of a pass begins before all of the previous pass have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.load(tokens + index), vocab - 1)
    c = tl.arange(0, BLOCK)
    tl.store(x + index * width + c, tl.load(table + token * width + c, mask=c < width), mask=c < width)


@triton.jit
def product(
    x, weight, scales, shift, gain, bias, residual, y, best, choice, rows, outputs, inputs, counted, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, ARGMAX: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute y = activation(norm(x) Wᵀ + bias) + residual, or the largest of each tile of outputs.

    One program computes BLOCK_N outputs of all rows, over the inputs in tiles of BLOCK_K: its part of the weight is
    read once. Pointers (None where the constant in brackets is false):
      x [R, K]; weight [N, K], or [2 N, K] with the gates first and the values behind them (GATED)
      scales [N or 2 N] of the outputs of an 8-bit weight (SCALED); bias [N or 2 N] (BIAS); gain [K] of the norm (NORM)
      shift [N] = W gain, for LayerNorm (CENTRED); residual [R, N] (ADD)
      y [R, N]; or (ARGMAX) best and choice [R, programs]: a tile's largest among the first `counted` outputs, and which
    Constants: ROWS, R rounded up to a power of two, at least 16 for tensor cores (DOT). EVEN: BLOCK_K divides K.
    ACTIVATION: 1 ReLU, 2 GELU, 3 GELU by tanh. PREFETCH: cache lines of each weight row, LINE weights apart, that are
    prefetched before the wait. LAST: the next kernel may start only once the weight is read. AHEAD: the first tile of
    the weight is read into registers before the wait.

    The norm costs no pass of its own. With s = 1 / sqrt(mean(x²) + eps), RMSNorm's product is s Σₖ (xₖ gainₖ) Wₙₖ: the
    gain is applied to the inputs, s to the finished sums. LayerNorm takes the mean m from each x, which takes m shiftₙ
    from the sums; what its bias adds is in `bias` already.
    """
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    real_output = n < outputs
    row_offset = tl.minimum(n, outputs - 1).to(tl.int64) * inputs  # [BLOCK_N]; past the end, the last row once more
    k = tl.arange(0, BLOCK_K)
    if PDL:
        if not LAST:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            lines = tl.arange(0, PREFETCH) * LINE
            _prefetch(weight + row_offset[:, None] + lines[None, :])
            if GATED:
                _prefetch(weight + outputs.to(tl.int64) * inputs + row_offset[:, None] + lines[None, :])
    if AHEAD:
        w, second = _load_tiles(weight, row_offset, k, outputs, inputs, EVEN, GATED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    r = tl.arange(0, ROWS)
    real_row = r < rows
    if DOT:
        # Tensor cores: the weight is the left operand, because its BLOCK_N outputs fill a tile and the few rows do not.
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        gates = tl.zeros((BLOCK_N, ROWS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        means = tl.zeros((ROWS,), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            column = start + k
            inside = column < inputs
            # v [BLOCK_K, ROWS], w [BLOCK_N, BLOCK_K]
            v = tl.load(x + r[None, :] * inputs + column[:, None], mask=real_row[None, :] & inside[:, None], other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                if CENTRED:
                    means += tl.sum(wide, 0)
                g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
                v = (wide * g[:, None]).to(v.dtype)
            pointers = weight + row_offset[:, None] + column[None, :]
            w = _load_tile(pointers, inside, EVEN)
            if GATED:
                gates = tl.dot(w.to(v.dtype), v, gates, input_precision="ieee")
                pointers += outputs.to(tl.int64) * inputs
                w = _load_tile(pointers, inside, EVEN)
            sums = tl.dot(w.to(v.dtype), v, sums, input_precision="ieee")
        sums, gates = tl.trans(sums), tl.trans(gates)
    else:
        # One row or two: threads multiply and add by themselves, in sums as large as the tiles.
        wide_sums = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_gates = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        wide_squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
        wide_means = tl.zeros((ROWS, BLOCK_K), tl.float32)
        if AHEAD:
            wide_sums, wide_gates, wide_squares, wide_means = _accumulate(
                x, gain, w, second, r, k, rows, inputs, wide_sums, wide_gates, wide_squares, wide_means,
                NORM, CENTRED, GATED,
            )  # fmt: skip
        for start in range(BLOCK_K if AHEAD else 0, inputs, BLOCK_K):
            w, second = _load_tiles(weight, row_offset, start + k, outputs, inputs, EVEN, GATED)
            wide_sums, wide_gates, wide_squares, wide_means = _accumulate(
                x, gain, w, second, r, start + k, rows, inputs, wide_sums, wide_gates, wide_squares, wide_means,
                NORM, CENTRED, GATED,
            )  # fmt: skip
        sums, gates, squares = tl.sum(wide_sums, 2), tl.sum(wide_gates, 2), tl.sum(wide_squares, 1)
        means = tl.sum(wide_means, 1)
    if PDL and LAST:
        tl.extra.cuda.gdc_launch_dependents()
    # From here on sums and gates are [ROWS, BLOCK_N], squares and means [ROWS].
    if SCALED:
        first = tl.load(scales + n, mask=real_output, other=0.0)[None, :]
        if GATED:
            gates *= first
            sums *= tl.load(scales + outputs + n, mask=real_output, other=0.0)[None, :]
        else:
            sums *= first
    if CENTRED:  # no gated model has LayerNorm
        means /= inputs
        squares -= inputs * means * means  # K times the variance
        sums -= means[:, None] * tl.load(shift + n, mask=real_output, other=0.0)[None, :]
    if NORM:
        scale = tl.rsqrt(squares / inputs + eps)[:, None]
        sums *= scale
        gates *= scale
    if BIAS:
        offset = tl.load(bias + n, mask=real_output, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gates += offset
            sums += tl.load(bias + outputs + n, mask=real_output, other=0.0).to(tl.float32)[None, :]
        else:
            sums += offset
    if GATED:
        sums *= gates / (1 + tl.exp(-gates))  # SiLU
    if ACTIVATION == 1:
        sums = tl.maximum(sums, 0.0)
    elif ACTIVATION == 2:
        sums *= 0.5 * (1 + tl.erf(sums * 0.7071067811865476))
    elif ACTIVATION == 3:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)); beyond 80 the exponential overflows, and the quotient is 0 anyway
        steep = -1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
        sums /= 1 + tl.exp(tl.minimum(steep, 80.0))
    y_offset = r[:, None] * outputs + n[None, :]
    real = real_row[:, None] & real_output[None, :]
    if ADD:
        sums += tl.load(residual + y_offset, mask=real, other=0.0).to(tl.float32)
    if ARGMAX:
        sums = tl.where(sums == sums, sums, float("inf"))  # NaN counts as the largest, so that it is noticed
        sums = tl.where((n < counted)[None, :], sums, -float("inf"))
        tiles = tl.num_programs(0)
        tl.store(best + r * tiles + tile, tl.max(sums, 1), mask=real_row)
        tl.store(choice + r * tiles + tile, tile * BLOCK_N + tl.argmax(sums, 1), mask=real_row)
    else:
        tl.store(y + y_offset, sums.to(y.dtype.element_ty), mask=real)


@triton.jit
def pick(best, choice, logit, token, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Find the largest of best [R, tiles] and its choice, the first of equal ones; one program a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    of_tiles = tl.load(best + row * tiles + tile, mask=tile < tiles, other=-float("inf"))
    largest = tl.max(of_tiles, 0)
    winner = tl.argmax(of_tiles, 0)
    tl.store(logit + row, largest)
    tl.store(token + row, tl.load(choice + row * tiles + winner).to(tl.int64))


@triton.jit
def _rotated(head, other, turn, cross, gain, d, eps, D: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr):
    """Return heads [n, D] normalised and rotated, in float32.

    `other` is head with its halves swapped: the number that each one is rotated with; `turn` and `cross` are cosine and
    signed sine [n, D]. `other` needs the norm too, with the gain of the half that it comes from.
    """
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
def _softmax_step(q, k, v, seen, top, total, sums):
    """Take keys and values [s, D] into an online softmax of queries q [Q, D], where `seen` [Q, s] is true.

    State per query: `top`, the largest score so far; `total`, the sum of 2^(score - top); `sums` [Q, D], the values
    weighted by 2^(score - top). When `top` grows, both are first scaled down by 2^(old top - new top). The result is
    sums / total. Scores come with a factor log2(e) in q, so that powers of 2 are those of e.
    """
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
    """Rotate queries and keys, write new keys and values to the KV cache, and attend to it.

    Program (text, group, split) computes the H / G query heads of one key/value head, for all tokens of a text's pass,
    over one part of the cached slots; split 0 also writes the new entries and attends to them. Pointers:
      qkv [B T, (H + 2 G) D]: queries, keys, values; mixed [B T, H D]: the result
      positions [B, T], consecutive in a text; keys and values [B, G, S, D]: the KV cache of this layer
      cos, sin [positions, D]: rotary tables, the sine signed (ROPE); q_gain, k_gain [D]: norms of heads (QK_NORM)
      partial [B G SPLITS QUERIES, BLOCK_D] and sizes [B G SPLITS QUERIES, 2]: `sums`, and `top` and `total`, of a part
      counters [B G]: parts of a text and group that are done; 0 before and after
    Numbers: tokens T, slots S, scale 1 / sqrt(D), eps of the norms. Constants: HEADS H, GROUPS G. Powers of two:
    BLOCK_D >= D, QUERIES >= (H / G) T, BLOCK_T >= T, PARTS >= SPLITS. BLOCK_S: slots of a tile. JOIN: queries that are
    joined at once. WINDOW: positions that a token may attend to (0: all).

    The grid has SPLITS parts whatever the text's length, so that one CUDA graph serves every length; the device decides
    from the position how many of them have work. The part that finishes last joins the results of all.
    """
    text, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared: tl.constexpr = HEADS // GROUPS  # query heads of a key/value head
    width: tl.constexpr = (HEADS + 2 * GROUPS) * D  # of a row of qkv
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    # Slots 0 to first - 1 hold earlier passes; this part is [begin, end) of those that the window leaves.
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

    # Before the wait: the first tile of keys and values k, v [BLOCK_S, BLOCK_D], and rows of the rotary tables.
    d = tl.arange(0, BLOCK_D)
    real_d = (d < D)[None, :]
    across = ((d + D // 2) % D)[None, :]  # the number that number d of a head is rotated with
    head_slots = (text * GROUPS + group).to(tl.int64) * slots
    slot = begin + tl.arange(0, BLOCK_S)
    cached = (head_slots + slot)[:, None] * D + d[None, :]
    k = tl.load(keys + cached, mask=(slot < end)[:, None] & real_d, other=0.0)
    v = tl.load(values + cached, mask=(slot < end)[:, None] & real_d, other=0.0)
    i = tl.arange(0, QUERIES)  # query i: head i // tokens of the group, token i % tokens
    t = i % tokens
    position = first + t
    real_query = (i < shared * tokens)[:, None] & real_d
    n = tl.arange(0, BLOCK_T)  # new keys and values; only split 0 has them
    real_new = (n < tokens)[:, None] & real_d & (split == 0)
    q_turn, q_cross, k_turn, k_cross = 0.0, 0.0, 0.0, 0.0
    if ROPE:
        q_row, k_row = position[:, None] * D + d[None, :], (first + n)[:, None] * D + d[None, :]
        q_turn = tl.load(cos + q_row, mask=real_query, other=0.0)
        q_cross = tl.load(sin + q_row, mask=real_query, other=0.0)
        k_turn = tl.load(cos + k_row, mask=real_new, other=0.0)
        k_cross = tl.load(sin + k_row, mask=real_new, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # q [QUERIES, BLOCK_D], new_k and new_v [BLOCK_T, BLOCK_D]
    q_head = qkv + ((text * tokens + t) * width + (group * shared + i // tokens) * D)[:, None]
    k_head = qkv + ((text * tokens + n) * width + (HEADS + group) * D)[:, None]
    q = tl.load(q_head + d[None, :], mask=real_query, other=0.0)
    new_k = tl.load(k_head + d[None, :], mask=real_new, other=0.0)
    new_v = tl.load(k_head + GROUPS * D + d[None, :], mask=real_new, other=0.0)
    q_other, k_other = q, new_k
    if ROPE:
        q_other = tl.load(q_head + across, mask=real_query, other=0.0)
        k_other = tl.load(k_head + across, mask=real_new, other=0.0)
    q = _rotated(q, q_other, q_turn, q_cross, q_gain, d, eps, D, QK_NORM, ROPE)
    q = (q * (scale * 1.4426950408889634)).to(qkv.dtype.element_ty)  # log2(e), see _softmax_step
    new_k = _rotated(new_k, k_other, k_turn, k_cross, k_gain, d, eps, D, QK_NORM, ROPE).to(qkv.dtype.element_ty)
    new_slots = (head_slots + first + n)[:, None] * D + d[None, :]
    tl.store(keys + new_slots, new_k, mask=real_new)
    tl.store(values + new_slots, new_v, mask=real_new)

    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    if split == 0:  # the pass's own tokens, from registers; token t sees tokens 0 to t
        seen = (n < tokens)[None, :] & (n[None, :] <= t[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > t[:, None] - WINDOW)
        top, total, sums = _softmax_step(q, new_k, new_v, seen, top, total, sums)
    for _ in range(begin, end, BLOCK_S):
        seen = (slot < end)[None, :] & (i < shared * tokens)[:, None]
        if WINDOW > 0:
            seen = seen & (slot[None, :] > position[:, None] - WINDOW)
        top, total, sums = _softmax_step(q, k, v, seen, top, total, sums)
        slot += BLOCK_S
        cached += BLOCK_S * D
        k = tl.load(keys + cached, mask=(slot < end)[:, None] & real_d, other=0.0)
        v = tl.load(values + cached, mask=(slot < end)[:, None] & real_d, other=0.0)

    if parts == 1:
        out = mixed + ((text * tokens + t) * HEADS + group * shared + i // tokens)[:, None] * D + d[None, :]
        tl.store(out, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=real_query)
    else:
        pair = text * GROUPS + group
        own = (pair * SPLITS + split) * QUERIES + i
        tl.store(partial + own[:, None] * BLOCK_D + d[None, :], sums, mask=real_query)
        tl.store(sizes + 2 * own, top, mask=i < shared * tokens)
        tl.store(sizes + 2 * own + 1, total, mask=i < shared * tokens)
        # All threads of the program have stored before the counter says so; the part that counts last sees all stores.
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel") == parts - 1:
            # Join JOIN queries at a time: tops and totals [PARTS, JOIN], part_sums [PARTS, JOIN, BLOCK_D]. Other
            # multiprocessors wrote these, so they are read from the L2 cache (.cg), past this one's own.
            part = tl.arange(0, PARTS)[:, None]
            for start in range(0, shared * tokens, JOIN):
                query = start + tl.arange(0, JOIN)
                present = (part < parts) & (query < shared * tokens)[None, :]
                others = (pair * SPLITS + part) * QUERIES + query[None, :]
                tops = tl.load(sizes + 2 * others, mask=present, other=-1e30, cache_modifier=".cg")
                totals = tl.load(sizes + 2 * others + 1, mask=present, other=1.0, cache_modifier=".cg")
                part_sums = tl.load(
                    partial + others[:, :, None] * BLOCK_D + d[None, None, :],
                    mask=present[:, :, None] & real_d[None, :, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                fade = tl.exp2(tops - tl.max(tops, 0)[None, :])
                joined = tl.sum(part_sums * fade[:, :, None], 0) / tl.sum(totals * fade, 0)[:, None]
                row = (text * tokens + query % tokens) * HEADS + group * shared + query // tokens
                real = (query < shared * tokens)[:, None] & real_d
                tl.store(mixed + row[:, None] * D + d[None, :], joined.to(mixed.dtype.element_ty), mask=real)
            tl.store(counters + pair, 0)
