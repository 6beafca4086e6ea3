"""The rules that decide what is emitted. Pure tensor code: nothing else in the package accepts or rejects a token, but
kernels that are tested to do the same (`gpu_choice`, and greedily `commit_greedy` of kernels/cpu.c).

Shapes: B rows, d lookahead, V vocabulary. Position j of p is the target's law of the token that follows proposal j - 1.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shallowdraft.decoding.sampling import Samplings, draw, probabilities, without
from shallowdraft.models.tree import PlacedTree
from shallowdraft.runs.sampling import Sampling

BISECTIONS = 16

Rule = Literal["token", "block"]
"""How sampled proposals are judged: token by token, or all together, which accepts more."""


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [B, d] and, when sampling, the very distributions [B, d, V] they were drawn from."""

    tokens: Tensor
    q: Tensor | None = None
    largest: Tensor | None = None
    """[B, d] the largest logit behind each: no number if any was none."""
    tree: PlacedTree | None = None
    """Where tokens branch: they are its nodes from 1 on, and q [B, N, V] is what the children of each are drawn from,
    one after the other, none twice."""
    independent: bool = False
    """Whether the tree is several chains, each drawn without a look at the others."""
    confidence: Tensor | None = None
    """[B, d] the draft's own probability of each token, where it is asked for."""


@dataclass(frozen=True)
class Verdict:
    """Of `tokens` [B, d + 1] the first `accepted` [B] are the draft's, the next is the target's, the rest void."""

    tokens: Tensor
    accepted: Tensor
    sound: Tensor
    """[B] whether every logit and probability was a number; a row that is not sound must not be emitted."""
    path: Tensor | None = None
    """[B, d] of a tree, the nodes that were accepted; those behind them stand where they are."""


def verify(
    logits: Tensor,
    proposal: Proposal,
    sampling: Sampling | Samplings,
    coins: Tensor,
    last: Tensor,
    rule: Rule = "token",
) -> Verdict:
    """Judge a proposal by the target's logits [B, d + 1, V]; `coins` [B, d] and `last` [B] are uniform in [0, 1)."""
    if proposal.tree is not None:
        return _both_sound(_verify_tree(logits, proposal, proposal.tree, sampling, coins, last), proposal)
    if sampling.greedy:
        return verify_choice(*logits.max(-1), proposal)
    p = probabilities(logits, sampling)
    q = proposal.q if proposal.q is not None else p[:, :0]
    judge = verify_block if rule == "block" else verify_sampled
    return _both_sound(judge(p, q, proposal.tokens, coins, last), proposal)


def verify_choice(best: Tensor, choice: Tensor, proposal: Proposal) -> Verdict:
    """Judge a proposal by the target's largest logits and their tokens, [B, d + 1] each."""
    return _both_sound(verify_greedy(best, choice, proposal.tokens), proposal)


def verify_greedy(best: Tensor, choice: Tensor, proposed: Tensor) -> Verdict:
    """Accept while the proposal is the target's most likely token."""
    accepted = (proposed == choice[:, :-1]).cumprod(1).sum(1)
    return Verdict(choice, accepted, _sound(best, accepted))


def verify_sampled(p: Tensor, q: Tensor, proposed: Tensor, coins: Tensor, last: Tensor) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023): accept x with probability min(1, p(x) / q(x)); at the first
    rejection draw from max(p - q, 0), after none from p. The law of what is emitted is p's, whatever q is.
    """
    p_x, q_x = _of(p[:, :-1], proposed), _of(q, proposed)
    accepted = (coins * q_x < p_x).cumprod(1).sum(1)
    return _with_next(p, q, proposed, accepted, torch.ones_like(p[:, :, 0]), last)


def verify_block(p: Tensor, q: Tensor, proposed: Tensor, coins: Tensor, last: Tensor) -> Verdict:
    """Block verification (Sun et al. 2024): accept the longest prefix whose own coin says so, by the ratio of its joint
    probabilities; then draw from what that prefix leaves of p. The law is p's, and never is less accepted.
    """
    joint, chance = block_chances(p, q, proposed)
    length = torch.arange(1, proposed.shape[1] + 1, device=p.device)
    accepted = (length * (coins < chance)).amax(1) if proposed.shape[1] else torch.zeros_like(last, dtype=torch.int64)
    return _with_next(p, q, proposed, accepted, joint, last)


def block_chances(p: Tensor, q: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """The chance [B, d + 1] that a prefix or more of the proposal is accepted, and [B, d] that it is if not more is."""
    ratio = _of(p[:, :-1], proposed) / _of(q, proposed)
    reached = [torch.ones_like(p[:, 0, 0])]
    for step in range(proposed.shape[1]):
        reached.append((reached[-1] * ratio[:, step]).clamp(max=1))
    joint = torch.stack(reached, 1)
    left = (joint[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    stays = left + 1 - joint[:, 1:-1]  # the chance that more is not accepted
    chance = torch.where(stays > 0, left / stays, 1.0)
    return joint, torch.cat((chance, joint[:, 1:][:, -1:]), 1)


def _verify_tree(
    logits: Tensor, proposal: Proposal, tree: PlacedTree, sampling: Sampling | Samplings, coins: Tensor, last: Tensor
) -> Verdict:
    if sampling.greedy:
        best, choice = logits.max(-1)
        node = matched(tree, proposal.tokens, choice)
        token = choice.gather(1, node[:, None])
    else:
        assert proposal.q is not None
        p = probabilities(logits, sampling)
        best = p.sum(-1)
        walk = selected if proposal.independent else walked
        node, token = walk(tree, p, proposal.q, proposal.tokens, coins, last)
    accepted, path = tree.depths[node], tree.paths[node]
    tokens = torch.nn.functional.pad(proposal.tokens.gather(1, path - 1), (0, 1)).scatter(1, accepted[:, None], token)
    on_path = torch.nn.functional.pad(path, (1, 0))
    return Verdict(tokens, accepted, _sound(best.gather(1, on_path), accepted), path)


def matched(tree: PlacedTree, tokens: Tensor, choice: Tensor) -> Tensor:
    """Nodes with tokens [B, N - 1], and what the target chose after each [B, N] -> the deepest node [B] reached by its
    choices.
    """
    hit = torch.nn.functional.pad(tokens == choice[:, tree.parents[1:]], (1, 0), value=True)
    reached = hit
    for _ in range(tree.tree.depth - 1):
        reached = hit & reached[:, tree.parents]
    return (reached * (tree.depths + 1)).argmax(1)


def walked(
    tree: PlacedTree, p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Recursive rejection: down the tree from node 0, at each node its children one after the other, with what the ones
    before have left of the two laws p and q [B, N, V] -> the node reached [B], and a token [B, 1] drawn there.

    The first child is judged as a single proposal would be; any further one can only add. The law is p's.
    """
    row = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(row)
    law, going = p[:, 0], torch.ones_like(row, dtype=torch.bool)
    for _ in range(tree.tree.depth):
        draft, moved, at = q[row, node], torch.zeros_like(going), node
        for child in tree.children[node].T:
            asked = going & ~moved & (child > 0)
            token = tokens[row, (child - 1).clamp(min=0)][:, None]
            coin = coins[row, (child - 1).clamp(min=0)][:, None]
            drawn = draft.gather(1, token)
            asked = asked & (drawn > 0).squeeze(1)  # a law with too few tokens for all children
            taken = asked & (coin * drawn < law.gather(1, token)).squeeze(1)
            moved, at = moved | taken, torch.where(taken, child, at)
            turned = (asked & ~taken)[:, None]
            law = torch.where(turned, _left(law, draft), law)
            draft = torch.where(turned, without(draft, token), draft)
        node, going = at, moved
        law = torch.where(moved[:, None], p[row, node], law)
    return node, draw(law, last)[:, None]


def selected(
    tree: PlacedTree, p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """SpecTr's k-SEQ (Sun et al. 2023): of chains drawn independently, at each depth the first whose token x passes
    with probability min(1, p(x) / (r q(x))); those with another token there drop out. As `walked`.

    r grows with the chains still in: it is what makes all of them together accept as much as can be. The law is p's.
    """
    count, depth = len(tree.tree.children[0]), tree.tree.depth
    row = torch.arange(len(p), device=p.device)
    node, law = torch.zeros_like(row), p[:, 0]
    going, alive = torch.ones_like(row, dtype=torch.bool), torch.ones_like(tokens[:, :count], dtype=torch.bool)
    for level in range(depth):
        here = slice(level * count, (level + 1) * count)
        draft, offered = q[row, node], tokens[:, here]
        strictness, accepted = k_seq(law, draft, alive.sum(1))
        odds = coins[:, here] * strictness[:, None] * draft.gather(1, offered)
        passing = alive & going[:, None] & (odds < law.gather(1, offered))
        first, going_on = passing.to(torch.uint8).argmax(1), passing.any(1)
        rest = (law - accepted).clamp(min=0)
        total = rest.sum(1, keepdim=True)
        left = torch.where((going & ~going_on)[:, None] & (total > 0), rest / total, law)
        node = torch.where(going_on, 1 + level * count + first, node)
        alive = torch.where(going_on[:, None], alive & (offered == offered.gather(1, first[:, None])), alive)
        law, going = torch.where(going_on[:, None], p[row, node], left), going_on
    return node, draw(law, last)[:, None]


def k_seq(law: Tensor, draft: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For `count` [B] tokens drawn from laws draft [B, V]: r [B], and what of law [B, V] they then account for.

    r is the smallest, up to rounding, for which no token is accepted more often than law has it.
    """
    low, high = torch.ones_like(law[:, 0]), count.to(law.dtype)

    def passing(strictness: Tensor) -> tuple[Tensor, Tensor]:
        """The chance that one passes, and that any does."""
        one = torch.minimum(law / strictness[:, None], draft).sum(1)
        return one, 1 - (1 - one).clamp(min=0) ** count

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        one, some = passing(middle)
        enough = middle * one >= some
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    one, some = passing(high)
    each = some / one.clamp(min=torch.finfo(law.dtype).tiny)
    return high, torch.minimum(law / high[:, None], draft) * each[:, None]


def _left(law: Tensor, draft: Tensor) -> Tensor:
    """max(law - draft, 0) as a law; `law` itself where nothing is left, which has probability zero."""
    rest = (law - draft).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, law)


def _of(laws: Tensor, tokens: Tensor) -> Tensor:
    """Laws [B, d, V] -> the probability [B, d] of each token."""
    return laws.gather(2, tokens[..., None]).squeeze(2)


def _with_next(p: Tensor, q: Tensor, proposed: Tensor, accepted: Tensor, joint: Tensor, last: Tensor) -> Verdict:
    """Add the token that follows what was accepted, drawn from max(joint * p - q, 0)."""
    row = torch.arange(len(p), device=p.device)
    p_next = p[row, accepted]
    q_next = torch.nn.functional.pad(q, (0, 0, 0, 1))[row, accepted]  # after d acceptances there is no q to subtract
    residual = (joint[row, accepted, None] * p_next - q_next).clamp(min=0)
    # p = q up to rounding leaves nothing; a rejection then has probability zero, and p is the right law.
    empty = residual.sum(-1, keepdim=True) <= 0
    token = draw(torch.where(empty, p_next, residual), last)
    tokens = torch.nn.functional.pad(proposed, (0, 1)).scatter(1, accepted[:, None], token[:, None])
    return Verdict(tokens, accepted, _sound(p.sum(-1), accepted))


def _both_sound(verdict: Verdict, proposal: Proposal) -> Verdict:
    if proposal.largest is None:
        return verdict
    return replace(verdict, sound=verdict.sound & proposal.largest.isfinite().all(1))


def _sound(numbers: Tensor, accepted: Tensor) -> Tensor:
    """Whether one number a position [B, d + 1] is finite wherever it decided a token; behind those it is void."""
    void = torch.arange(numbers.shape[1], device=numbers.device) > accepted[:, None]
    return (numbers.isfinite() | void).all(1)
