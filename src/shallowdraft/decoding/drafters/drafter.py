"""The interface of a drafter, and the drafter of plain decoding, which proposes nothing.

What a drafter proposes decides the speed of decoding, never the distribution of its output.

Shapes: B rows, d lookahead, V the target's vocabulary, S slots of the token buffer.
"""

from typing import Protocol

from torch import Tensor

from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.cache import KVCache


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
