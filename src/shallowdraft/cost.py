"""The cost model: throughput, break-even TAR and parity latency of a draft, after "Decoding Speculative Decoding".

An iteration drafts `d` tokens one after the other, verifies them in one pass and yields TAR tokens on average. Times
are seconds of one iteration at a fixed lookahead. No torch here: the numbers may come from any engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from shallowdraft.errors import OptionError

EVEN = 0.02  # a speed-up this close to 1 makes no difference


@dataclass(frozen=True)
class Iteration:
    """The seconds of one iteration: drafting, verification, and everything else."""

    draft_s: float
    verify_s: float
    other_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isfinite(value) or value < 0 or (name == "verify_s" and value == 0):
                least = "above 0" if name == "verify_s" else "0 or more"
                raise OptionError(f"{name} is {value}; it must be a time in seconds, finite and {least}")

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def to_json(self) -> dict[str, float]:
        """Return the seconds of each part, as records and commands write them."""
        return {"draft_s": self.draft_s, "verify_s": self.verify_s, "other_s": self.other_s}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Iteration":
        """Read the parts from a record; earlier versions called the last two `target_s` and `rest_s`."""
        verify, other = ("target_s", "rest_s") if "target_s" in record else ("verify_s", "other_s")
        return cls(record["draft_s"], record[verify], record[other])


def mean_iteration(iterations: Sequence[Iteration], weights: Sequence[float]) -> Iteration:
    """Return the weighted mean of each part; the first iteration if all weights are 0."""
    total = sum(weights)
    if not total:
        return iterations[0]
    weighted = list(zip(iterations, weights, strict=True))

    def mean(part: str) -> float:
        return float(sum(getattr(iteration, part) * weight for iteration, weight in weighted) / total)

    return Iteration(mean("draft_s"), mean("verify_s"), mean("other_s"))


@dataclass(frozen=True)
class Silence:
    """The part of decoding in which a draft proposes nothing, because the text fills its context."""

    begins: int
    """The length of text in tokens from which on the draft is silent."""
    iterations: float
    """The share of iterations without a proposal."""
    tokens: float
    """The share of new tokens that those iterations yielded."""

    def __str__(self) -> str:
        share = f"{self.tokens:.0%}" if self.tokens > 0.01 else f"{self.tokens:.1%}"
        start = f"from {self.begins:,} tokens of text on, where its context has no room for a proposal"
        return f"silent {start}: {share} of the new tokens"


def throughput(tar: float, iteration: Iteration) -> float:
    """Return tokens per second, TAR / (t_target(d) + t_draft(d)); an iteration yields at least one token."""
    return max(tar, 1.0) / iteration.total_s


def required_tar(tokens_per_s: float, iteration: Iteration) -> float:
    """Return the TAR at which an iteration of this length gives a throughput."""
    return tokens_per_s * iteration.total_s


def extra_tar(tar: float, iteration: Iteration, best_tar: float, best: Iteration) -> float:
    """Return the TAR that a draft lacks to be as fast as the best one."""
    return required_tar(throughput(best_tar, best), iteration) - tar


def parity_latency(tar: float, iteration: Iteration, best_tar: float, best: Iteration) -> float:
    """Return the seconds of drafting at which a draft is as fast as the best one; below 0 its TAR is too low."""
    return tar / throughput(best_tar, best) - iteration.verify_s - iteration.other_s


def independent_tar(acceptance_rate: float, lookahead: int) -> float:
    """Return TAR if draft tokens are accepted independently: (1 - a^(d+1)) / (1 - a) (Leviathan et al. 2023)."""
    return float(sum(acceptance_rate**accepted for accepted in range(lookahead + 1)))


def independent_acceptance(tar: float, lookahead: int) -> float:
    """Return the acceptance rate at which independently accepted tokens have this TAR; infinity if no rate has."""
    if tar > lookahead + 1:
        return inf
    low, high = 0.0, 1.0
    for _ in range(50):  # bisection: TAR rises with the rate
        middle = (low + high) / 2
        low, high = (middle, high) if independent_tar(middle, lookahead) < tar else (low, middle)
    return high


def independent_speed_up(acceptance_rate: float, lookahead: int, cost_ratio: float) -> float:
    """Return Leviathan et al.'s speed-up; a draft step takes `cost_ratio` of a pass of the target, verification one."""
    return independent_tar(acceptance_rate, lookahead) / (lookahead * cost_ratio + 1)


@dataclass(frozen=True)
class Waterfall:
    """The ideal speed-up, which is TAR, the loss of each part of an iteration, and the actual speed-up."""

    ideal: float
    drafting: float
    verifying: float
    """The loss because verifying several tokens takes longer than decoding one."""
    rest: float
    actual: float

    @property
    def losses(self) -> dict[str, float]:
        """The loss of each part by its name; below 0 for a gain."""
        verifying = "longer verification" if self.verifying >= 0 else "faster verification"
        return {"drafting": self.drafting, verifying: self.verifying, "the rest": self.rest}

    @property
    def losses_text(self) -> str:
        """The losses as part of a sentence."""
        return ", ".join(
            f"{part} {'takes' if loss >= 0 else 'gives'} {abs(loss):.2f}" for part, loss in self.losses.items()
        )


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a proposer at one lookahead, or with one tree, against plain decoding."""

    lookahead: int
    tar: float
    iteration: Iteration
    plain_s: float
    """Seconds per token of plain decoding."""
    nodes: int = 0
    """The nodes of a tree, which is `lookahead` deep; 0 without a tree."""
    silence: Silence | None = None
    """The part in which the draft proposed nothing; TAR and times include its iterations."""

    @property
    def size(self) -> int:
        """The nodes of a tree, or the lookahead."""
        return self.nodes or self.lookahead

    @property
    def where(self) -> str:
        """The size as part of a sentence."""
        return f"with {self.nodes} nodes" if self.nodes else f"at lookahead {self.lookahead}"

    @property
    def tokens_per_s(self) -> float:
        return throughput(self.tar, self.iteration)

    @property
    def speed_up(self) -> float:
        return self.tokens_per_s * self.plain_s

    @property
    def break_even_tar(self) -> float:
        """The TAR at which it is as fast as plain decoding."""
        return required_tar(1 / self.plain_s, self.iteration)

    @property
    def most_tar(self) -> float:
        """The TAR if every draft token were accepted: d + 1, less if some iterations propose nothing."""
        return 1 + (1 - (self.silence.iterations if self.silence else 0.0)) * self.lookahead

    @property
    def reachable(self) -> bool:
        """Whether a draft this slow is worth it at any acceptance rate."""
        return self.break_even_tar < self.most_tar

    @property
    def waterfall(self) -> Waterfall:
        """The losses in order of the parts; with `actual` they add up to `ideal`."""
        plain_s, tar = self.plain_s, max(self.tar, 1.0)
        # Seconds of an iteration that takes as long as a plain token, then with each part added at its true length.
        seconds = [plain_s, plain_s + self.iteration.draft_s]
        seconds.append(seconds[-1] + self.iteration.verify_s - plain_s)
        seconds.append(seconds[-1] + self.iteration.other_s)
        speed_ups = [tar * plain_s / total_s for total_s in seconds]
        drafting, verifying, rest = (before - after for before, after in pairwise(speed_ups))
        return Waterfall(speed_ups[0], drafting, verifying, rest, speed_ups[-1])

    @property
    def verdict(self) -> str:
        """One sentence on whether it is worth it, and why."""
        needs = f"break-even is at TAR {self.break_even_tar:.2f}, it has {self.tar:.2f}"
        if self.speed_up > 1 + EVEN:
            return f"pays {self.speed_up:.2f}x {self.where}; {needs}"
        if self.speed_up > 1 - EVEN:
            return f"makes no difference {self.where}; {needs}"
        if not self.reachable:
            return (
                f"cannot pay {self.where}: an iteration takes as long as {self.break_even_tar:.2f} "
                f"tokens of plain decoding and yields {self.most_tar:.3g} at most; a faster draft is needed"
            )
        return f"does not pay, {self.speed_up:.2f}x {self.where}; {needs}"


def best(predictions: Mapping[int, Prediction]) -> Prediction:
    """Return the fastest prediction, and among equally fast ones the smallest size."""
    return max(predictions.values(), key=lambda prediction: (prediction.tokens_per_s, -prediction.size))
