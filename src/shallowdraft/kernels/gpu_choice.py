"""Triton kernels that decide tokens: a law from logits with a draw from it, verification with its commit; one each.

Their references are `probabilities`, `draw`, `verify` and `State.commit` in decoding. Nothing is sorted: the smallest
logit that top-k or top-p keeps is found bit by bit.
Shapes: R rows of logits, B texts, d lookahead, V vocabulary, S slots.
"""

import torch
from torch import Tensor

from shallowdraft.kernels import gpu, gpu_choice_jit  # gpu first: it says what to do where triton is missing

BLOCK = 8192  # logits at once
WARPS = 16


def tail(tokens: Tensor, length: Tensor, count: int, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """Of texts in tokens [B, S], so long [B], the last `count` and behind them what is proposed [B, d]: [B, count + d],
    and the position of each.
    """
    rows, d = proposed.shape
    assert proposed.is_contiguous()
    found, positions = (torch.empty(rows, count + d, device=tokens.device, dtype=torch.int64) for _ in range(2))
    pdl = gpu.chip(tokens.device).early
    gpu_choice_jit.tail[(rows,)](
        tokens, length, proposed, found, positions, count, d, tokens.shape[1],
        STEPS=gpu.power_of_two(count + d), PDL=pdl, num_warps=1, **gpu.early(pdl),
    )  # fmt: skip
    return found, positions


def settle(
    best: Tensor,
    choice: Tensor,
    proposed: Tensor,
    drafted: Tensor,
    tokens: Tensor,
    length: Tensor,
    limit: Tensor,
    unsound: int,
) -> Tensor:
    """Greedy verification and commit at once: the target's largest logits and their tokens [B, d + 1], the proposal and
    its logits [B, d]; appended to tokens [B, S] at their length [B] -> accepted, or `unsound`, and choices [B, d + 2].
    """
    rows, d = proposed.shape
    assert all(one.is_contiguous() for one in (best, choice, proposed, drafted))
    packed = torch.empty(rows, d + 2, device=choice.device, dtype=torch.int64)
    gpu_choice_jit.settle[(rows,)](
        best, choice, proposed, drafted, tokens, length, limit, packed, d, tokens.shape[1], unsound,
        STEPS=gpu.power_of_two(d + 2),
        num_warps=1,
    )  # fmt: skip
    return packed


def law(
    logits: Tensor, numbers: tuple[float, int, float] | Tensor, vocab: int, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, V'] -> their law [R, V], a token drawn at uniforms [R] (any without them) and the largest logit [R].

    `numbers` are `Sampling.numbers` of all rows, or [B, 3] of each text, which has R / B rows, one after the other. Ids
    that V' lacks have probability 0.
    """
    rows, given = logits.shape
    table = numbers if isinstance(numbers, Tensor) else None
    cold, top_k, top_p = (1.0, 0, 1.0) if isinstance(numbers, Tensor) else numbers
    assert logits.stride(1) == 1
    p = torch.empty(rows, vocab, device=logits.device)
    token = torch.zeros(rows, device=logits.device, dtype=torch.int64)
    largest = torch.empty(rows, device=logits.device)
    known = min(given, vocab)
    gpu_choice_jit.law[(rows,)](
        logits, p, token, largest, uniforms, table,
        logits.stride(0), 0 if uniforms is None else uniforms.stride(0),
        known, vocab, cold, top_k, top_p, 1 if table is None else rows // len(table),
        TABLE=table is not None,
        TOP_K=0 < top_k < known,
        TOP_P=top_p < 1,
        DRAWN=uniforms is not None,
        SHIFT={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        BLOCK=min(BLOCK, gpu.power_of_two(vocab)),
        num_warps=WARPS,
    )  # fmt: skip
    return p, token, largest


def judge(
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
    unsound: int,
) -> Tensor:
    """Speculative sampling and commit at once: the target's laws p [B, d + 1, V] and largest logits `best`, the draft's
    laws q [B, d, V], its proposal and logits [B, d], coins [B, d] and a last uniform [B] -> as `settle`.
    """
    rows, d = proposed.shape
    assert all(one.is_contiguous() for one in (p, best, q, proposed, drafted))
    packed = torch.empty(rows, d + 2, device=p.device, dtype=torch.int64)
    gpu_choice_jit.judge[(rows,)](
        p, best, q, proposed, drafted, coins, last, coins.stride(0), last.stride(0), tokens, length, limit, packed,
        d, p.shape[2], tokens.shape[1], unsound,
        STEPS=gpu.power_of_two(d + 2),
        BLOCK=min(BLOCK, gpu.power_of_two(p.shape[2])),
        num_warps=WARPS,
    )  # fmt: skip
    return packed
