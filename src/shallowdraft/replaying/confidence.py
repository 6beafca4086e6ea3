"""Replay for a draft that goes on only while it is sure: what would be kept, exact for greedy.

How many tokens are proposed behind a wrong one depends on what the draft says there, so that no one
pass tells: it drafts at every place, once for all confidences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.models.model import Model
from shallowdraft.records import Record
from shallowdraft.replaying.drafting import BATCH, draft_everywhere
from shallowdraft.replaying.result import Counted
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace

Place = tuple[list[float], int]
"""The draft's probability of each token that it proposes there, and how many of these are right."""
NOTHING: Place = ([], 0)  # beyond the draft's context


@dataclass(frozen=True)
class Confident:
    """What a draft proposes with one least confidence, and what is kept of it."""

    min_confidence: float
    lookahead: int
    counted: Counted

    @property
    def drafted(self) -> float:
        """Tokens proposed an iteration, on average."""
        proposed = self.counted.proposed(self.lookahead)
        return float(sum(count * rows.sum() for count, rows in proposed.items()) / self._iterations)

    @property
    def acceptance_rate(self) -> float:
        """The share of them that is kept."""
        kept = self.counted.walk.reached.sum() / self._iterations
        return float(kept / self.drafted) if self.drafted else 0.0

    @property
    def tar(self) -> float:
        return self.counted.tar()[self.lookahead]

    @property
    def _iterations(self) -> float:
        return max(1.0, float(self.counted.walk.at(self.lookahead).sum()))

    def to_json(self) -> Record:
        figures = {"acceptance_rate": self.acceptance_rate, "drafted": self.drafted, "tar": self.tar}
        return {"min_confidence": self.min_confidence, "lookahead": self.lookahead} | figures


def replay_confidences(draft: Model, trace: Trace, lookahead: int, min_confidences: Sequence[float]) -> list[Confident]:
    """Follow one row of text at a time, with proposals of at most `lookahead` tokens."""
    trace.require_greedy()
    require_vocabulary(trace, draft)
    drafted = {output.key: [NOTHING] * (len(output.output) - 1) for output in trace.outputs}
    fitting = [one for one in trace.outputs if len(one.prompt) + 1 + lookahead <= draft.shape.context]
    for first in range(0, len(fitting), BATCH):
        outputs = fitting[first : first + BATCH]
        for output, places in zip(outputs, _drafted(draft, outputs, lookahead, trace.vocabulary["size"]), strict=True):
            drafted[output.key][: len(places)] = places
    results = []
    for least in min_confidences:
        offered = [[_proposed(sure, least) for sure, _ in drafted[output.key]] for output in trace.outputs]
        kept = [
            [min(count, right) for count, (_, right) in zip(counts, drafted[output.key], strict=True)]
            for counts, output in zip(offered, trace.outputs, strict=True)
        ]
        candidate = Candidate.with_draft(draft, lookahead)
        counted = Counted(draft.name, trace, {lookahead: candidate}, {lookahead: kept}, {lookahead: offered})
        results.append(Confident(least, lookahead, counted))
    return results


def _drafted(draft: Model, outputs: Sequence[Output], lookahead: int, vocab: int) -> list[list[Place]]:
    """For each output, of every place that leaves a proposal room in the draft's context."""
    drafter = ModelDrafter(draft.decoder, lookahead, Sampling(), vocab, min_confidence=0.0)  # never stops, but notes
    steps: list[tuple[list[list[float]], list[int]]] = []
    for proposal, right in draft_everywhere(drafter, outputs, draft.name):
        assert proposal.confidence is not None
        steps.append((proposal.confidence.tolist(), right.tolist()))
    results = []
    for row, output in enumerate(outputs):
        room = draft.shape.context - len(output.prompt) - lookahead
        count = min(len(output.output) - 1, room)
        results.append([(sure[row], right[row]) for sure, right in steps[:count]])
    return results


def _proposed(confidences: Sequence[float], least: float) -> int:
    """How many tokens: up to the first that is less sure, which is one of them."""
    unsure = (at for at, confidence in enumerate(confidences, 1) if confidence < least)
    return next(unsure, len(confidences))
