"""Replay of draft models: one teacher-forced pass over a trace gives the TAR at every lookahead.

Under greedy decoding it is the engine's own count. Under sampling it is its expectation: given that the target emitted
x, the draft's proposal was accepted with probability min(1, q(x) / p(x)).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shallowdraft.decoding.sampling import probabilities
from shallowdraft.limits import MAX_LOOKAHEAD
from shallowdraft.models.model import Model
from shallowdraft.replaying.iterations import Floats, IterationCounts, count_iterations, kept_by_iteration
from shallowdraft.replaying.result import Replay
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace

LOOKAHEADS = tuple(range(1, MAX_LOOKAHEAD + 1))


@dataclass(frozen=True)
class ModelReplay(Replay):
    """A draft model's replay, known by the acceptance probability of every token; greedy or sampled."""

    acceptance: list[Floats] = field(repr=False)
    """The probability that the draft token is accepted, by output and token behind the first."""
    context: int
    """The longest text that the draft reads."""
    digest: str = ""
    """Content of the draft."""
    dtype: str = ""
    """Precision of the draft."""

    @cached_property
    def room(self) -> list[int]:
        """The number of tokens behind the first after which the draft's context is full, by output."""
        return [self.context - len(output.prompt) - 1 for output in self.trace.outputs]

    def silent_from(self, size: int) -> int:
        return self.context - size + 1

    @cached_property
    def counts(self) -> IterationCounts:
        return count_iterations(self.acceptance, LOOKAHEADS, self.room)

    def candidate(self, size: int) -> Candidate:
        return Candidate(self.draft, size, digest=self.digest, dtype=self.dtype)

    def greedy_iterations(self, row: int, size: int) -> list[tuple[int, int]]:
        room = self.room[row]
        kept = kept_by_iteration([probability >= 1 for probability in self.acceptance[row]], size, room)
        starts = accumulate((count + 1 for count in kept), initial=0)
        return [(count, size if start + size <= room else 0) for count, start in zip(kept, starts, strict=False)]


def replay_model(draft: Model, trace: Trace, *, fits: bool = False) -> ModelReplay:
    """Replay a draft model, in one pass over every output.

    `fits` says that the draft's vocabulary was already checked against the target itself.
    """
    if not fits:
        require_vocabulary(trace, draft)
    acceptance = []
    for output in trace.outputs:
        chunks = acceptances(draft, output, trace.sampling, trace.vocabulary["size"])
        probabilities_in_context = torch.cat([torch.zeros(0), *chunks]).numpy().astype(float)
        beyond_context = len(output.output) - 1 - len(probabilities_in_context)
        acceptance.append(np.pad(probabilities_in_context, (0, beyond_context)))
    return ModelReplay(draft.name, trace, acceptance, draft.shape.context, draft.digest, draft.precision)


def acceptances(draft: Model, output: Output, sampling: Sampling, vocab: int) -> Iterator[Tensor]:
    """Yield the probability [T] that the draft token in place of each token is accepted, in chunks."""
    start = 1
    for logits, tokens in predictions(draft, output, first=1):
        logits = logits[:, :vocab]  # tokens that the target lacks are never proposed
        if sampling.greedy:
            yield (logits.argmax(-1) == tokens).float().cpu()
            continue
        q = probabilities(logits, sampling)  # [T, V]
        in_draft = tokens < q.shape[-1]  # [T]: the target may have more tokens
        q_x = torch.where(in_draft, q.gather(1, tokens.clamp(max=q.shape[-1] - 1)[:, None]).squeeze(1), 0.0)
        assert output.logprobs is not None
        p_x = torch.tensor(output.logprobs[start : start + len(tokens)], dtype=torch.float64).exp()
        start += len(tokens)
        yield (q_x.cpu() / p_x).clamp(max=1.0)


def likeliest_tokens(draft: Model, output: Output, vocab: int) -> list[int]:
    """Return the draft's likeliest token in place of each token behind the first, as far as its context reaches."""
    passes = predictions(draft, output, first=1)
    return [token for logits, _ in passes for token in logits[:, :vocab].argmax(-1).tolist()]
