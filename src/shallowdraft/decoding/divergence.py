"""The difference of two greedy runs: a numerical tie, or a bug? Implements the definition in docs/lossless.md.

A pass over d + 1 tokens rounds differently from a pass over one. If two tokens are nearly equally
likely, that may change the choice, and neither run is wrong. A bug shows as a token whose logit,
computed by the target for the same text, lies below the largest one by more than rounding explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shallowdraft.decoding.state import fill, new_state
from shallowdraft.models.model import Model

# The gap between two logits that rounding explains, relative to the size of the largest logit.
TIE_GAP = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Divergence:
    """The first token in which two runs differ."""

    position: int
    """Index into the new tokens."""
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    """How far each of the two tokens' logits lies under the largest one."""
    tolerance: float

    @property
    def tie(self) -> bool:
        """Whether both tokens are the target's choice up to rounding."""
        return max(self.gaps) <= self.tolerance

    def __str__(self) -> str:
        kind = "a numerical tie" if self.tie else "a BUG, please report it"
        return (
            f"token {self.position} differs ({self.tokens[0]} and {self.tokens[1]}): {kind}; the logits lie "
            f"{self.gaps[0]:.3g} and {self.gaps[1]:.3g} under the largest, rounding explains {self.tolerance:.3g}"
        )


def explain(target: Model, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]) -> Divergence | None:
    """Judge the first difference of two greedy continuations of a prompt; None if one is a prefix of the other."""
    differences = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    position = next(differences, None)
    if position is None:
        return None
    logits = _last_logits(target, [*prompt, *first[:position]])
    tokens = (first[position], second[position])
    gaps = (float(logits.max() - logits[tokens[0]]), float(logits.max() - logits[tokens[1]]))
    return Divergence(position, tokens, gaps, tolerance(logits, target.decoder.dtype))


def greedy_gaps(target: Model, prompt: Sequence[int], continuation: Sequence[int]) -> Tensor:
    """Return how far each emitted token's logit lies under the largest one, as a multiple of what rounding explains.

    Lossless decoding stays at or below 1. One teacher-forced pass: the target reads prompt and
    continuation, and its logits judge every emitted token.
    """
    with torch.inference_mode():
        state = new_state([[*prompt, *continuation]], [len(prompt) + len(continuation)], 0, target.device)
        cache = target.decoder.new_cache(*state.tokens.shape)
        positions = torch.arange(state.longest, device=target.device)[None]
        hidden = target.decoder(state.tokens[:, : state.longest], positions, cache, state.longest)
        logits = target.decoder.head(hidden[0, len(prompt) - 1 : -1]).float()
        chosen = logits.gather(1, torch.tensor(continuation, device=target.device)[:, None])
        gaps: Tensor = logits.max(1, keepdim=True).values - chosen
        return gaps.squeeze(1) / tolerance(logits, target.decoder.dtype)


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """Return the gap between two logits that rounding explains."""
    return TIE_GAP[dtype] * max(1.0, float(logits.abs().max()))


def _last_logits(target: Model, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        state = new_state([list(tokens)], [len(tokens)], 0, target.device)
        hidden = fill(target.decoder, target.decoder.new_cache(*state.tokens.shape), state)
        logits: Tensor = target.decoder.head(hidden)[0].float()
        return logits
