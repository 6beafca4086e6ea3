"""The interface of a drafter, and the drafter of plain decoding, which proposes nothing.

What a drafter proposes decides the speed of decoding, never the distribution of its output.

Shapes: B rows, d lookahead, C width of the target's hidden states.
"""

from typing import Protocol

from torch import Tensor

from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache


class Drafter(Protocol):
    """Proposes up to `lookahead` tokens an iteration, one behind the other or as a tree of that depth."""

    lookahead: int
    nodes: int
    """Tokens that it proposes in all: more than the lookahead if they branch."""

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        """Read the prompts, once, before the first iteration.

        The target has read them: `cache` is its KV cache, `hidden` [B, C] its hidden state at each
        prompt's last token.
        """

    def propose(self, state: State, uniforms: Tensor, missed: int) -> Proposal:
        """Continue every row by d tokens, drawn with `uniforms` [B, d].

        `missed` iterations took place since the last call; each added one token to every row.
        """

    def keep(self, base: Tensor, path: Tensor, hidden: Tensor) -> None:
        """Commit the accepted nodes `path` [B, d] of its last tree, whose node 0 stands at positions `base` [B].

        `hidden` [B, C] is the target's hidden state at the last accepted node.
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
