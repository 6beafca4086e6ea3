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
from shallowdraft.decoding.sampling import Samplings
from shallowdraft.decoding.state import State
from shallowdraft.decoding.verification import Proposal, Rule, Verdict, verify, verify_choice
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.runs.sampling import Sampling


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
        """[B, d] A number for each draft token that the drafter proposed."""
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
    """Choose how to verify, from what the host knows without reading a value on the device."""
    if branching:
        return tree
    if greedy:
        return triton_greedy if triton else greedy_choice
    return triton_sampled if triton and rule == "token" else general


def greedy_choice(task: VerificationPass) -> Tensor:
    """Compare with the target's choices: the whole pass as one C call on a CPU, where the decoder has one."""
    state = task.state
    rows = state.tokens, state.length, state.limit
    packed = task.target.commit_greedy(task.proposal.tokens, task.proposal.largest, *rows, task.cache, NOT_FINITE)
    return task.commit(verify_choice(*_target_choices(task), task.proposal)) if packed is None else packed


def triton_greedy(task: VerificationPass) -> Tensor:
    """Compare with the target's choices and commit in one Triton kernel."""
    from shallowdraft.kernels import gpu_choice

    best, choice = _target_choices(task)
    tokens, largest, state = task.proposal.tokens, _draft_logits(task.proposal), task.state
    return gpu_choice.commit_greedy(best, choice, tokens, largest, state.tokens, state.length, state.limit, NOT_FINITE)


def triton_sampled(task: VerificationPass) -> Tensor:
    """Judge token by token and commit in two Triton kernels."""
    from shallowdraft.kernels import gpu_choice

    logits, state = _target_logits(task), task.state
    size, vocab = logits.shape[:2], logits.shape[2]
    p, _, best = gpu_choice.distribution(logits.flatten(0, 1), task.sampling.numbers, vocab)
    p, best = p.view(*size, vocab), best.view(size)
    q = p[:, :0] if task.proposal.q is None else task.proposal.q
    tokens, largest = task.proposal.tokens, _draft_logits(task.proposal)
    rows = state.tokens, state.length, state.limit
    return gpu_choice.commit_sampled(p, best, q, tokens, largest, task.coins, task.last, *rows, NOT_FINITE)


def general(task: VerificationPass) -> Tensor:
    """Judge by any rule with the PyTorch operations of verification.py."""
    return task.commit(verify(_target_logits(task), task.proposal, task.sampling, task.coins, task.last, task.rule))


def tree(task: VerificationPass) -> Tensor:
    """Verify all nodes of a tree in one pass, and keep the accepted path in the caches as if it had been read alone."""
    assert task.proposal.tree is not None
    tokens, _ = task.inputs()
    base = task.state.length - 1
    nodes = task.proposal.tree.part(base, 0, tokens.shape[1])
    hidden = task.target(tokens, nodes.positions, task.cache, task.state.span, nodes)
    verdict = verify(task.target.head(hidden), task.proposal, task.sampling, task.coins, task.last)
    assert verdict.path is not None
    task.cache.keep(base, verdict.path)
    # The last accepted node; node 0, the row's last token, if none was accepted.
    node = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.accepted[:, None])[..., None]
    task.drafter.keep(base, verdict.path, hidden.gather(1, node.expand(-1, -1, hidden.shape[2])).squeeze(1))
    return task.commit(verdict)


def _target_choices(task: VerificationPass) -> tuple[Tensor, Tensor]:
    """Return the target's largest logits and their tokens, [B, d + 1] each."""
    return task.target.choose(*task.inputs(), task.cache, task.state.span, task.target.shape.vocab)


def _target_logits(task: VerificationPass) -> Tensor:
    """Return the target's logits [B, d + 1, V]."""
    logits: Tensor = task.target.head(task.target(*task.inputs(), task.cache, task.state.span))
    return logits


def _draft_logits(proposal: Proposal) -> Tensor:
    """Return the draft's largest logit at each draft token [B, d]; zeros if no model proposed them."""
    if proposal.largest is None:
        return torch.zeros(proposal.tokens.shape, device=proposal.tokens.device)
    return proposal.largest
