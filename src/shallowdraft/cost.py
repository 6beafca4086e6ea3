"""What a draft gives and must give: the throughput model of "Decoding Speculative Decoding" and what follows from it.

An iteration drafts `d` tokens one after the other, verifies them in one pass and yields TAR tokens. Times are seconds
of one iteration at a fixed lookahead. No torch here: the figures may come from any engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from shallowdraft.errors import OptionError

EVEN = 0.02  # a speed-up within this of 1 is called even


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration: drafting, verifying, everything else."""

    draft_s: float
    verify_s: float
    other_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isfinite(value) or value < 0 or (name == "verify_s" and value == 0):
                raise OptionError(f"{name} is {value}; it must be a time in seconds above 0")

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def to_json(self) -> dict[str, float]:
        """Return the seconds of each part, as records and commands write them."""
        return {"draft_s": self.draft_s, "verify_s": self.verify_s, "other_s": self.other_s}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Iteration":
        """Read the parts from a record; earlier versions called the last two `target_s` and `rest_s`."""
        verify, other = ("verify_s", "other_s") if "verify_s" in record else ("target_s", "rest_s")
        return cls(record["draft_s"], record[verify], record[other])


def mean_iteration(iterations: Sequence[Iteration], weights: Sequence[float]) -> Iteration:
    """Return the weighted mean, part by part; with no weight at all the first one."""
    total = sum(weights)
    if not total:
        return iterations[0]
    rows = list(zip(iterations, weights, strict=True))

    def mean(part: str) -> float:
        return float(sum(getattr(one, part) * weight for one, weight in rows) / total)

    return Iteration(mean("draft_s"), mean("verify_s"), mean("other_s"))


@dataclass(frozen=True)
class Silence:
    """Where a draft proposes nothing, because its context is full: decoding is plain there."""

    begins: int
    """Tokens of text from which on it is silent."""
    iterations: float
    """The share of iterations that were plain therefore."""
    tokens: float
    """The share of new tokens that they yielded."""

    def __str__(self) -> str:
        share = f"{self.tokens:.0%}" if self.tokens > 0.01 else f"{self.tokens:.1%}"
        where = f"from {self.begins:,} tokens of text on, where its context has no room for a proposal"
        return f"silent {where}: {share} of the new tokens"


def throughput(tar: float, iteration: Iteration) -> float:
    """Tokens a second: TAR / (t_target(d) + t_draft(d)); an iteration yields the target's own token at least."""
    return max(tar, 1.0) / iteration.total_s


def required_tar(tokens_per_s: float, iteration: Iteration) -> float:
    """TAR at which iterations of that length give the wanted throughput."""
    return tokens_per_s * iteration.total_s


def extra_tar(tar: float, iteration: Iteration, best_tar: float, best: Iteration) -> float:
    """How much more TAR a draft needs to be as fast as another one."""
    return required_tar(throughput(best_tar, best), iteration) - tar


def parity_latency(tar: float, iteration: Iteration, best_tar: float, best: Iteration) -> float:
    """Seconds of drafting at which a draft would be as fast as another one; below 0 no draft of that TAR can be."""
    return tar / throughput(best_tar, best) - iteration.verify_s - iteration.other_s


def independent_tar(acceptance_rate: float, lookahead: int) -> float:
    """TAR if every draft token were accepted alike, independently: (1 - a^(d+1)) / (1 - a) (Leviathan et al. 2023)."""
    return float(sum(acceptance_rate**kept for kept in range(lookahead + 1)))


def independent_acceptance(tar: float, lookahead: int) -> float:
    """The acceptance rate at which independent tokens have that TAR; infinite where none has."""
    if tar > lookahead + 1:
        return inf
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if independent_tar(middle, lookahead) < tar else (low, middle)
    return high


def independent_speed_up(acceptance_rate: float, lookahead: int, cost_ratio: float) -> float:
    """Leviathan et al.'s speed-up: a draft step costs `cost_ratio` of a target's pass, verifying costs one pass."""
    return independent_tar(acceptance_rate, lookahead) / (lookahead * cost_ratio + 1)


@dataclass(frozen=True)
class Waterfall:
    """From the ideal speed-up, TAR, to the actual one: what each part of an iteration takes of it."""

    ideal: float
    drafting: float
    verifying: float
    """Verifying several tokens takes longer than decoding one."""
    rest: float
    actual: float

    @property
    def losses(self) -> dict[str, float]:
        """What each part takes, by its name; below 0 where it gives."""
        verifying = "longer verification" if self.verifying >= 0 else "faster verification"
        return {"drafting": self.drafting, verifying: self.verifying, "the rest": self.rest}

    @property
    def said(self) -> str:
        """The losses in words."""
        return ", ".join(
            f"{part} {'takes' if loss >= 0 else 'gives'} {abs(loss):.2f}" for part, loss in self.losses.items()
        )


@dataclass(frozen=True)
class Prediction:
    """A proposer at one lookahead, or with one tree, against plain decoding."""

    lookahead: int
    tar: float
    iteration: Iteration
    plain_s: float
    """Seconds a token of plain decoding."""
    nodes: int = 0
    """Of a tree, which is `lookahead` deep."""
    silence: Silence | None = None
    """Where its draft proposed nothing; TAR and times count those iterations too."""

    @property
    def size(self) -> int:
        return self.nodes or self.lookahead

    @property
    def where(self) -> str:
        return f"with {self.nodes} nodes" if self.nodes else f"at lookahead {self.lookahead}"

    @property
    def tokens_per_s(self) -> float:
        return throughput(self.tar, self.iteration)

    @property
    def speed_up(self) -> float:
        return self.tokens_per_s * self.plain_s

    @property
    def break_even_tar(self) -> float:
        return required_tar(1 / self.plain_s, self.iteration)

    @property
    def most_tar(self) -> float:
        """The TAR if every draft token were accepted, in as many iterations that propose any: d + 1 if all do."""
        return 1 + (1 - (self.silence.iterations if self.silence else 0.0)) * self.lookahead

    @property
    def reachable(self) -> bool:
        """Whether any draft that is this slow could pay."""
        return self.break_even_tar < self.most_tar

    @property
    def waterfall(self) -> Waterfall:
        """Losses in the order in which they arise; with `actual` they add up to `ideal`."""
        plain, tar = self.plain_s, max(self.tar, 1.0)
        steps = [plain, plain + self.iteration.draft_s]
        steps.append(steps[-1] + self.iteration.verify_s - plain)
        steps.append(steps[-1] + self.iteration.other_s)
        gains = [tar * plain / seconds for seconds in steps]
        drafting, verifying, rest = (before - after for before, after in pairwise(gains))
        return Waterfall(gains[0], drafting, verifying, rest, gains[-1])

    @property
    def verdict(self) -> str:
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


def best(found: Mapping[int, Prediction]) -> Prediction:
    """The fastest; of equals the one that proposes less."""
    return max(found.values(), key=lambda one: (one.tokens_per_s, -one.size))
