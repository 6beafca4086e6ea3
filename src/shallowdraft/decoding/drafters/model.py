"""A draft model that decodes one token after the other."""

import copy

import torch
from torch import Tensor

from shallowdraft.decoding.sampling import Samplings, drawn, in_vocabulary
from shallowdraft.decoding.state import State, fill
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.runs.sampling import Sampling


class ModelDrafter:
    """A smaller model that decodes ahead with a cache of its own, as far as it may or as long as it is confident.

    With `min_confidence` it goes on only while its own probability of its last token is at least
    that, in some row. That token is proposed all the same: to leave out a token because of what was
    drawn would change the law of the text.
    """

    def __init__(
        self,
        decoder: Decoder,
        lookahead: int,
        sampling: Sampling,
        target_vocab: int,
        min_confidence: float | None = None,
    ) -> None:
        self.decoder, self.lookahead, self.min_confidence = decoder, lookahead, min_confidence
        self.sampling: Sampling | Samplings = sampling
        self.nodes = lookahead
        self._vocab = target_vocab
        self.cache: KVCache | None = None

    def of(self, sampling: Samplings, cache: KVCache) -> "ModelDrafter":
        """The same model for other rows."""
        batch = copy.copy(self)
        batch.sampling, batch.cache = sampling, cache
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
            proposed, best = self.decoder.decode(tokens, positions, self.cache, state.span, steps, self._vocab)
            return Proposal(proposed, None, best)
        drafted, largest, laws, confidence = [], [], [], []
        for step in range(steps):
            hidden = self.decoder(tokens, positions, self.cache, state.span)
            logits = self.decoder.head(hidden[:, -1])
            if greedy:
                law = in_vocabulary(logits, self._vocab).float().softmax(-1)
                best, token = logits[:, : self._vocab].max(-1)
            else:
                law, token, best = drawn(logits, self.sampling, self._vocab, uniforms[:, step])
            laws.append(law)
            drafted.append(token)
            largest.append(best)
            tokens, positions = token[:, None], positions[:, -1:] + 1
            if self.min_confidence is not None:
                confidence.append(law.gather(1, tokens))
                if bool((confidence[-1] < self.min_confidence).all()):
                    break
        q = None if greedy else torch.stack(laws, 1)
        sure = torch.cat(confidence, 1) if confidence else None
        return Proposal(torch.stack(drafted, 1), q, torch.stack(largest, 1), confidence=sure)

    def _unread(self, state: State, missed: int) -> tuple[Tensor, Tensor]:
        # The last two tokens, always: after a fully accepted iteration the cache lacks the last draft token.
        return state.tail(2 + missed)

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        assert self.cache is not None
        self.cache.keep(base, path)
