"""Replay: one teacher-forced pass of a draft over a trace gives its TAR at every lookahead.

Under greedy decoding exactly what the engine would count; under sampling its expectation: given that the target emitted
x, the draft's proposal was accepted with probability min(1, q(x) / p(x)).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shallowdraft.decoding.generation import MAX_LOOKAHEAD
from shallowdraft.decoding.sampling import Sampling, probabilities
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.replay.traces import Output, Trace, predictions
from shallowdraft.replay.walk import Floats, Walk, walk

LOOKAHEADS = tuple(range(1, MAX_LOOKAHEAD + 1))


@dataclass(frozen=True)
class Replay:
    """A draft's acceptance on every token of a trace."""

    draft: str
    trace: Trace = field(repr=False)
    accepted: list[Floats] = field(repr=False)
    """For each output, of every token behind the first: the probability that the draft's token is accepted."""
    room: list[int] = field(repr=False)
    """For each output: tokens after which the draft's context is full."""

    @cached_property
    def walk(self) -> Walk:
        return walk(self.accepted, LOOKAHEADS, self.room)

    def tar(self, of_set: str | None = None) -> dict[int, float]:
        return dict(zip(LOOKAHEADS, self.walk.tar(self._rows(of_set)).tolist(), strict=True))

    def tar_interval(self, of_set: str | None = None) -> dict[int, tuple[float, float]]:
        """Bootstrap over prompts, whose samples stay together."""
        rows = self._rows(of_set)
        groups: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            groups.setdefault(self.trace.outputs[row].key[:2], []).append(int(row))
        emitted = np.array([self.walk.emitted[group].sum() for group in groups.values()])
        iterations = np.array([self.walk.iterations[group].sum(0) for group in groups.values()])
        low, high = bootstrap(
            lambda draws: emitted[draws].sum(1)[:, None] / np.maximum(iterations[draws].sum(1), 1e-9), len(groups)
        )
        return dict(zip(LOOKAHEADS, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def _rows(self, of_set: str | None) -> np.ndarray[Any, np.dtype[np.int64]]:
        outputs = self.trace.outputs
        return np.array([row for row, output in enumerate(outputs) if of_set is None or output.set == of_set])

    def to_json(self) -> dict[str, Any]:
        def figures(of_set: str | None) -> dict[str, Any]:
            return {"tar": self.tar(of_set), "tar_interval": self.tar_interval(of_set)}

        prompts = [
            {
                "set": output.set,
                "id": output.id,
                "sample": output.sample,
                "tar": dict(zip(LOOKAHEADS, tars, strict=True)),
            }
            for row, output in enumerate(self.trace.outputs)
            for tars in [self.walk.tar(np.array([row])).tolist()]
        ]
        return {
            "name": self.draft,
            **figures(None),
            "acceptance_by_position": self.walk.acceptance_by_position(MAX_LOOKAHEAD).tolist(),
            "sets": {name: figures(name) for name in self.trace.sets},
            "prompts": prompts,
        }


def replay(draft: Model, trace: Trace, *, fits: bool = False) -> Replay:
    """One pass over every output; `fits` says that the draft's vocabulary was checked against the target itself."""
    if not fits:
        trace.require_vocabulary(draft)
    context = draft.shape.context
    accepted = [
        torch.cat([torch.zeros(0), *acceptances(draft, output, trace.sampling, trace.vocabulary["size"])]).numpy()
        for output in trace.outputs
    ]
    padded = [
        np.pad(found.astype(float), (0, len(output.output) - 1 - len(found)))  # beyond the draft's context
        for found, output in zip(accepted, trace.outputs, strict=True)
    ]
    return Replay(draft.name, trace, padded, [context - len(output.prompt) - 1 for output in trace.outputs])


def acceptances(draft: Model, output: Output, sampling: Sampling, vocab: int) -> Iterator[Tensor]:
    """The probability [T] that the draft's token in each place is accepted, in chunks."""
    done = 1
    for logits, tokens in predictions(draft.decoder, output, first=1):
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
