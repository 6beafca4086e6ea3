"""Dynamic batch loading: a domain that lags gets more of the batch (Sheared-LLaMA, Xia et al. 2023)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, log

from shallowdraft.models.decoder import Decoder

STEP_SIZE = 1.0  # eta of the paper: how strongly a lag of 1 nat moves a domain's weight
UNIFORM_SHARE = 1e-4  # c of the paper: this share is spread evenly, so that no domain's weight reaches 0


def rebalance(weights: Mapping[str, float], lag: Mapping[str, float]) -> dict[str, float]:
    """Return w ← (1 - c) softmax(log w + eta (loss - reference)) + c / k, with k domains, eta = 1, c = 1e-4."""
    raised = {domain: log(weight) + STEP_SIZE * lag[domain] for domain, weight in weights.items()}
    largest = max(raised.values())  # subtracted before exp, which would overflow
    powers = {domain: exp(value - largest) for domain, value in raised.items()}
    total = sum(powers.values())
    even = UNIFORM_SHARE / len(weights)
    return {domain: (1 - UNIFORM_SHARE) * power / total + even for domain, power in powers.items()}


@dataclass(frozen=True)
class DomainBalance:
    """When to measure how far each domain lags, and how."""

    losses: Callable[[Decoder], Mapping[str, float]]
    """Held-out loss of a model, by domain, in nats per token."""
    every: int
    """Steps between two measurements."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """Loss to which each domain is to come down; 0 for a domain that is not named."""

    def update(self, weights: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
        """Return weights that follow from the losses of a model; a domain that was not measured keeps its weight."""
        lag = {domain: loss - self.reference.get(domain, 0.0) for domain, loss in losses.items() if domain in weights}
        # The measured domains share among themselves the weight that they have together.
        share = sum(weights[domain] for domain in lag)
        moved = rebalance({domain: weights[domain] / share for domain in lag}, lag)
        return dict(weights) | {domain: share * weight for domain, weight in moved.items()}
