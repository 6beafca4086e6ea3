"""Objectives that raise acceptance, and what acceptance is.

Shapes: … positions, V vocabulary. p is the target's law, q the draft's, both given as logits, at temperature 1.
Under sampling a draft token is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q); greedily when the two
most likely tokens are the same.
"""

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

HYBRID_RATE = 3.0  # of the LK hybrid: how fast the weight moves from KL to total variation as acceptance grows

Objective = Callable[[Tensor, Tensor], Tensor]
"""(target logits, draft logits) [..., V] -> loss [...]."""


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Alpha = sum_v min(p, q) [...]; a draft with a shorter vocabulary never proposes the rest."""
    p = target.float().softmax(-1)[..., : draft.shape[-1]]
    return torch.minimum(p, draft.float().softmax(-1)).sum(-1)


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q)."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(q || p)."""
    return forward_kl(draft, target)


def jensen_shannon(target: Tensor, draft: Tensor) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - log(2)
    return ((log_p.exp() * (log_p - log_m)) + (log_q.exp() * (log_q - log_m))).sum(-1) / 2


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """TV(p, q) = 1 - alpha."""
    return (target.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1) / 2


def hybrid(target: Tensor, draft: Tensor) -> Tensor:
    """W KL(p || q) + (1 - w) TV(p, q), w = exp(-3 alpha): KL while the draft is far off, TV when it is close."""
    distance = total_variation(target, draft)
    weight = torch.exp(-HYBRID_RATE * (1 - distance.detach()))
    return weight * forward_kl(target, draft) + (1 - weight) * distance


OBJECTIVES: dict[str, Objective] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jensen-shannon": jensen_shannon,
    "total-variation": total_variation,
    "hybrid": hybrid,
}


def tar_from_runs(accepted: Tensor, lookahead: int) -> float:
    """Tokens an iteration when drafts are accepted as these bits [B, T] say, each row walked from its start.

    A product of average rates would be wrong: hard and easy tokens come in runs.
    """
    length = accepted.shape[1]
    emitted = iterations = 0
    for bits in accepted.bool().tolist():
        position = 0
        while position < length:
            run = 0
            while run < lookahead and position + run < length and bits[position + run]:
                run += 1
            emitted += min(run + 1, length - position)
            position += run + 1
            iterations += 1
    return emitted / max(1, iterations)
