"""n-grams: the text proposes its own continuation where it repeats.

Shapes: B rows, S slots of the token buffer.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter, NoDrafter
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache
from shallowdraft.models.model import Model
from shallowdraft.runs.sampling import Sampling

LONGEST_MATCH = 16  # tokens at the end of a text that are searched for in the text before them
BREAK_EVEN = 1 / 9  # probability of acceptance at which verifying a draft token costs about what it gains
Text = str
"""A character for each token id: strings are searched faster than arrays."""


class NgramDrafter(NoDrafter):
    """Copies the tokens that followed the latest earlier occurrence of the text's last tokens; needs no model.

    It copies the number of tokens worth verifying, in a batch that of the row with the most.
    On a GPU, where shapes must not change, and with `full_proposals`, every proposal is as long as
    the lookahead.
    """

    def __init__(self, lookahead: int, sampling: Sampling, vocab: int, *, full_proposals: bool = False) -> None:
        self.lookahead = self.nodes = lookahead
        self._vocab, self._full_proposals = None if sampling.greedy else vocab, full_proposals
        self._texts: list[Text] = []

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self._texts = []

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        longest = uniforms.shape[1]
        if state.tokens.is_cuda:
            proposed = copy_on_device(state.tokens, state.length, longest)
        else:
            self._texts = texts = self._read(state)
            matches = [longest_match(text) for text in texts]
            # The length depends on nothing but what was emitted: under sampling it changes no distribution.
            worth = max(copy_length(text, *match) for text, match in zip(texts, matches, strict=True))
            count = longest if self._full_proposals else min(longest, worth)
            ahead = [continuation(text, start, count) for text, (start, _) in zip(texts, matches, strict=True)]
            proposed = torch.tensor(ahead, dtype=torch.int64)
        # Nothing is drawn: each token has all the probability of its distribution.
        q = None if self._vocab is None else torch.nn.functional.one_hot(proposed, self._vocab).float()
        return Proposal(proposed, q)

    def _read(self, state: State) -> list[Text]:
        """Return every row's text: what was read before, cut if the row was rewound, and the tokens since."""
        texts = self._texts or [""] * len(state.tokens)
        rows = zip(texts, state.tokens.numpy(), state.length.tolist(), strict=True)
        return [text[:length] + to_text(tokens[len(text) : length].tolist()) for text, tokens, length in rows]


def to_text(tokens: Iterable[int]) -> Text:
    """Write token ids as characters."""
    return "".join(map(chr, tokens))


def longest_match(text: Text) -> tuple[int, int]:
    """Find the longest earlier occurrence of a text's end, among equally long ones the latest.

    Return the place of the token that follows it and the number of matching tokens; the last place
    and 0 without any.
    """
    start, matched = len(text) - 1, 0
    while matched < LONGEST_MATCH:
        # A match of one token more cannot lie later than the latest match of one fewer.
        place = text.rfind(text[-matched - 1 :], 0, start)
        if place < 0:
            break
        start, matched = place + matched + 1, matched + 1
    return start, matched


def copy_length(text: Text, start: int, matched: int) -> int:
    """Return how many tokens are worth copying from a match.

    Twice the number of matching tokens or more; fewer if the text also continued otherwise.

    In what zoo:target writes, the next token is right in about m of m + 2 cases where m tokens
    match, and more often if the last two were always followed by it. So if it followed them in c of
    n places, k copied tokens are taken to be right with probability c / n · (m / (m + k))², where m
    counts the other such places too. k is the length at which this falls to BREAK_EVEN.
    """
    if not matched:
        return 0
    end = text[-2:] if matched > 1 else text[-1]
    same, places = text.count(end + text[start]), text.count(end, 0, -1)
    return max(0, round((matched + same - 1) * (math.sqrt(same / places / BREAK_EVEN) - 1)))


def continuation(text: Text, start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on, beginning there again at the text's end."""
    tokens = [ord(token) for token in text[start : start + count]]
    return (tokens * count)[:count]


def copy_on_device(tokens: Tensor, length: Tensor, count: int) -> Tensor:
    """Compute `longest_match` and `continuation` of texts tokens [B, S] of given length [B], reading no value.

    Return [B, count].
    """
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    before = torch.nn.functional.pad(tokens, (LONGEST_MATCH, 0), value=-1)
    end = before.gather(1, length[:, None] + torch.arange(LONGEST_MATCH, device=tokens.device))
    same = before.unfold(1, LONGEST_MATCH, 1)[:, :-1] == end[:, None]  # [B, S, LONGEST_MATCH]
    # Matching tokens directly before each slot, counted backwards from it; none at slots beyond the text.
    matched = same.flip(-1).cumprod(-1).sum(-1) * (slot < length[:, None])
    best = (matched * len(slot) + slot * (matched > 0)).argmax(1)  # the longest match, then the latest
    start = torch.where(matched.amax(1) > 0, best, length - 1)[:, None]
    ahead = torch.arange(count, device=tokens.device) % (length[:, None] - start)
    return tokens.gather(1, start + ahead)


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter that copies from the text."""
    vocab, full = target.shape.vocab, settings.full_proposals
    return NgramDrafter(settings.longest_lookahead, settings.sampling, vocab, full_proposals=full)
