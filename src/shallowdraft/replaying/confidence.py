"""Replay of a draft model that stops drafting when its confidence falls: the tokens kept, exact for greedy decoding.

How many tokens it proposes behind a wrong one depends on its confidence there, so no single pass tells: it drafts at
every position, once for all least confidences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.models.model import Model
from shallowdraft.records import Record
from shallowdraft.replaying.drafting import BATCH, draft_everywhere
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace

Drafted = tuple[list[float], int]
"""The draft's probability of each token of a whole proposal, and how many of these tokens are right."""
NOTHING: Drafted = ([], 0)  # where the draft's context is full


@dataclass(frozen=True)
class ConfidenceReplay:
    """A draft model's replay with one least confidence."""

    min_confidence: float
    lookahead: int
    replay: CountedReplay

    @property
    def drafted(self) -> float:
        """Tokens proposed per iteration, on average."""
        by_length = self.replay.iterations_by_length(self.lookahead)
        return float(sum(length * iterations.sum() for length, iterations in by_length.items()) / self._iterations)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over proposed tokens."""
        kept = self.replay.counts.keeping.sum() / self._iterations
        return float(kept / self.drafted) if self.drafted else 0.0

    @property
    def tar(self) -> float:
        return self.replay.tar()[self.lookahead]

    @property
    def _iterations(self) -> float:
        return max(1.0, float(self.replay.counts.at(self.lookahead).sum()))

    def to_json(self) -> Record:
        """Return the figures as `replay --json` prints them."""
        figures = {"acceptance_rate": self.acceptance_rate, "drafted": self.drafted, "tar": self.tar}
        return {"min_confidence": self.min_confidence, "lookahead": self.lookahead} | figures


def replay_confidences(
    draft: Model, trace: Trace, lookahead: int, min_confidences: Sequence[float]
) -> list[ConfidenceReplay]:
    """Replay a draft with each least confidence, at batch 1, with proposals of at most `lookahead` tokens."""
    trace.require_greedy()
    require_vocabulary(trace, draft)
    drafted = {output.key: [NOTHING] * (len(output.output) - 1) for output in trace.outputs}
    fitting = [output for output in trace.outputs if len(output.prompt) + 1 + lookahead <= draft.shape.context]
    for first in range(0, len(fitting), BATCH):
        outputs = fitting[first : first + BATCH]
        by_output = _drafted(draft, outputs, lookahead, trace.vocabulary["size"])
        for output, at_positions in zip(outputs, by_output, strict=True):
            drafted[output.key][: len(at_positions)] = at_positions
    results = []
    for min_confidence in min_confidences:
        kept, proposed = [], []
        for output in trace.outputs:
            lengths = [_proposed(confidences, min_confidence) for confidences, _ in drafted[output.key]]
            pairs = zip(lengths, drafted[output.key], strict=True)
            proposed.append(lengths)
            kept.append([min(length, right) for length, (_, right) in pairs])
        candidate = Candidate.with_draft(draft, lookahead)
        replay = CountedReplay(draft.name, trace, {lookahead: candidate}, {lookahead: kept}, {lookahead: proposed})
        results.append(ConfidenceReplay(min_confidence, lookahead, replay))
    return results


def _drafted(draft: Model, outputs: Sequence[Output], lookahead: int, vocab: int) -> list[list[Drafted]]:
    """Return the whole proposals by output and position, as far as they fit into the draft's context."""
    # A least confidence of 0 never ends a proposal, but makes the drafter note its confidence.
    drafter = ModelDrafter(draft.decoder, lookahead, Sampling(), vocab, min_confidence=0.0)
    by_position: list[tuple[list[list[float]], list[int]]] = []  # confidences [B, d] and right tokens [B]
    for proposal, right in draft_everywhere(drafter, outputs, draft.name):
        assert proposal.confidence is not None
        by_position.append((proposal.confidence.tolist(), right.tolist()))
    results = []
    for row, output in enumerate(outputs):
        room = draft.shape.context - len(output.prompt) - lookahead
        count = min(len(output.output) - 1, room)
        results.append([(confidences[row], right[row]) for confidences, right in by_position[:count]])
    return results


def _proposed(confidences: Sequence[float], min_confidence: float) -> int:
    """Return the length of a proposal: it ends with the first token of less than the least confidence."""
    unsure = (length for length, confidence in enumerate(confidences, 1) if confidence < min_confidence)
    return next(unsure, len(confidences))
