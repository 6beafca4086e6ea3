"""Counts and times of a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of a run, and of its phases: reading the prompts, drafting, verifying."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: "PhaseTimes") -> "PhaseTimes":
        return PhaseTimes(
            self.prefill_s + other.prefill_s,
            self.draft_s + other.draft_s,
            self.verify_s + other.verify_s,
            self.total_s + other.total_s,
        )

    def __sub__(self, other: "PhaseTimes") -> "PhaseTimes":
        return PhaseTimes(
            self.prefill_s - other.prefill_s,
            self.draft_s - other.draft_s,
            self.verify_s - other.verify_s,
            self.total_s - other.total_s,
        )

    def halved(self) -> "PhaseTimes":
        """Return half of each time: the mean of two runs from their sum."""
        return PhaseTimes(self.prefill_s / 2, self.draft_s / 2, self.verify_s / 2, self.total_s / 2)


@dataclass(frozen=True)
class Statistics:
    """Counts of one prompt's iterations, and the times of the batch that it ran in."""

    tokens: int
    """New tokens, the one that prefill emits included."""
    emitted: int
    """New tokens that iterations emitted."""
    iterations: int
    drafted: int
    accepted: int
    """Draft tokens accepted and emitted."""
    tar: float
    """emitted / iterations; 0 without an iteration."""
    acceptance_rate: float
    """accepted / drafted; 0 if nothing was drafted."""
    acceptance_histogram: tuple[int, ...]
    """Numbers of iterations that accepted 0, 1, … draft tokens."""
    proposal_histogram: tuple[int, ...]
    """Numbers of iterations whose proposals were 0, 1, … draft tokens deep."""
    acceptance_by_position: tuple[float, ...]
    """Share of accepted proposals at depth 1, 2, …: iterations that accepted at least n tokens / that proposed n."""
    prefill_s: float
    draft_s: float
    verify_s: float
    other_s: float
    total_s: float
    tokens_per_s: float
    """tokens / total_s."""
    decode_tokens_per_s: float
    """emitted / (total_s - prefill_s): the paper's throughput."""

    @classmethod
    def derive(
        cls,
        *,
        tokens: int,
        emitted: int,
        drafted: int,
        histogram: Sequence[int],
        proposed: Sequence[int],
        times: PhaseTimes,
    ) -> "Statistics":
        """Compute the statistics that follow from the counts.

        `histogram` and `proposed` are acceptance and proposal histogram, with entries for 0 to
        lookahead tokens.
        """
        iterations = sum(histogram)
        accepted = sum(count * tokens_accepted for tokens_accepted, count in enumerate(histogram))
        decode_s = times.total_s - times.prefill_s
        return cls(
            tokens=tokens,
            emitted=emitted,
            iterations=iterations,
            drafted=drafted,
            accepted=accepted,
            tar=_ratio(emitted, iterations),
            acceptance_rate=_ratio(accepted, drafted),
            acceptance_histogram=tuple(histogram),
            proposal_histogram=tuple(proposed),
            acceptance_by_position=tuple(
                _ratio(sum(histogram[depth:]), sum(proposed[depth:])) for depth in range(1, len(histogram))
            ),
            prefill_s=times.prefill_s,
            draft_s=times.draft_s,
            verify_s=times.verify_s,
            # on a GPU the phases may include an iteration that was still running at the end
            other_s=max(0.0, decode_s - times.draft_s - times.verify_s),
            total_s=times.total_s,
            tokens_per_s=_ratio(tokens, times.total_s),
            decode_tokens_per_s=_ratio(emitted, decode_s),
        )

    @property
    def times(self) -> PhaseTimes:
        return PhaseTimes(self.prefill_s, self.draft_s, self.verify_s, self.total_s)

    def to_json(self) -> dict[str, Any]:
        """Return all fields under our names, and under vLLM's names those that it reports too."""
        return asdict(self) | {
            "mean_acceptance_length": self.tar,
            "draft_acceptance_rate": self.acceptance_rate,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_steps": self.iterations,
        }


def total(prompts: Sequence[Statistics], *, one_batch: bool) -> Statistics:
    """Combine the statistics of several prompts: ratios are those of the sums.

    The rows of one batch share its times; the times of separate runs are added.
    """
    accepted = zip_longest(*(prompt.acceptance_histogram for prompt in prompts), fillvalue=0)
    proposed = zip_longest(*(prompt.proposal_histogram for prompt in prompts), fillvalue=0)
    times = prompts[0].times
    for prompt in () if one_batch else prompts[1:]:
        times += prompt.times
    return Statistics.derive(
        tokens=sum(prompt.tokens for prompt in prompts),
        emitted=sum(prompt.emitted for prompt in prompts),
        drafted=sum(prompt.drafted for prompt in prompts),
        histogram=[sum(counts) for counts in accepted],
        proposed=[sum(counts) for counts in proposed],
        times=times,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
