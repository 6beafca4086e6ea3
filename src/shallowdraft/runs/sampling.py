"""Sampling: the choice of tokens, greedy or random, and the numbers that shape the distribution."""

import math
from dataclasses import dataclass

from shallowdraft.errors import OptionError

SMALLEST_TEMPERATURE = 1e-4  # below it logits divided by it overflow


@dataclass(frozen=True)
class Sampling:
    """The most likely token at temperature 0; above 0 a draw, after temperature, top-k and top-p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.temperature) and (self.temperature == 0 or self.temperature >= SMALLEST_TEMPERATURE)
        ):
            raise OptionError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a number from {SMALLEST_TEMPERATURE:g} up"
            )
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"top_k is {self.top_k}; it must be at least 1, or left out to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed is {self.seed}; it must be 0 or more and fit into 63 bits")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def numbers(self) -> tuple[float, int, float]:
        """The numbers that kernels take: 1 / temperature (0 for greedy), top-k (0 for all), top-p (1 for all)."""
        return 0.0 if self.greedy else 1 / self.temperature, self.top_k or 0, self.top_p or 1.0
