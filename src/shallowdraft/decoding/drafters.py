"""Where proposals come from. What a drafter proposes decides the speed, never the law of the output.

Shapes: B rows, d lookahead, V the target's vocabulary, S slots of the token buffer.
"""

import copy
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shallowdraft.decoding.sampling import Sampling, Samplings, draw, drawn, in_vocabulary, probabilities, without
from shallowdraft.decoding.state import State, fill
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.models.tree import Tree

LONGEST_MATCH = 16  # tokens at the end of a text that are looked for further up
UNLIKELY = 1 / 9  # how likely a copied token is to be kept where it costs about what it brings

Text = str
"""A character for each token id: strings are searched faster than arrays."""


class Drafter(Protocol):
    """Proposes up to `lookahead` tokens an iteration."""

    lookahead: int
    nodes: int
    """How many tokens it proposes for that: more where they branch."""

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        """Read the prompts, once, before the first iteration.

        The target has: `cache` is its cache, and `hidden` [B, C] its hidden state behind each.
        """

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        """Continue every row by d tokens; `uniforms` [B, d] are the draws to use.

        Iterations were `missed` since it was last asked; each added one token to every row.
        """

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        """Of its tree behind positions base [B], the nodes of path [B, d] are the text now.

        `hidden` [B, C] is the target's hidden state behind the last of them that was accepted.
        """


class NoDrafter:
    """Proposes nothing: plain decoding is speculation with lookahead 0."""

    lookahead = nodes = 0

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        pass

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        pass

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        return Proposal(state.tokens[:, :0])


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


class SkipDrafter(ModelDrafter):
    """The target itself without some of its parts: no second model, and no second cache.

    What it writes to the cache for the tokens it proposes, verification overwrites.
    """

    def __init__(
        self,
        target: Decoder,
        skips: Collection[int],
        lookahead: int,
        sampling: Sampling,
        min_confidence: float | None = None,
    ) -> None:
        super().__init__(target.skipping(skips), lookahead, sampling, target.shape.vocab, min_confidence)

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self.cache = cache

    def _unread(self, state: State, missed: int) -> tuple[Tensor, Tensor]:
        return state.tail(1)  # the target has read all others


def early_exit(layers: int) -> frozenset[int]:
    """What to skip where nothing was searched for: the second half of the layers."""
    return frozenset(range(2 * -(-layers // 2), 2 * layers))


class TreeDrafter(ModelDrafter):
    """A smaller model that decodes a tree ahead, level by level: the likeliest tokens, or draws.

    No child is drawn twice, unless they are to be independent.
    """

    def __init__(
        self, decoder: Decoder, tree: Tree, sampling: Sampling, target_vocab: int, *, independent: bool = False
    ) -> None:
        super().__init__(decoder, tree.depth, sampling, target_vocab)
        self.nodes, self._independent = len(tree.parents), independent
        self._tree = tree.on(decoder.device)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        assert self.cache is not None
        tree, base = self._tree, state.length - 1
        tokens, positions = self._unread(state, missed)
        hidden = self.decoder(tokens, positions, self.cache, state.span)[:, -1:]
        proposed: list[Tensor] = []
        largest, laws = [], []
        for level in tree.tree.levels[:-1]:
            bearing = max(node for node in level if tree.tree.children[node]) + 1 - level.start
            if level.start:
                part = tree.part(base, level.start, level.start + bearing)
                tokens = proposed[-1][:, :bearing].contiguous()
                hidden = self.decoder(tokens, part.positions, self.cache, state.span, part)
            logits = in_vocabulary(self.decoder.head(hidden), self._vocab)
            largest.append(logits.amax(-1))
            children = [tree.tree.children[node] for node in level[:bearing]]
            if self.sampling.greedy:
                proposed.append(_likeliest(logits, children))
            else:
                law = probabilities(logits, self.sampling)
                proposed.append(_draws(law, children, uniforms, again=self._independent))
                laws.append(torch.nn.functional.pad(law, (0, 0, 0, len(level) - bearing)))
        q = None
        if laws:
            q = torch.nn.functional.pad(torch.cat(laws, 1), (0, 0, 0, len(tree.tree.levels[-1])))
        return Proposal(torch.cat(proposed, 1), q, torch.cat(largest, 1), tree, self._independent)


class HeadsDrafter(NoDrafter):
    """Medusa heads on the target: a tree of what each of them guesses, from the one hidden state that is known."""

    def __init__(self, target: Decoder, heads: Heads, tree: Tree, sampling: Sampling) -> None:
        self.lookahead, self.nodes = tree.depth, len(tree.parents)
        self._target, self._heads, self._sampling = target, heads, sampling
        self._tree = tree.on(target.device)
        self._hidden: Tensor | None = None

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self._hidden = hidden.clone() if self._hidden is None else self._hidden.copy_(hidden)

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        assert self._hidden is not None
        self._hidden.copy_(hidden)

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        assert self._hidden is not None
        tree = self._tree
        logits = self._target.head(self._heads(self._hidden)[:, : self.lookahead])
        laws = None if self._sampling.greedy else probabilities(logits, self._sampling)
        proposed = []
        for depth, level in enumerate(tree.tree.levels[:-1]):
            children = [tree.tree.children[node] for node in level]
            here = (logits if laws is None else laws)[:, depth : depth + 1].expand(-1, len(level), -1)
            proposed.append(
                _likeliest(here, children) if laws is None else _draws(here, children, uniforms, again=False)
            )
        q = None if laws is None else laws[:, tree.depths.clamp(max=self.lookahead - 1)]
        return Proposal(torch.cat(proposed, 1), q, logits.amax(-1), tree)


def _likeliest(logits: Tensor, children: Sequence[Sequence[int]]) -> Tensor:
    """For nodes with logits [B, T, V] as many of the likeliest tokens as each has children, in their order."""
    ranked = logits.topk(max(map(len, children)), -1).indices
    return torch.cat([ranked[:, at, : len(nodes)] for at, nodes in enumerate(children)], 1)


def _draws(laws: Tensor, children: Sequence[Sequence[int]], uniforms: Tensor, *, again: bool) -> Tensor:
    """For nodes with laws [B, T, V] as many draws as each has children; whether one may come again."""
    found = []
    for at, nodes in enumerate(children):
        left = laws[:, at]
        for child in nodes:
            found.append(draw(left, uniforms[:, child - 1])[:, None])
            left = left if again else without(left, found[-1])
    return torch.cat(found, 1)
