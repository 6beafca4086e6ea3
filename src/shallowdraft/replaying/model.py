"""Replay: one teacher-forced pass of a draft over a trace gives its TAR at every lookahead.

Under greedy decoding exactly what the engine would count; under sampling its expectation: given that the target emitted
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
from shallowdraft.replaying.iterations import Floats, Walk, iterations_of, walk
from shallowdraft.replaying.result import Replay
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.replaying.vocabulary import require_vocabulary
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace

LOOKAHEADS = tuple(range(1, MAX_LOOKAHEAD + 1))


@dataclass(frozen=True)
class ModelReplay(Replay):
    """A draft's acceptance on every token of a trace."""

    accepted: list[Floats] = field(repr=False)
    """For each output, of every token behind the first: the probability that the draft's token is accepted."""
    context: int
    """The longest text that the draft reads."""
    digest: str = ""
    """Content of the draft."""
    dtype: str = ""
    """Its precision."""

    @cached_property
    def room(self) -> list[int]:
        """For each output: tokens after which the draft's context is full."""
        return [self.context - len(output.prompt) - 1 for output in self.trace.outputs]

    def silent_from(self, size: int) -> int:
        return self.context - size + 1

    @cached_property
    def walk(self) -> Walk:
        return walk(self.accepted, LOOKAHEADS, self.room)

    def candidate(self, size: int) -> Candidate:
        return Candidate(self.draft, size, digest=self.digest, dtype=self.dtype)

    def iterations_in(self, row: int, size: int) -> list[tuple[int, int]]:
        kept = iterations_of([one >= 1 for one in self.accepted[row]], size, self.room[row])
        starts = accumulate((count + 1 for count in kept), initial=0)
        return [(count, size if at + size <= self.room[row] else 0) for count, at in zip(kept, starts, strict=False)]


def replay_model(draft: Model, trace: Trace, *, fits: bool = False) -> ModelReplay:
    """One pass over every output; `fits` says that the draft's vocabulary was checked against the target itself."""
    if not fits:
        require_vocabulary(trace, draft)
    accepted = [
        torch.cat([torch.zeros(0), *acceptances(draft, output, trace.sampling, trace.vocabulary["size"])]).numpy()
        for output in trace.outputs
    ]
    padded = [
        np.pad(found.astype(float), (0, len(output.output) - 1 - len(found)))  # beyond the draft's context
        for found, output in zip(accepted, trace.outputs, strict=True)
    ]
    return ModelReplay(draft.name, trace, padded, draft.shape.context, draft.digest, draft.precision)


def acceptances(draft: Model, output: Output, sampling: Sampling, vocab: int) -> Iterator[Tensor]:
    """The probability [T] that the draft's token in each place is accepted, in chunks."""
    done = 1
    for logits, tokens in predictions(draft, output, first=1):
        logits = logits[:, :vocab]  # what the target lacks is never proposed
        if sampling.greedy:
            yield (logits.argmax(-1) == tokens).float().cpu()
            continue
        q = probabilities(logits, sampling)
        known = tokens < q.shape[-1]
        q_x = torch.where(known, q.gather(1, tokens.clamp(max=q.shape[-1] - 1)[:, None]).squeeze(1), 0.0)
        assert output.logprobs is not None
        p_x = torch.tensor(output.logprobs[done : done + len(tokens)], dtype=torch.float64).exp()
        done += len(tokens)
        yield (q_x.cpu() / p_x).clamp(max=1.0)


def choices(draft: Model, output: Output, vocab: int) -> list[int]:
    """The draft's likeliest token in every place behind the first, as far as its context reaches."""
    passes = predictions(draft, output, first=1)
    return [token for logits, _ in passes for token in logits[:, :vocab].argmax(-1).tolist()]
