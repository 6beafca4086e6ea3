"""The Triton code behind gpu_choice.py; its launchers say what each kernel is for."""

import triton
import triton.language as tl


@triton.jit
def tail(
    tokens, length, proposed, found, positions, count, d, slots, STEPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The last tokens of a text and what is proposed behind them; one row of a batch each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    i = tl.arange(0, STEPS)
    place = tl.maximum(tl.load(length + row) - count + i, 0)
    text = tl.load(tokens + row.to(tl.int64) * slots + place, mask=i < count, other=0)
    new = tl.load(proposed + row * d + i - count, mask=(i >= count) & (i < count + d), other=0)
    tl.store(found + row * (count + d) + i, tl.where(i < count, text, new), mask=i < count + d)
    tl.store(positions + row * (count + d) + i, place, mask=i < count + d)


@triton.jit
def _commit(row, i, d, accepted, chosen, sound, tokens, length, limit, packed, slots, unsound):
    """Append what was chosen [d + 1], and pack it for the host."""
    at = tl.load(length + row)
    tl.store(tokens + row.to(tl.int64) * slots + at + i, chosen, mask=i <= d)
    tl.store(length + row, tl.minimum(at + accepted + 1, tl.load(limit + row)))
    tl.store(packed + row * (d + 2), tl.where(sound, accepted, unsound).to(tl.int64))
    tl.store(packed + row * (d + 2) + 1 + i, chosen, mask=i <= d)


@triton.jit
def _sound(row, i, d, accepted, best, drafted):
    """Whether every logit that decided was a number."""
    logit = tl.abs(tl.load(best + row * (d + 1) + i, mask=i <= accepted, other=0.0))
    draft_logit = tl.abs(tl.load(drafted + row * d + i, mask=i < d, other=0.0))
    return tl.max(tl.where((logit < float("inf")) & (draft_logit < float("inf")), 0, 1), 0) == 0


@triton.jit
def settle(
    best, choice, proposed, drafted, tokens, length, limit, packed, d, slots, unsound, STEPS: tl.constexpr
):  # fmt: skip
    """Accept what the target chose too; one row of a batch each."""
    row = tl.program_id(0)
    i = tl.arange(0, STEPS)
    chosen = tl.load(choice + row * (d + 1) + i, mask=i <= d, other=0)
    hit = (tl.load(proposed + row * d + i, mask=i < d, other=-1) == chosen) & (i < d)
    accepted = tl.min(tl.where(hit, STEPS, tl.minimum(i, d)), 0)
    sound = _sound(row, i, d, accepted, best, drafted)
    _commit(row, i, d, accepted, chosen, sound, tokens, length, limit, packed, slots, unsound)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Numbers as integers of the same order; the last SHIFT bits of a 16-bit one are empty in float32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """The number with that key."""
    bits = key << SHIFT
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -(1 << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass(logits, known, top, cold, key, least, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have at least both keys, or what they weigh."""
    total = 0.0
    for start in range(0, known, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < known, other=-float("inf")).to(tl.float32)
        k = _key(x, SHIFT)
        if COUNT:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        else:
            weight = tl.exp((x - top) * cold)
        total += tl.sum(tl.where((k >= key) & (k >= least) & (at < known), weight, 0.0), 0)
    return total


@triton.jit
def _threshold(logits, known, top, cold, wanted, least, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that logits reach which are, or weigh, at least so much; bit by bit."""
    enough = _mass(logits, known, top, cold, 0, least, COUNT, SHIFT, BLOCK) >= wanted
    found = tl.where(enough, 0, -(1 << (31 - SHIFT)))
    for bit in range(30 - SHIFT, -1, -1):
        higher = found + (1 << bit)
        enough = _mass(logits, known, top, cold, higher, least, COUNT, SHIFT, BLOCK) >= wanted
        found = tl.where(enough, higher, found)
    return found


@triton.jit
def _weights(p, q, minus, at, known):
    """max(p - q, 0), or p, in float64."""
    weight = tl.load(p + at, mask=at < known, other=0.0)
    weight -= tl.load(q + at, mask=(at < known) & minus, other=0.0)
    return tl.maximum(weight, 0.0).to(tl.float64)


@triton.jit
def _total(p, q, minus, known, BLOCK: tl.constexpr):
    total = tl.zeros((1,), tl.float64)
    for start in range(0, known, BLOCK):
        total += tl.sum(_weights(p, q, minus, start + tl.arange(0, BLOCK), known), 0)
    return tl.sum(total, 0)


@triton.jit
def _drawn(p, q, minus, known, uniform, BLOCK: tl.constexpr):
    """A token in proportion to max(p - q, 0), or to p; one of weight 0 never."""
    residual = _total(p, q, minus, known, BLOCK)
    minus = minus & (residual > 0)  # p = q up to rounding leaves nothing: p is the right law
    bound = uniform * tl.where(minus, residual, _total(p, q, False, known, BLOCK))
    before = tl.zeros((1,), tl.float64)
    found, last = known, 0
    for start in range(0, known, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight = _weights(p, q, minus, at, known)
        reached = (before + tl.cumsum(weight, 0) > bound) & (weight > 0)
        found = tl.minimum(found, tl.min(tl.where(reached, at, known), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(found < known, found, last)


@triton.jit
def law(
    logits, p, token, largest, uniforms, table, logit_stride, uniform_stride, known, vocab, cold, top_k, top_p, tokens,
    TABLE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, DRAWN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row each. In a table a text may have no top-k (0), no top-p (1), or only its likeliest token (cold 0)."""
    row = tl.program_id(0)
    if TABLE:
        own = table + row // tokens * 3
        cold, top_k, top_p = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        limited, nucleus, certain = (top_k > 0) & (top_k < known), top_p < 1, cold == 0
        cold = tl.where(certain, 1.0, cold)
    else:
        limited: tl.constexpr = TOP_K
        nucleus: tl.constexpr = TOP_P
    logits += row.to(tl.int64) * logit_stride
    p += row.to(tl.int64) * vocab
    top = -float("inf")
    for start in range(0, known, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < known, other=-float("inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # not a number: the largest, so that it is noticed
        top = tl.maximum(top, tl.max(x, 0))
    tl.store(largest + row, top)

    least = tl.full([], -(1 << (31 - SHIFT)), tl.int32)
    if limited:
        least = _threshold(logits, known, top, cold, top_k, least, True, SHIFT, BLOCK)
    if TABLE:
        least = tl.where(certain, _key(top, SHIFT), least)
    total = _mass(logits, known, top, cold, least, least, False, SHIFT, BLOCK)
    ties = known * 1.0
    if nucleus:  # tokens until their sum reaches top_p; of equal ones the first
        wanted = top_p * total
        least = _threshold(logits, known, top, cold, wanted, least, False, SHIFT, BLOCK)
        above = _mass(logits, known, top, cold, least + 1, least + 1, False, SHIFT, BLOCK)
        each = tl.exp((_number(least, SHIFT) - top) * cold)
        ties = tl.maximum(tl.ceil((wanted - above) / tl.maximum(each, 1.2e-38)), 1.0)
        total = above + ties * each
    if TABLE:
        ties, total = tl.where(certain, 1.0, ties), tl.where(certain, 1.0, total)
    seen = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < known, other=-float("inf")).to(tl.float32)
        k = _key(x, SHIFT)
        kept = (k > least) & (at < known)
        tie = ((k == least) & (at < known)).to(tl.int32)
        kept = kept | ((tie == 1) & (seen + tl.cumsum(tie, 0) <= ties))
        seen += tl.sum(tie, 0)
        tl.store(p + at, tl.where(kept, tl.exp((x - top) * cold) / total, 0.0), mask=at < vocab)
    if DRAWN:
        tl.debug_barrier()
        uniform = tl.load(uniforms + row * uniform_stride)
        tl.store(token + row, _drawn(p, p, False, known, uniform, BLOCK).to(tl.int64))


@triton.jit
def judge(
    p, best, q, proposed, drafted, coins, last, coin_stride, last_stride, tokens, length, limit, packed,
    d, vocab, slots, unsound, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Accept x with probability min(1, p(x) / q(x)), then draw from what is left of p; one row of a batch each."""
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
    at = accepted.to(tl.int64) * vocab
    token = _drawn(p + at, q + at, accepted < d, vocab, uniform, BLOCK)
    chosen = tl.where(i == accepted, token.to(tl.int64), x)
    sound = _sound(row, i, d, accepted, best, drafted)
    _commit(row, i, d, accepted, chosen, sound, tokens, length, limit, packed, slots, unsound)
