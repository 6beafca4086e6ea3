"""Triton kernels that decide tokens: a distribution from logits with a draw from it; verification with its commit.

The references are `probabilities`, `draw`, `verify` and `State.commit` in decoding. Nothing is sorted: the smallest
logit that top-k or top-p keeps is found bit by bit.
Shapes: R rows of logits, B texts, d lookahead, V vocabulary, S slots.
"""

import torch
from torch import Tensor

from shallowdraft.kernels import gpu, gpu_choice_jit  # gpu first: it says what to do where triton is missing

BLOCK = 8192  # logits that a program holds at once
WARPS = 16  # of a program that reads a whole vocabulary


def tail(tokens: Tensor, length: Tensor, count: int, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last `count` of tokens [B, S], which are length [B] long, followed by proposed [B, d]: [B, count + d];
    and the position of each.
    """
    rows, d = proposed.shape
    assert proposed.is_contiguous()
    out, positions = (torch.empty(rows, count + d, device=tokens.device, dtype=torch.int64) for _ in range(2))
    pdl = gpu.chip(tokens.device).early
    gpu_choice_jit.tail[(rows,)](
        tokens, length, proposed, out, positions, count, d, tokens.shape[1],
        STEPS=gpu.power_of_two(count + d), PDL=pdl, num_warps=1, **gpu.launch_options(pdl),
    )  # fmt: skip
    return out, positions


def commit_greedy(
    best: Tensor,
    choice: Tensor,
    proposed: Tensor,
    drafted: Tensor,
    tokens: Tensor,
    length: Tensor,
    limit: Tensor,
    not_finite: int,
) -> Tensor:
    """Verify greedily and commit: proposed tokens are accepted while they are the target's choices.

    `best` and `choice` [B, d + 1] are the target's largest logits and their tokens, `proposed` and `drafted` [B, d] the
    proposal and its logits. The choices are appended to tokens [B, S], whose length [B] grows up to limit [B]. Returns
    [B, d + 2]: the number accepted, or `not_finite` if a logit that decided is not finite; then the choices.
    """
    rows, d = proposed.shape
    assert all(tensor.is_contiguous() for tensor in (best, choice, proposed, drafted))
    packed = torch.empty(rows, d + 2, device=choice.device, dtype=torch.int64)
    gpu_choice_jit.commit_greedy[(rows,)](
        best, choice, proposed, drafted, tokens, length, limit, packed, d, tokens.shape[1], not_finite,
        STEPS=gpu.power_of_two(d + 2),
        num_warps=1,
    )  # fmt: skip
    return packed


def distribution(
    logits: Tensor, numbers: tuple[float, int, float] | Tensor, vocab: int, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distributions [R, V] of logits [R, V'], a token [R] drawn from each, and the largest logits [R].

    `numbers` are `Sampling.numbers` of all rows, or [B, 3] with those of each text, which has R / B rows, one after the
    other. Token ids from V' on have probability 0. Tokens are drawn at uniforms [R]; without them they are 0.
    """
    rows, width = logits.shape
    table = numbers if isinstance(numbers, Tensor) else None
    cold, top_k, top_p = (1.0, 0, 1.0) if isinstance(numbers, Tensor) else numbers
    assert logits.stride(1) == 1
    p = torch.empty(rows, vocab, device=logits.device)
    token = torch.zeros(rows, device=logits.device, dtype=torch.int64)
    largest = torch.empty(rows, device=logits.device)
    counted = min(width, vocab)
    gpu_choice_jit.distribution[(rows,)](
        logits, p, token, largest, uniforms, table,
        logits.stride(0), 0 if uniforms is None else uniforms.stride(0),
        counted, vocab, cold, top_k, top_p, 1 if table is None else rows // len(table),
        TABLE=table is not None,
        TOP_K=0 < top_k < counted,
        TOP_P=top_p < 1,
        DRAWN=uniforms is not None,
        SHIFT={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),  # empty bits of a 16-bit number in float32
        BLOCK=min(BLOCK, gpu.power_of_two(vocab)),
        num_warps=WARPS,
    )  # fmt: skip
    return p, token, largest


def commit_sampled(
    p: Tensor,
    best: Tensor,
    q: Tensor,
    proposed: Tensor,
    drafted: Tensor,
    coins: Tensor,
    last: Tensor,
    tokens: Tensor,
    length: Tensor,
    limit: Tensor,
    not_finite: int,
) -> Tensor:
    """Verify by speculative sampling and commit; the result is that of `commit_greedy`.

    `p` [B, d + 1, V] and `q` [B, d, V] are the distributions of target and draft, `best` [B, d + 1] and `drafted` [B,
    d] their largest logits, `proposed` [B, d] was drawn from q. `coins` [B, d] and `last` [B] are uniform in [0, 1):
    they decide acceptance and the token after it.
    """
    rows, d = proposed.shape
    assert all(tensor.is_contiguous() for tensor in (p, best, q, proposed, drafted))
    packed = torch.empty(rows, d + 2, device=p.device, dtype=torch.int64)
    gpu_choice_jit.commit_sampled[(rows,)](
        p, best, q, proposed, drafted, coins, last, coins.stride(0), last.stride(0), tokens, length, limit, packed,
        d, p.shape[2], tokens.shape[1], not_finite,
        STEPS=gpu.power_of_two(d + 2),
        BLOCK=min(BLOCK, gpu.power_of_two(p.shape[2])),
        num_warps=WARPS,
    )  # fmt: skip
    return packed
