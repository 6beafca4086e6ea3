"""The ways to run a verification pass: which kernels read the draft tokens, judge them and commit what is accepted.

All of them follow the rules of verification.py and differ only in speed. Each returns what was
emitted, packed as `emitted.Emitted` describes.

Shapes: B rows, d draft tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.emitted import NOT_FINITE, pack
from shallowdraft.decoding.sampling import Sampling, Samplings
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal, Rule, Verdict, verify, verify_choice
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder


@dataclass
class VerificationPass:
    """Everything that a verification pass reads and writes."""

    target: Decoder
    drafter: Drafter
    cache: KVCache
    state: State
    sampling: Sampling | Samplings
    rule: Rule
    proposal: Proposal
    uniforms: Tensor
    """Random numbers of the iteration: those of the drafter, one coin a draft token, and last a draw of the target."""
    drafter_uniforms: int
    """How many of them are the drafter's."""

    @property
    def coins(self) -> Tensor:
        """[B, d]; fewer than there are random numbers if the drafter stopped early."""
        return self.uniforms[:, self.drafter_uniforms : self.drafter_uniforms + self.proposal.tokens.shape[1]]

    @property
    def last(self) -> Tensor:
        """[B] The number that decides the target's own token."""
        return self.uniforms[:, -1]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return each row's last token with the draft tokens behind it, and their positions, [B, d + 1] each."""
        return self.state.tail(1, self.proposal.tokens)

    def commit(self, verdict: Verdict) -> Tensor:
        """Append what was accepted to the rows, and return it packed."""
        self.state.commit(verdict)
        return pack(verdict)


Verifier = Callable[[VerificationPass], Tensor]


def choose_verifier(*, greedy: bool, branching: bool, rule: Rule, triton: bool) -> Verifier:
    """Choose how to verify, by what the host knows: neither a value on the device nor a kernel's result."""
    if branching:
        return tree
    if greedy:
        return triton_greedy if triton else greedy_choice
    return triton_sampled if triton and rule == "token" else general


def greedy_choice(run: VerificationPass) -> Tensor:
    """Compare with the target's choices: the whole pass as one C call on a CPU, where the decoder has one."""
    state = run.state
    rows = state.tokens, state.length, state.limit
    packed = run.target.settle(run.proposal.tokens, run.proposal.largest, *rows, run.cache, NOT_FINITE)
    return run.commit(verify_choice(*_target_choices(run), run.proposal)) if packed is None else packed


def triton_greedy(run: VerificationPass) -> Tensor:
    """Compare with the target's choices and commit in one Triton kernel."""
    from shallowdraft.kernels import gpu_choice

    best, choice = _target_choices(run)
    tokens, largest, state = run.proposal.tokens, _draft_logits(run.proposal), run.state
    return gpu_choice.settle(best, choice, tokens, largest, state.tokens, state.length, state.limit, NOT_FINITE)


def triton_sampled(run: VerificationPass) -> Tensor:
    """Judge token by token and commit in two Triton kernels."""
    from shallowdraft.kernels import gpu_choice

    logits, state = _target_logits(run), run.state
    size, vocab = logits.shape[:2], logits.shape[2]
    p, _, best = gpu_choice.law(logits.flatten(0, 1), run.sampling.numbers, vocab)
    p, best = p.view(*size, vocab), best.view(size)
    q = p[:, :0] if run.proposal.q is None else run.proposal.q
    tokens, largest = run.proposal.tokens, _draft_logits(run.proposal)
    rows = state.tokens, state.length, state.limit
    return gpu_choice.judge(p, best, q, tokens, largest, run.coins, run.last, *rows, NOT_FINITE)


def general(run: VerificationPass) -> Tensor:
    """Judge by any rule with the PyTorch operations of verification.py."""
    return run.commit(verify(_target_logits(run), run.proposal, run.sampling, run.coins, run.last, run.rule))


def tree(run: VerificationPass) -> Tensor:
    """Verify all nodes of a tree in one pass, and keep the accepted path in the caches as if it had been read alone."""
    assert run.proposal.tree is not None
    tokens, _ = run.inputs()
    base = run.state.length - 1
    nodes = run.proposal.tree.part(base, 0, tokens.shape[1])
    hidden = run.target(tokens, nodes.positions, run.cache, run.state.span, nodes)
    verdict = verify(run.target.head(hidden), run.proposal, run.sampling, run.coins, run.last)
    assert verdict.path is not None
    run.cache.keep(base, verdict.path)
    # The last accepted node; node 0, the row's last token, if none was accepted.
    node = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.accepted[:, None])[..., None]
    run.drafter.keep(base, verdict.path, hidden.gather(1, node.expand(-1, -1, hidden.shape[2])).squeeze(1))
    return run.commit(verdict)


def _target_choices(run: VerificationPass) -> tuple[Tensor, Tensor]:
    """Return the target's largest logits and their tokens, [B, d + 1] each."""
    return run.target.choose(*run.inputs(), run.cache, run.state.span, run.target.shape.vocab)


def _target_logits(run: VerificationPass) -> Tensor:
    """Return the target's logits [B, d + 1, V]."""
    logits: Tensor = run.target.head(run.target(*run.inputs(), run.cache, run.state.span))
    return logits


def _draft_logits(proposal: Proposal) -> Tensor:
    """Return the draft's largest logit at each draft token [B, d]; zeros if no model proposed them."""
    if proposal.largest is None:
        return torch.zeros(proposal.tokens.shape, device=proposal.tokens.device)
    return proposal.largest
