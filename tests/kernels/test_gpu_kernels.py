"""Triton kernels against PyTorch, in Triton's interpreter on a CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
import shallowdraft as sd
from shallowdraft.decoding.emitted import NOT_FINITE, pack
from shallowdraft.decoding.sampling import Samplings, draw, probabilities
from shallowdraft.decoding.state import new_state
from shallowdraft.decoding.verification import Proposal, verify_choice, verify_sampled
from shallowdraft.kernels import gpu, gpu_choice
from shallowdraft.models import fused
from shallowdraft.runs.sampling import Sampling

VECTOR = gpu.Tiling(outputs=8, inputs=32, warps=4, stages=1, dot=False)
AHEAD = replace(VECTOR, ahead=True)
DOT = gpu.Tiling(outputs=16, inputs=32, warps=4, stages=2, dot=True)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("tiling", [VECTOR, AHEAD, DOT], ids=["vector", "ahead", "dot"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("inputs", [64, 80])
def test_products(tiling: gpu.Tiling, rows: int, inputs: int):
    x, weight, gain = random(rows, inputs), random(52, inputs), 1 + 0.1 * random(inputs)
    normed, norm = F.rms_norm(x, (inputs,), gain, 1e-5), gpu.InputNorm(gain, 1e-5)
    bias, residual = random(52), random(rows, 52)
    close(gpu.product(x, gpu.Weight(weight), tiling), x @ weight.T)
    biased = gpu.Weight(weight, bias=bias)
    close(gpu.product(x, biased, tiling, norm=norm, residual=residual), normed @ weight.T + bias + residual)
    gate, up = (normed @ weight.T + bias).chunk(2, -1)
    close(gpu.product(x, biased, tiling, norm=norm, activation="gated"), F.silu(gate) * up)
    for name, activation in (("relu", F.relu), ("gelu", F.gelu), ("gelu_new", partial(F.gelu, approximate="tanh"))):
        close(gpu.product(x, biased, tiling, activation=name), activation(x @ weight.T + bias))


@pytest.mark.parametrize("tiling", [VECTOR, AHEAD, DOT], ids=["vector", "ahead", "dot"])
def test_weights_in_8_bits(tiling: gpu.Tiling):
    x, norm = random(3, 64), gpu.InputNorm(torch.ones(64), 1e-5)
    matrix = torch.randint(-127, 128, (52, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    scales = random(52).abs() / 100
    weight, dense = gpu.Weight(matrix, scales), matrix * scales[:, None]
    close(gpu.product(x, weight, tiling), x @ dense.T)
    gate, up = (F.rms_norm(x, (64,), norm.gain, 1e-5) @ dense.T).chunk(2, -1)
    close(gpu.product(x, weight, tiling, norm=norm, activation="gated"), F.silu(gate) * up)


@pytest.mark.parametrize("tiling", [VECTOR, AHEAD, DOT], ids=["vector", "ahead", "dot"])
def test_the_largest_output(tiling: gpu.Tiling):
    x, weight, norm = random(3, 64), random(50, 64), gpu.InputNorm(torch.ones(64), 1e-5)
    logits = F.rms_norm(x, (64,), norm.gain, 1e-5) @ weight[:45].T
    best, token = gpu.largest(x, gpu.Weight(weight), tiling, 45, norm=norm)
    close(best, logits.amax(-1))
    assert token.tolist() == logits.argmax(-1).tolist()
    x[1, 3] = float("nan")
    best, _ = gpu.largest(x, gpu.Weight(weight), tiling, 45, norm=norm)
    assert best.isfinite().tolist() == [True, False, True]


def test_embedded_tokens():
    table = random(11, 48)
    tokens = torch.tensor([[3, 10, 0], [12, 4, 4]])  # the table lacks 12
    assert gpu.embed(tokens, table).equal(table[tokens.clamp(max=10)])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("proposed", [0, 3])
def test_the_tail_of_texts(count: int, proposed: int):
    state = new_state([[5, 6, 7], [8]], [20, 20], 3, torch.device("cpu"))
    more = torch.arange(100, 100 + 2 * proposed).view(2, proposed)
    actual, positions = gpu_choice.tail(state.tokens, state.length, count, more)
    expected = state.tail(count, more)
    assert actual.tolist() == expected[0].tolist()
    assert positions.tolist() == expected[1].tolist()


def attended(
    qkv: Tensor, first: list[int], keys: Tensor, values: Tensor, rope, heads: gpu.AttentionShape, gains
) -> Tensor:
    """Attend with one query after the other, as a reference; also fill the cache."""
    texts = len(first)
    tokens = len(qkv) // texts
    out = torch.empty(texts * tokens, heads.queries, heads.width)
    for text, begin in enumerate(first):
        rows = qkv[text * tokens : (text + 1) * tokens].view(tokens, -1, heads.width)
        q, k, v = rows.split((heads.queries, heads.groups, heads.groups), 1)
        if gains:
            q, k = (F.rms_norm(part, (heads.width,), gain, heads.eps) for part, gain in ((q, gains[0]), (k, gains[1])))
        if rope:
            cos, sin = (table[begin : begin + tokens, None] for table in rope)
            q, k = (part * cos + part.roll(heads.width // 2, -1) * sin for part in (q, k))
        keys[text, :, begin : begin + tokens] = k.transpose(0, 1)
        values[text, :, begin : begin + tokens] = v.transpose(0, 1)
        for token in range(tokens):
            stop = begin + token + 1
            start = max(0, stop - heads.window) if heads.window else 0
            for head in range(heads.queries):
                group = head // (heads.queries // heads.groups)
                scores = keys[text, group, start:stop] @ q[token, head] * heads.width**-0.5
                out[text * tokens + token, head] = scores.softmax(0) @ values[text, group, start:stop]
    return out.flatten(1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "special"),
    [
        (gpu.AttentionShape(4, 4, 16, None, 1e-6), "plain"),
        (gpu.AttentionShape(4, 2, 16, None, 1e-6), "normed"),
        (gpu.AttentionShape(6, 2, 24, 70, 1e-6), "windowed"),
        (gpu.AttentionShape(2, 1, 16, None, 1e-6), "no rope"),
    ],
    ids=str,
)
def test_attention(heads: gpu.AttentionShape, special: str, splits: int):
    first, tokens, slots = [0, 3, 200], 3, 256
    texts = len(first)
    qkv = random(texts * tokens, (heads.queries + 2 * heads.groups) * heads.width)
    keys, values = random(texts, heads.groups, slots, heads.width), random(texts, heads.groups, slots, heads.width)
    rope = None if special == "no rope" else (random(slots, heads.width), random(slots, heads.width))
    gains = (random(heads.width), random(heads.width)) if special == "normed" else None
    positions = torch.tensor([[begin + t for t in range(tokens)] for begin in first])
    counters = torch.zeros(texts * heads.groups, dtype=torch.int32)
    caches = keys.clone(), values.clone()
    for _ in range(2):  # the counters are 0 again after the first call
        actual = gpu.attend(qkv, positions, *caches, rope, heads, gains=gains, counters=counters, splits=splits)
    torch.testing.assert_close(actual, attended(qkv, first, keys, values, rope, heads, gains), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(caches[0], keys)
    torch.testing.assert_close(caches[1], values)


@pytest.mark.parametrize(
    "kind", ["llama", "llama-gqa-tied-head_dim", "llama-biases-linear-rope", "mistral-window", "qwen2", "qwen3", "opt"]
)
@pytest.mark.parametrize("many", [1, 32])
def test_a_whole_pass(kind: str, many: int, folder, monkeypatch: pytest.MonkeyPatch):
    """After a prompt, a few tokens by the kernels give the hidden states, caches and choices of PyTorch.

    Both with our products and, from few rows on, with PyTorch's.
    """
    monkeypatch.setattr(fused, "MAX_ROWS", many)
    decoder = sd.load(folder(kind), "float32", "cpu", trainable=True).decoder
    shape = decoder.shape
    tokens = torch.randint(shape.vocab, (2, 14), generator=torch.Generator().manual_seed(0))
    small = {rows: VECTOR if rows == 1 else DOT for rows in range(1, 65)}
    layers = fused.FusedLayers(
        shape, decoder.blocks, decoder.norm, decoder.head, lambda _chip, _outputs, _inputs, rows, _gated: small[rows]
    )
    with torch.inference_mode():
        caches = [decoder.new_cache(2, 32) for _ in range(2)]
        start = torch.arange(9).expand(2, -1)
        for cache in caches:
            decoder(tokens[:, :9], start, cache, 9)
        for begin, end, last in ((9, 12, False), (12, 14, True)):
            positions = torch.arange(begin, end).expand(2, -1)
            decoder.fused = None
            expected = decoder(tokens[:, begin:end], positions, caches[0], 32)
            best, choice = decoder.head(expected).max(-1)
            decoder.fused = layers
            if not last:
                close(decoder(tokens[:, begin:end], positions, caches[1], 32), expected)
            largest, token = decoder.choose(tokens[:, begin:end], positions, caches[1], 32, shape.vocab, last=last)
            close(largest, best[:, -largest.shape[1] :])
            assert token.tolist() == choice[:, -token.shape[1] :].tolist()
    close(caches[0].kv, caches[1].kv)


@pytest.mark.parametrize("lookahead", [0, 1, 4, 7])
def test_commit_greedy_is_verification_and_commit(lookahead: int):
    """Random proposals agree now and then, rows are near their limit, and some logits are not finite."""
    draws = torch.Generator().manual_seed(lookahead)
    for _ in range(20):
        choice = torch.randint(3, (4, lookahead + 1), generator=draws)
        proposed = torch.randint(3, (4, lookahead), generator=draws)
        best, largest = random(4, lookahead + 1), random(4, lookahead)
        for logits in (best, largest):
            bad = torch.rand(logits.shape, generator=draws) < 0.1
            logits[bad] = torch.tensor([float("nan"), float("inf")])[
                torch.randint(2, (int(bad.sum()),), generator=draws)
            ]
        prompts = [[1] * int(length) for length in torch.randint(1, 20, (4,), generator=draws)]
        states = [new_state(prompts, [20, 20, 21, 40], lookahead, torch.device("cpu")) for _ in range(2)]
        verdict = verify_choice(best, choice, Proposal(proposed, None, largest))
        states[0].commit(verdict)
        state = states[1]
        packed = gpu_choice.commit_greedy(
            best, choice, proposed, largest, state.tokens, state.length, state.limit, NOT_FINITE
        )
        assert packed.tolist() == pack(verdict).tolist()
        assert state.tokens.tolist() == states[0].tokens.tolist()
        assert state.length.tolist() == states[0].length.tolist()


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_k=1),
    Sampling(1.0, top_p=0.6),
    Sampling(0.5, top_k=40, top_p=0.9),
    Sampling(2.0, top_p=0.99),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_distribution_and_a_draw(sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Many rounded logits are equal, the draft lacks some ids, and blocks are smaller than the vocabulary."""
    monkeypatch.setattr(gpu_choice, "BLOCK", 64)
    logits = (3 * random(7, 150)).to(dtype)
    logits[0, :40] = 1.0
    logits[1, 10:] = -float("inf")
    logits[2] = -logits[2].abs()
    uniforms = torch.rand(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:, 1]
    p, token, largest = gpu_choice.distribution(logits, sampling.numbers, 160, uniforms)
    expected = F.pad(probabilities(logits, sampling), (0, 10))
    torch.testing.assert_close(p, expected, atol=1e-6, rtol=1e-4)
    assert ((p > 0) == (expected > 0)).all()
    assert token.tolist() == draw(p, uniforms).tolist()
    assert largest.tolist() == logits.float().amax(-1).tolist()
    cut, *_ = gpu_choice.distribution(logits, sampling.numbers, 100)
    torch.testing.assert_close(cut, probabilities(logits[:, :100], sampling), atol=1e-6, rtol=1e-4)


def test_distributions_of_texts_with_different_sampling():
    """All rows of a text have the text's sampling; a greedy text has one token, the first of equal ones."""
    texts = [Sampling(0.7, top_k=5), Sampling(), Sampling(0.5, top_k=40, top_p=0.9), Sampling(1.0, top_k=500)]
    logits = (3 * random(2 * len(texts), 150)).bfloat16()
    logits[2, 7:9] = 20
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together = Samplings([Sampling(2.0)] * len(texts), logits.device)
    for row, text in enumerate(texts):
        together.replace_row(row, text)
    p, token, largest = gpu_choice.distribution(logits, together.numbers, 150, uniforms)
    expected = probabilities(logits.view(len(texts), 2, 150), together).view(-1, 150)
    torch.testing.assert_close(p, expected, atol=1e-6, rtol=1e-4)
    assert ((p > 0) == (expected > 0)).all()
    assert token.tolist() == draw(p, uniforms).tolist()
    assert largest.tolist() == logits.float().amax(-1).tolist()


def test_logits_that_are_not_finite_are_noticed():
    logits = random(3, 70).half()
    logits[1, 33] = float("nan")
    _, _, largest = gpu_choice.distribution(logits, (1.0, 5, 0.9), 70, torch.rand(3, dtype=torch.float64))
    assert largest.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_commit_sampled_is_verification_and_commit(lookahead: int, monkeypatch: pytest.MonkeyPatch):
    """The same coins decide the same, for distributions that agree, nearly agree, or do not."""
    monkeypatch.setattr(gpu_choice, "BLOCK", 16)
    draws = torch.Generator().manual_seed(lookahead)
    for closeness in (0.0, 0.1, 3.0):
        logits = torch.randn(6, lookahead + 1, 50, generator=draws)
        p = probabilities(logits, Sampling(1.0, top_k=20))
        q = probabilities(
            logits[:, :-1] + closeness * torch.randn(6, lookahead, 50, generator=draws), Sampling(1.0, top_k=30)
        )
        uniforms = torch.rand(6, 2 * lookahead + 1, generator=draws, dtype=torch.float64)
        proposed = (
            torch.stack([draw(q[:, step], uniforms[:, step]) for step in range(lookahead)], 1)
            if lookahead
            else (torch.zeros(6, 0, dtype=torch.int64))
        )
        coins, last = uniforms[:, lookahead : 2 * lookahead], uniforms[:, -1]
        states = [new_state([[1] * 5] * 6, [20, 6, 7, 20, 20, 20], lookahead, torch.device("cpu")) for _ in range(2)]
        verdict = verify_sampled(p, q, proposed, coins, last)
        states[0].commit(verdict)
        state = states[1]
        packed = gpu_choice.commit_sampled(
            p, logits.amax(-1), q, proposed, torch.zeros(6, lookahead), coins, last,
            state.tokens, state.length, state.limit, NOT_FINITE,
        )  # fmt: skip
        assert packed.tolist() == pack(verdict).tolist()
        assert state.tokens.tolist() == states[0].tokens.tolist()
        assert state.length.tolist() == states[0].length.tolist()
    best = logits.amax(-1)
    best[2, 0] = float("inf")
    packed = gpu_choice.commit_sampled(
        p, best, q, proposed, torch.zeros(6, lookahead), coins, last,
        state.tokens, state.length, state.limit, NOT_FINITE,
    )  # fmt: skip
    assert (packed[:, 0] == NOT_FINITE).tolist() == [row == 2 for row in range(6)]
