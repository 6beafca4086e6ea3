"""n-grams: the text proposes its own continuation where it repeats."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import NoDrafter
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache
from shallowdraft.runs.sampling import Sampling

LONGEST_MATCH = 16  # tokens at the end of a text that are looked for further up
UNLIKELY = 1 / 9  # how likely a copied token is to be kept where it costs about what it brings
Text = str
"""A character for each token id: strings are searched faster than arrays."""


class NgramDrafter(NoDrafter):
    """Copies what followed the last time the text's last tokens stood there: no model, next to no time.

    As many tokens as are worth it, in a batch as in the row with most. On a GPU, where shapes never change, and if they
    are to be `whole`, proposals are as long as the lookahead.
    """

    def __init__(self, lookahead: int, sampling: Sampling, vocab: int, *, whole: bool = False) -> None:
        self.lookahead = self.nodes = lookahead
        self._vocab, self._whole = None if sampling.greedy else vocab, whole
        self._texts: list[Text] = []

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self._texts = []

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        most = uniforms.shape[1]
        if state.tokens.is_cuda:
            proposed = copied(state.tokens, state.length, most)
        else:
            self._texts = texts = self._read(state)
            found = [earlier(text) for text in texts]
            # The length depends on nothing but what was emitted: under sampling it changes no law.
            longest = max(worth(text, *match) for text, match in zip(texts, found, strict=True))
            count = most if self._whole else min(most, longest)
            ahead = [onward(text, start, count) for text, (start, _) in zip(texts, found, strict=True)]
            proposed = torch.tensor(ahead, dtype=torch.int64)
        # Nothing is drawn: each token has all the probability of its law.
        q = None if self._vocab is None else torch.nn.functional.one_hot(proposed, self._vocab).float()
        return Proposal(proposed, q)

    def _read(self, state: State) -> list[Text]:
        """Of every row what is known and what came since; a row may have been cut, too."""
        texts = self._texts or [""] * len(state.tokens)
        rows = zip(texts, state.tokens.numpy(), state.length.tolist(), strict=True)
        return [text[:length] + written(tokens[len(text) : length].tolist()) for text, tokens, length in rows]


def written(tokens: Iterable[int]) -> Text:
    return "".join(map(chr, tokens))


def earlier(text: Text) -> tuple[int, int]:
    """Where the latest of the longest earlier matches of a text's end goes on, and how many tokens match: without any
    the last token, and 0.
    """
    start, matched = len(text) - 1, 0
    while matched < LONGEST_MATCH:
        at = text.rfind(text[-matched - 1 :], 0, start)
        if at < 0:
            break
        start, matched = at + matched + 1, matched + 1
    return start, matched


def worth(text: Text, start: int, matched: int) -> int:
    """How many tokens to copy from there: twice as many as match or more, fewer where the text went on otherwise.

    In what zoo:target writes the next token is right in about m of m + 2 cases where m match, and more often if the
    last two were always followed by it. So if they were in c of n places, k copied tokens are taken to be right with
    probability c / n · (m / (m + k))² where m counts the other such places too; k is where that becomes unlikely.
    """
    if not matched:
        return 0
    end = text[-2:] if matched > 1 else text[-1]
    same, places = text.count(end + text[start]), text.count(end, 0, -1)
    return max(0, round((matched + same - 1) * (math.sqrt(same / places / UNLIKELY) - 1)))


def onward(text: Text, start: int, count: int) -> list[int]:
    """So many tokens from a place on; once they have caught up with the text's end they go round."""
    found = [ord(token) for token in text[start : start + count]]
    return (found * count)[:count]


def copied(tokens: Tensor, length: Tensor, count: int) -> Tensor:
    """`earlier` and `onward` for texts in tokens [B, S], so long [B], without a look at a value -> [B, count]."""
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    before = torch.nn.functional.pad(tokens, (LONGEST_MATCH, 0), value=-1)
    end = before.gather(1, length[:, None] + torch.arange(LONGEST_MATCH, device=tokens.device))
    same = before.unfold(1, LONGEST_MATCH, 1)[:, :-1] == end[:, None]  # [B, S, LONGEST_MATCH]
    matched = same.flip(-1).cumprod(-1).sum(-1) * (slot < length[:, None])
    best = (matched * len(slot) + slot * (matched > 0)).argmax(1)
    start = torch.where(matched.amax(1) > 0, best, length - 1)[:, None]
    ahead = torch.arange(count, device=tokens.device) % (length[:, None] - start)
    return tokens.gather(1, start + ahead)
