"""A draft model that proposes one token after the other.

Shapes: B rows, d lookahead, V the target's vocabulary.
"""

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter, NoDrafter
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.sampling import Samplings, draw_from_logits, in_vocabulary
from shallowdraft.decoding.state import State, fill
from shallowdraft.decoding.verification import Proposal
from shallowdraft.errors import OptionError
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.shape import require_one_kind


class ModelDrafter:
    """A draft model that decodes ahead with a KV cache of its own, up to the lookahead or while it is confident.

    With `min_confidence` it continues only while its own probability of its last token is at least
    that, in at least one row. The token itself is proposed all the same: leaving out a token
    because of what was drawn would change the distribution of the text.
    """

    def __init__(
        self,
        decoder: Decoder,
        lookahead: int,
        sampling: Sampling | Samplings,
        target_vocab: int,
        min_confidence: float | None = None,
    ) -> None:
        self.decoder, self.lookahead, self.min_confidence = decoder, lookahead, min_confidence
        self.sampling = sampling
        self.nodes = lookahead
        self._vocab = target_vocab
        self.cache: KVCache | None = None

    def for_batch(self, sampling: Samplings, cache: KVCache) -> "ModelDrafter":
        """Create a drafter with the same model for other rows, which the draft has read into `cache`."""
        batch = ModelDrafter(self.decoder, self.lookahead, sampling, self._vocab, self.min_confidence)
        batch.cache = cache
        return batch

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        if self.cache is None:
            self.cache = self.decoder.new_cache(*state.tokens.shape)
        fill(self.decoder, self.cache, state)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        tokens, positions = self._unread(state, missed)
        steps = uniforms.shape[1]
        assert self.cache is not None
        greedy = self.sampling.greedy
        if greedy and self.min_confidence is None:
            proposed, largest = self.decoder.decode(tokens, positions, self.cache, state.span, steps, self._vocab)
            return Proposal(proposed, None, largest)
        drafted, largest_logits, q, confidence = [], [], [], []
        for step in range(steps):
            hidden = self.decoder(tokens, positions, self.cache, state.span)
            logits = self.decoder.head(hidden[:, -1])
            if greedy:
                q_step = in_vocabulary(logits, self._vocab).float().softmax(-1)
                best, token = logits[:, : self._vocab].max(-1)
            else:
                q_step, token, best = draw_from_logits(logits, self.sampling, self._vocab, uniforms[:, step])
            q.append(q_step)
            drafted.append(token)
            largest_logits.append(best)
            tokens, positions = token[:, None], positions[:, -1:] + 1
            if self.min_confidence is not None:
                confidence.append(q_step.gather(1, tokens))
                if bool((confidence[-1] < self.min_confidence).all()):
                    break
        return Proposal(
            torch.stack(drafted, 1),
            None if greedy else torch.stack(q, 1),
            torch.stack(largest_logits, 1),
            confidence=torch.cat(confidence, 1) if confidence else None,
        )

    def _unread(self, state: State, missed: int) -> tuple[Tensor, Tensor]:
        """Return the committed tokens that the draft has not read yet, and their positions."""
        # Always the last two: after a fully accepted iteration the cache lacks the last draft token.
        return state.tail(2 + missed)

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        assert self.cache is not None
        self.cache.keep(base, path)


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter for the draft model; without one, plain decoding."""
    if settings.draft is None:
        return NoDrafter()
    require_fitting_draft(target, settings.draft)
    return ModelDrafter(
        settings.draft.decoder,
        settings.longest_lookahead,
        settings.sampling,
        target.shape.vocab,
        settings.min_confidence,
    )


def require_fitting_draft(target: Model, draft: Model) -> None:
    """Refuse a draft model of another vocabulary, kind or device than the target's."""
    check_vocabulary(target, draft).require()
    require_one_kind(target.shape, draft.shape)
    if draft.device != target.device:
        raise OptionError(f"the target is on {target.device} and the draft on {draft.device}; load both on one device")
