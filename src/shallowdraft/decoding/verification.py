"""The rules that decide what is emitted, in pure tensor code.

Nothing else in the package accepts or rejects a token, except for kernels that are tested to do the
same: `gpu_choice`, and `settle` of kernels/cpu.c for greedy decoding.

Shapes: B rows, d lookahead, V vocabulary, N nodes of a tree with node 0. p[:, j] is the target's
distribution of the token at draft position j, given the j draft tokens before it; p[:, d] is that
of the token behind all of them. q[:, j] is the draft's distribution of the same token, and must be
the very one that the draft token was drawn from.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shallowdraft.decoding.sampling import Samplings, draw, probabilities, without
from shallowdraft.models.tree import PlacedTree
from shallowdraft.runs.sampling import Sampling

BISECTIONS = 16  # of an interval of length < k in `k_seq`: its error is below k / 65,536

Rule = Literal["token", "block"]
"""How sampled proposals are judged: token by token, or as a block, which accepts more."""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens [B, d] and, when sampling, the very distributions [B, d, V] they were drawn from."""

    tokens: Tensor
    q: Tensor | None = None
    largest: Tensor | None = None
    """[B, d] The draft's largest logit at each token; not finite if any of its logits was NaN or infinite."""
    tree: PlacedTree | None = None
    """The tree whose nodes from 1 on are `tokens` [B, N - 1]. q [B, N, V] then holds the distribution from which the
    children of each node were drawn, one after the other, none twice."""
    independent: bool = False
    """Whether the tree is several chains, each drawn independently of the others."""
    confidence: Tensor | None = None
    """[B, d] The draft's own probability of each token, if its drafter needs it to stop early."""


@dataclass(frozen=True)
class Verdict:
    """The emitted tokens [B, d + 1]: first the accepted draft tokens, then one of the target's; the rest is void."""

    tokens: Tensor
    accepted: Tensor
    """[B] The number of accepted draft tokens."""
    finite: Tensor
    """[B] Whether every logit and probability that decided a token was finite; else the row must not be emitted."""
    path: Tensor | None = None
    """[B, d] The accepted nodes of a tree; entries behind the last one leave the cache's slots as they are."""


def verify(
    logits: Tensor,
    proposal: Proposal,
    sampling: Sampling | Samplings,
    coins: Tensor,
    last: Tensor,
    rule: Rule = "token",
) -> Verdict:
    """Judge a proposal by the target's logits [B, d + 1, V].

    `coins` [B, d] decide acceptance and `last` [B] the target's token; both are uniform in [0, 1).
    """
    if proposal.tree is not None:
        return _with_draft_finite(_verify_tree(logits, proposal, proposal.tree, sampling, coins, last), proposal)
    if sampling.greedy:
        return verify_choice(*logits.max(-1), proposal)
    p = probabilities(logits, sampling)
    q = proposal.q if proposal.q is not None else p[:, :0]
    judge = verify_block if rule == "block" else verify_sampled
    return _with_draft_finite(judge(p, q, proposal.tokens, coins, last), proposal)


def verify_choice(best: Tensor, choice: Tensor, proposal: Proposal) -> Verdict:
    """Judge a proposal by the target's largest logits and their tokens, [B, d + 1] each."""
    return _with_draft_finite(verify_greedy(best, choice, proposal.tokens), proposal)


def verify_greedy(best: Tensor, choice: Tensor, proposed: Tensor) -> Verdict:
    """Accept while the proposal is the target's most likely token."""
    accepted = (proposed == choice[:, :-1]).cumprod(1).sum(1)
    return Verdict(choice, accepted, _finite_until(best, accepted))


def verify_sampled(p: Tensor, q: Tensor, proposed: Tensor, coins: Tensor, last: Tensor) -> Verdict:
    """Judge token by token: speculative sampling (Leviathan et al. 2023).

    Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0),
    after none from p. The law of what is emitted is p's, whatever q is.
    """
    p_x, q_x = _probability_of(p[:, :-1], proposed), _probability_of(q, proposed)
    # Multiplied out, and strict: nothing is divided by 0, and a token with p = 0 is not accepted even by a coin of 0.
    accepted = (coins * q_x < p_x).cumprod(1).sum(1)
    return _with_next(p, q, proposed, accepted, torch.ones_like(p[:, :, 0]), last)


def verify_block(p: Tensor, q: Tensor, proposed: Tensor, coins: Tensor, last: Tensor) -> Verdict:
    """Judge the proposal as a block: block verification (Sun et al. 2024).

    Accept the longest prefix whose own coin says so, by the ratio of its joint probabilities; then
    draw from what this prefix leaves of p. The law is p's, and on average at least as many tokens
    are accepted as token by token.
    """
    joint, chance = block_chances(p, q, proposed)
    length = torch.arange(1, proposed.shape[1] + 1, device=p.device)
    accepted = (length * (coins < chance)).amax(1) if proposed.shape[1] else torch.zeros_like(last, dtype=torch.int64)
    return _with_next(p, q, proposed, accepted, joint, last)


def block_chances(p: Tensor, q: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the acceptance probabilities of block verification for the prefixes of 0 to d draft tokens.

    Return the probability [B, d + 1] that at least this prefix is accepted, and, for the prefixes
    of 1 to d tokens, the probability [B, d] that this prefix is accepted if no longer one is.
    """
    ratio = _probability_of(p[:, :-1], proposed) / _probability_of(q, proposed)
    # Cut to 1 at each step, not at the end: probability that a prefix cannot use is lost to longer ones.
    reached = [torch.ones_like(p[:, 0, 0])]
    for step in range(proposed.shape[1]):
        reached.append((reached[-1] * ratio[:, step]).clamp(max=1))
    joint = torch.stack(reached, 1)
    residual = (joint[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    not_longer = residual + 1 - joint[:, 1:-1]  # probability that no longer prefix is accepted
    chance = torch.where(not_longer > 0, residual / not_longer, 1.0)
    return joint, torch.cat((chance, joint[:, 1:][:, -1:]), 1)


def _verify_tree(
    logits: Tensor, proposal: Proposal, tree: PlacedTree, sampling: Sampling | Samplings, coins: Tensor, last: Tensor
) -> Verdict:
    if sampling.greedy:
        best, choice = logits.max(-1)
        node = deepest_match(tree, proposal.tokens, choice)
        token = choice.gather(1, node[:, None])
    else:
        assert proposal.q is not None
        p = probabilities(logits, sampling)
        best = p.sum(-1)
        descend = select_chain if proposal.independent else reject_recursively
        node, token = descend(tree, p, proposal.q, proposal.tokens, coins, last)
    accepted, path = tree.depths[node], tree.paths[node]
    tokens = torch.nn.functional.pad(proposal.tokens.gather(1, path - 1), (0, 1)).scatter(1, accepted[:, None], token)
    on_path = torch.nn.functional.pad(path, (1, 0))
    return Verdict(tokens, accepted, _finite_until(best.gather(1, on_path), accepted), path)


def deepest_match(tree: PlacedTree, tokens: Tensor, choice: Tensor) -> Tensor:
    """Find the deepest node [B] that is reached by the target's choices.

    `tokens` [B, N - 1] are those of the nodes from 1 on, `choice` [B, N] the target's after every
    node.
    """
    hit = torch.nn.functional.pad(tokens == choice[:, tree.parents[1:]], (1, 0), value=True)
    reached = hit  # after n rounds: whether the last n + 1 steps to the node are the target's choices
    for _ in range(tree.tree.depth - 1):
        reached = hit & reached[:, tree.parents]
    return (reached * (tree.depths + 1)).argmax(1)


def reject_recursively(
    tree: PlacedTree, p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Descend from node 0 by recursive rejection; return the node reached [B] and a token [B, 1] drawn there.

    At each node its children are judged one after the other, each by what rejected siblings leave
    of the target's distribution p [B, N, V] and of the draft's q [B, N, V]. The first child is
    judged as a single proposal would be; further children can only add to acceptance. The law is
    p's.
    """
    row = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(row)
    # What is left of p at the node, and whether the descent goes on below it.
    target, going = p[:, 0], torch.ones_like(row, dtype=torch.bool)
    for _ in range(tree.tree.depth):
        draft, moved, reached = q[row, node], torch.zeros_like(going), node
        for child in tree.children[node].T:  # [B] the next child of each row's node; 0 if it has no more
            judged = going & ~moved & (child > 0)
            token = tokens[row, (child - 1).clamp(min=0)][:, None]
            coin = coins[row, (child - 1).clamp(min=0)][:, None]
            drawn = draft.gather(1, token)
            judged = judged & (drawn > 0).squeeze(1)  # a distribution may have fewer tokens than there are children
            taken = judged & (coin * drawn < target.gather(1, token)).squeeze(1)
            moved, reached = moved | taken, torch.where(taken, child, reached)
            rejected = (judged & ~taken)[:, None]
            target = torch.where(rejected, _residual(target, draft), target)
            draft = torch.where(rejected, without(draft, token), draft)  # siblings are drawn without replacement
        node, going = reached, moved
        target = torch.where(moved[:, None], p[row, node], target)
    return node, draw(target, last)[:, None]


def select_chain(
    tree: PlacedTree, p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Descend several independent chains by SpecTr's k-SEQ (Sun et al. 2023); return as `reject_recursively` does.

    At each depth take the first chain whose token x passes, with probability min(1, p(x) / r q(x));
    chains with another token there drop out. r grows with the chains still in: it is the value at
    which all of them together are accepted as often as possible. The law is p's.
    """
    count, depth = len(tree.tree.children[0]), tree.tree.depth
    row = torch.arange(len(p), device=p.device)
    node, target = torch.zeros_like(row), p[:, 0]
    going, alive = torch.ones_like(row, dtype=torch.bool), torch.ones_like(tokens[:, :count], dtype=torch.bool)
    for level in range(depth):
        # Node 1 + level * count + c is that of chain c at this depth; tokens and coins begin with node 1.
        nodes = slice(level * count, (level + 1) * count)
        draft, offered = q[row, node], tokens[:, nodes]
        strictness, accepted = k_seq(target, draft, alive.sum(1))
        odds = coins[:, nodes] * strictness[:, None] * draft.gather(1, offered)
        passing = alive & going[:, None] & (odds < target.gather(1, offered))
        first, going_on = passing.to(torch.uint8).argmax(1), passing.any(1)
        # If no chain passes: p less what the chains would have accepted, normalised.
        residual = (target - accepted).clamp(min=0)
        total = residual.sum(1, keepdim=True)
        rejected = torch.where((going & ~going_on)[:, None] & (total > 0), residual / total, target)
        node = torch.where(going_on, 1 + level * count + first, node)
        alive = torch.where(going_on[:, None], alive & (offered == offered.gather(1, first[:, None])), alive)
        target, going = torch.where(going_on[:, None], p[row, node], rejected), going_on
    return node, draw(target, last)[:, None]


def k_seq(target: Tensor, draft: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Compute r [B] of k-SEQ, and the probability [B, V] with which each token is then accepted.

    `count` [B] tokens are drawn from the draft's distribution [B, V] and judged by the target's
    [B, V]. r is the smallest value, up to rounding, for which no token is accepted more often than
    the target has it.
    """
    low, high = torch.ones_like(target[:, 0]), count.to(target.dtype)

    def passing(strictness: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability that a given token passes, and that any of them does."""
        p_single = torch.minimum(target / strictness[:, None], draft).sum(1)
        return p_single, 1 - (1 - p_single).clamp(min=0) ** count

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        p_single, p_any = passing(middle)
        enough = middle * p_single >= p_any  # then each token is accepted at most as often as the target has it
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    p_single, p_any = passing(high)
    # Any token passes with probability `p_any`; one that does is x with probability min(target / r, draft) / p_single.
    each = p_any / p_single.clamp(min=torch.finfo(target.dtype).tiny)
    return high, torch.minimum(target / high[:, None], draft) * each[:, None]


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Normalise max(target - draft, 0); where it is zero, which has probability zero, return `target` itself."""
    residual = (target - draft).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    return torch.where(total > 0, residual / total, target)


def _probability_of(p: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability [B, d] that distributions [B, d, V] give to each token [B, d]."""
    return p.gather(2, tokens[..., None]).squeeze(2)


def _with_next(p: Tensor, q: Tensor, proposed: Tensor, accepted: Tensor, joint: Tensor, last: Tensor) -> Verdict:
    """Add the token behind the accepted ones, drawn from max(joint * p - q, 0); `joint` is [B, d + 1]."""
    row = torch.arange(len(p), device=p.device)
    p_next = p[row, accepted]
    q_next = torch.nn.functional.pad(q, (0, 0, 0, 1))[row, accepted]  # after d acceptances there is no q to subtract
    residual = (joint[row, accepted, None] * p_next - q_next).clamp(min=0)
    # If p = q up to rounding nothing is left; a rejection then has probability zero, and p is right.
    empty = residual.sum(-1, keepdim=True) <= 0
    token = draw(torch.where(empty, p_next, residual), last)
    tokens = torch.nn.functional.pad(proposed, (0, 1)).scatter(1, accepted[:, None], token[:, None])
    return Verdict(tokens, accepted, _finite_until(p.sum(-1), accepted))


def _with_draft_finite(verdict: Verdict, proposal: Proposal) -> Verdict:
    """Also mark rows as not finite in which a logit of the draft was not finite."""
    if proposal.largest is None:
        return verdict
    return replace(verdict, finite=verdict.finite & proposal.largest.isfinite().all(1))


def _finite_until(numbers: Tensor, accepted: Tensor) -> Tensor:
    """Tell whether each row's numbers [B, d + 1] are finite up to the target's token; those behind it are void."""
    void = torch.arange(numbers.shape[1], device=numbers.device) > accepted[:, None]
    return (numbers.isfinite() | void).all(1)
