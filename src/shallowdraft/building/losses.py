"""Distillation objectives, and the acceptance rate that they are to raise.

Shapes: … positions, V vocabulary, B batch rows, T tokens. p is the target's distribution, q the draft's, both given as
logits, at temperature 1. Under sampling a draft token is accepted with probability alpha = sum_v min(p, q) =
1 - TV(p, q), where TV is the total variation; greedily it is accepted when the two most likely tokens are the same.
"""

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

# Of the LK hybrid: at rate 3 the weight of KL falls from 1 at alpha = 0 to 0.05 at alpha = 1.
HYBRID_RATE = 3.0

Objective = Callable[[Tensor, Tensor], Tensor]
"""(target logits, draft logits) [..., V] -> loss [...], in nats where it is a divergence."""


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Return alpha = sum_v min(p, q) [...]; a draft with a shorter vocabulary never proposes the tokens it lacks."""
    # The target's softmax is over its whole vocabulary: what it gives to tokens the draft lacks is never accepted.
    p = target.float().softmax(-1)[..., : draft.shape[-1]]
    return torch.minimum(p, draft.float().softmax(-1)).sum(-1)


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(p || q) = sum_v p log(p / q): the draft must cover whatever the target may say."""
    # Float32 throughout: in 16 bits the difference of two log-probabilities of a close draft is mostly rounding.
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(q || p): the draft must not say what the target would not."""
    return forward_kl(draft, target)


def jensen_shannon(target: Tensor, draft: Tensor) -> Tensor:
    """Return (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, which is bounded by log 2."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - log(2)
    return ((log_p.exp() * (log_p - log_m)) + (log_q.exp() * (log_q - log_m))).sum(-1) / 2


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return TV(p, q) = sum_v |p - q| / 2 = 1 - alpha."""
    return (target.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1) / 2


def hybrid(target: Tensor, draft: Tensor) -> Tensor:
    """Return w KL(p || q) + (1 - w) TV(p, q) with w = exp(-3 alpha): KL while the draft is far off, TV when close."""
    # Far from the target TV has hardly a gradient (p and q barely overlap); close to it TV is what counts.
    distance = total_variation(target, draft)
    # Detached: the draft shall lower both terms, not shift weight to the smaller one.
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
    """Return the tokens per iteration (TAR) if draft tokens are accepted where these bits [B, T] are set.

    Each row is walked from its start, as the engine would. A product of average rates would be wrong: hard and easy
    tokens come in runs.
    """
    length = accepted.shape[1]
    emitted = iterations = 0
    for bits in accepted.bool().tolist():
        position = 0
        while position < length:
            run = 0
            while run < lookahead and position + run < length and bits[position + run]:
                run += 1
            # An iteration emits the accepted tokens and one of the target's own, unless the text ends before that.
            emitted += min(run + 1, length - position)
            position += run + 1
            iterations += 1
    return emitted / max(1, iterations)
