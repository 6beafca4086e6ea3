"""Dynamic batch loading: a domain that lags gets more of the batch (Sheared-LLaMA, Xia et al. 2023)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, log

from shallowdraft.models.decoder import Decoder

RATE = 1.0
FLOOR = 1e-4


def rebalance(weights: Mapping[str, float], lag: Mapping[str, float]) -> dict[str, float]:
    """W <- (1 - c) softmax(log w + eta (loss - reference)) + c / k: k domains, eta = 1, c = 1e-4."""
    raised = {domain: log(weight) + RATE * lag[domain] for domain, weight in weights.items()}
    largest = max(raised.values())
    powers = {domain: exp(value - largest) for domain, value in raised.items()}
    total = sum(powers.values())
    return {domain: (1 - FLOOR) * power / total + FLOOR / len(weights) for domain, power in powers.items()}


@dataclass(frozen=True)
class Balance:
    """When to measure how far each domain lags, and how."""

    losses: Callable[[Decoder], Mapping[str, float]]
    """By domain."""
    every: int
    """Steps."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """The losses that a domain is to come down to; 0 where there is none."""

    def update(self, weights: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
        """Return weights that follow from the losses of a model; a domain that cannot be measured keeps its own."""
        lag = {domain: loss - self.reference.get(domain, 0.0) for domain, loss in losses.items() if domain in weights}
        share = sum(weights[domain] for domain in lag)
        moved = rebalance({domain: weights[domain] / share for domain in lag}, lag)
        return dict(weights) | {domain: share * weight for domain, weight in moved.items()}
