"""The Triton code behind gpu_choice.py, whose launchers say what each kernel computes.

Shapes as in gpu_choice.py: R rows of logits, B texts, d lookahead, V vocabulary, S slots. Names in capitals are
compile-time constants; STEPS and BLOCK are powers of two, so loads and stores mask what lies beyond the real sizes.
"""

import triton
import triton.language as tl


@triton.jit
def tail(
    tokens, length, proposed, out, positions, count, d, slots, STEPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy the last `count` tokens of a text [S] and its proposal [d] to `out` and `positions`; one program a text."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    i = tl.arange(0, STEPS)
    position = tl.maximum(tl.load(length + row) - count + i, 0)
    text = tl.load(tokens + row.to(tl.int64) * slots + position, mask=i < count, other=0)
    new = tl.load(proposed + row * d + i - count, mask=(i >= count) & (i < count + d), other=0)
    tl.store(out + row * (count + d) + i, tl.where(i < count, text, new), mask=i < count + d)
    tl.store(positions + row * (count + d) + i, position, mask=i < count + d)


@triton.jit
def _commit(row, i, d, accepted, chosen, finite, tokens, length, limit, packed, slots, not_finite):
    """Append `chosen` [d + 1] to a text and pack it for the host, after the number accepted or `not_finite`.

    All d + 1 tokens are written, the length grows by accepted + 1: tokens beyond it are void.
    """
    end = tl.load(length + row)
    tl.store(tokens + row.to(tl.int64) * slots + end + i, chosen, mask=i <= d)
    tl.store(length + row, tl.minimum(end + accepted + 1, tl.load(limit + row)))
    tl.store(packed + row * (d + 2), tl.where(finite, accepted, not_finite).to(tl.int64))
    tl.store(packed + row * (d + 2) + 1 + i, chosen, mask=i <= d)


@triton.jit
def _finite(row, i, d, accepted, best, drafted):
    """Return whether the target's logits up to the first rejection, and all of the draft's, are finite."""
    logit = tl.abs(tl.load(best + row * (d + 1) + i, mask=i <= accepted, other=0.0))
    draft_logit = tl.abs(tl.load(drafted + row * d + i, mask=i < d, other=0.0))
    return tl.max(tl.where((logit < float("inf")) & (draft_logit < float("inf")), 0, 1), 0) == 0


@triton.jit
def commit_greedy(
    best, choice, proposed, drafted, tokens, length, limit, packed, d, slots, not_finite, STEPS: tl.constexpr
):  # fmt: skip
    """Accept proposed tokens while they are the target's choices, and commit; one program a text."""
    row = tl.program_id(0)
    i = tl.arange(0, STEPS)
    chosen = tl.load(choice + row * (d + 1) + i, mask=i <= d, other=0)
    hit = (tl.load(proposed + row * d + i, mask=i < d, other=-1) == chosen) & (i < d)
    accepted = tl.min(tl.where(hit, STEPS, tl.minimum(i, d)), 0)  # the first place without a hit, or d
    finite = _finite(row, i, d, accepted, best, drafted)
    _commit(row, i, d, accepted, chosen, finite, tokens, length, limit, packed, slots, not_finite)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Map float32 numbers to int32 keys of the same order.

    Bits of positive floats are ordered as integers; those of negative ones in reverse, until all but the sign are
    flipped. A number that was 16 bits wide leaves its last SHIFT bits empty, and they are dropped: fewer bits to
    search.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 makes a negative zero positive
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """Return the float32 number with this key: the inverse of `_key`."""
    bits = key << SHIFT
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -(1 << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest(logits, known, BLOCK: tl.constexpr):
    """Return the largest of the logits [known]; infinity for NaN, so that it is noticed."""
    top = -float("inf")
    for start in range(0, known, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < known, other=-float("inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        top = tl.maximum(top, tl.max(x, 0))
    return top


@triton.jit
def _mass(logits, known, top, cold, key, least, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the logits [known] whose keys reach both `key` and `least`, or add up their weights exp((x - top) cold)."""
    total = 0.0
    for start in range(0, known, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < known, other=-float("inf")).to(tl.float32)
        k = _key(x, SHIFT)
        if COUNT:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        else:
            weight = tl.exp((x - top) * cold)
        total += tl.sum(tl.where((k >= key) & (k >= least) & (index < known), weight, 0.0), 0)
    return total


@triton.jit
def _threshold(logits, known, top, cold, mass, least, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest key such that the logits with keys from it on reach a count, or weight, of `mass`.

    A binary search over the bits of the key, from the sign down: a bit is set if enough logits are left above. It reads
    the logits once a bit (16 times for bf16, 32 for float32), where a sort would also have to move them.
    """
    enough = _mass(logits, known, top, cold, 0, least, COUNT, SHIFT, BLOCK) >= mass
    threshold = tl.where(enough, 0, -(1 << (31 - SHIFT)))
    for bit in range(30 - SHIFT, -1, -1):
        higher = threshold + (1 << bit)
        enough = _mass(logits, known, top, cold, higher, least, COUNT, SHIFT, BLOCK) >= mass
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def _weights(p, q, minus, index, known):
    """Return max(p - q, 0) where `minus` is true, else p, in float64."""
    weight = tl.load(p + index, mask=index < known, other=0.0)
    weight -= tl.load(q + index, mask=(index < known) & minus, other=0.0)
    return tl.maximum(weight, 0.0).to(tl.float64)


@triton.jit
def _total(p, q, minus, known, BLOCK: tl.constexpr):
    """Add up `_weights` over the vocabulary."""
    total = tl.zeros((1,), tl.float64)
    for start in range(0, known, BLOCK):
        total += tl.sum(_weights(p, q, minus, start + tl.arange(0, BLOCK), known), 0)
    return tl.sum(total, 0)


@triton.jit
def _draw(p, q, minus, known, uniform, BLOCK: tl.constexpr):
    """Draw a token in proportion to max(p - q, 0), or to p, by inverting the cumulative sum at uniform times the total.

    A token of weight 0 is never drawn: if rounding keeps the cumulative sum below the bound, the last token with a
    weight is taken.
    """
    residual = _total(p, q, minus, known, BLOCK)
    minus = minus & (residual > 0)  # where p equals q up to rounding nothing is left, and p is the right distribution
    bound = uniform * tl.where(minus, residual, _total(p, q, False, known, BLOCK))
    before = tl.zeros((1,), tl.float64)
    token, last = known, 0
    for start in range(0, known, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight = _weights(p, q, minus, index, known)
        reached = (before + tl.cumsum(weight, 0) > bound) & (weight > 0)
        token = tl.minimum(token, tl.min(tl.where(reached, index, known), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, index, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(token < known, token, last)


@triton.jit
def distribution(
    logits, p, token, largest, uniforms, table, logit_stride, uniform_stride, known, vocab, cold, top_k, top_p, tokens,
    TABLE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, DRAWN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row's distribution after temperature, top-k and top-p, and draw from it; one program a row.

    logits [R, known], p [R, vocab], token and largest [R], uniforms [R] (DRAWN); `cold` is 1 / temperature. With a
    TABLE [B, 3] of (cold, top_k, top_p), a text of which has `tokens` rows, a text may have no top-k (0), no top-p (1),
    or be greedy (cold 0). What is kept is decided by a threshold on the keys of logits (`least`), and by how many of
    the logits equal to it are kept (`ties`), the first ones.
    """
    row = tl.program_id(0)
    if TABLE:
        own = table + row // tokens * 3
        cold, top_k, top_p = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        limited, nucleus, greedy = (top_k > 0) & (top_k < known), top_p < 1, cold == 0
        cold = tl.where(greedy, 1.0, cold)
    else:
        limited: tl.constexpr = TOP_K
        nucleus: tl.constexpr = TOP_P
    logits += row.to(tl.int64) * logit_stride
    p += row.to(tl.int64) * vocab
    top = _largest(logits, known, BLOCK)
    tl.store(largest + row, top)

    least = tl.full([], -(1 << (31 - SHIFT)), tl.int32)
    if limited:  # top-k: the k-th largest logit stays, and all that equal it
        least = _threshold(logits, known, top, cold, top_k, least, True, SHIFT, BLOCK)
    if TABLE:
        least = tl.where(greedy, _key(top, SHIFT), least)
    total = _mass(logits, known, top, cold, least, least, False, SHIFT, BLOCK)
    ties = known * 1.0
    if nucleus:  # top-p: the likeliest tokens until their sum reaches top_p; of equal ones the first
        mass = top_p * total
        least = _threshold(logits, known, top, cold, mass, least, False, SHIFT, BLOCK)
        above = _mass(logits, known, top, cold, least + 1, least + 1, False, SHIFT, BLOCK)
        each = tl.exp((_number(least, SHIFT) - top) * cold)
        ties = tl.maximum(tl.ceil((mass - above) / tl.maximum(each, 1.2e-38)), 1.0)
        total = above + ties * each
    if TABLE:
        ties, total = tl.where(greedy, 1.0, ties), tl.where(greedy, 1.0, total)
    tied = 0  # logits equal to the threshold in earlier blocks
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < known, other=-float("inf")).to(tl.float32)
        k = _key(x, SHIFT)
        kept = (k > least) & (index < known)
        tie = ((k == least) & (index < known)).to(tl.int32)
        kept = kept | ((tie == 1) & (tied + tl.cumsum(tie, 0) <= ties))
        tied += tl.sum(tie, 0)
        tl.store(p + index, tl.where(kept, tl.exp((x - top) * cold) / total, 0.0), mask=index < vocab)
    if DRAWN:
        tl.debug_barrier()  # p is read back by other threads than wrote it
        uniform = tl.load(uniforms + row * uniform_stride)
        tl.store(token + row, _draw(p, p, False, known, uniform, BLOCK).to(tl.int64))


@triton.jit
def commit_sampled(
    p, best, q, proposed, drafted, coins, last, coin_stride, last_stride, tokens, length, limit, packed,
    d, vocab, slots, not_finite, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Accept each proposed x with probability min(1, p(x) / q(x)), draw the next token, and commit; one program a text.

    At the first rejection the next token is drawn from max(p - q, 0), after none from p. The test coin * q(x) < p(x)
    needs no division, and is done in float64 as in the reference.
    """
    row = tl.program_id(0)
    i = tl.arange(0, STEPS)
    p += row.to(tl.int64) * (d + 1) * vocab
    q += row.to(tl.int64) * d * vocab
    x = tl.load(proposed + row * d + i, mask=i < d, other=0)
    p_x = tl.load(p + i.to(tl.int64) * vocab + x, mask=i < d, other=0.0).to(tl.float64)
    q_x = tl.load(q + i.to(tl.int64) * vocab + x, mask=i < d, other=1.0).to(tl.float64)
    hit = (tl.load(coins + row * coin_stride + i, mask=i < d, other=1.0) * q_x < p_x) & (i < d)
    accepted = tl.min(tl.where(hit, STEPS, tl.minimum(i, d)), 0)
    uniform = tl.load(last + row * last_stride)
    offset = accepted.to(tl.int64) * vocab
    token = _draw(p + offset, q + offset, accepted < d, vocab, uniform, BLOCK)
    chosen = tl.where(i == accepted, token.to(tl.int64), x)
    finite = _finite(row, i, d, accepted, best, drafted)
    _commit(row, i, d, accepted, chosen, finite, tokens, length, limit, packed, slots, not_finite)
