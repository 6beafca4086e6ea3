"""The engine: propose, verify, commit. One iteration never waits for the device and never looks at a value.

Shapes: B rows, d lookahead, V vocabulary.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from shallowdraft.decoding.clock import new_clock
from shallowdraft.decoding.drafters.drafter import Drafter, NoDrafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.lookahead_policy import LookaheadPolicy
from shallowdraft.decoding.random_streams import RandomStreams
from shallowdraft.decoding.sampling import Samplings
from shallowdraft.decoding.state import State, fill, new_source, new_state
from shallowdraft.decoding.verification import Proposal, Rule, Verdict, verify, verify_choice
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.runs.sampling import Sampling

UNSOUND = -1

Emitted = list[list[int]]
"""For each row: how many draft tokens were accepted, or UNSOUND; then d + 1 tokens, void after the accepted + 1st."""


class Engine:
    """Decodes a batch of prompts; `run` yields what each iteration emitted until the caller has enough."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        sampling: Sampling,
        prompts: list[list[int]],
        limits: list[int],
        draft_context: int | None = None,
        lookahead_policy: LookaheadPolicy | None = None,
        rule: Rule = "token",
        sources: list[list[int]] | None = None,
        slots: int | None = None,
        streams: Sequence[int] | None = None,
    ) -> None:
        self.target, self.drafter, self.rule = target, drafter, rule
        self.sampling: Sampling | Samplings = sampling
        self.state = new_state(prompts, limits, drafter.nodes, target.device, slots)
        if sources:
            self.state.source = new_source(sources, target.device)
        self.random_streams = RandomStreams(len(prompts), drafter.nodes, target.device)
        self.clock = new_clock(target.device)
        self.cache: KVCache | None = None
        self.lookahead_policy = lookahead_policy
        self._graphs = _Graphs() if target.device.type == "cuda" else None
        self._draft_context = draft_context
        self._begin(prompts, limits, sampling.seed, streams)

    def _begin(self, prompts: list[list[int]], limits: list[int], seed: int, streams: Sequence[int] | None) -> None:
        self._lengths = self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._limits = limits
        steps = max(limit - len(prompt) for limit, prompt in zip(limits, prompts, strict=True))
        self.random_streams.begin(None if self.sampling.greedy else seed, steps, streams)
        self._missed = 0  # iterations since the drafter was last asked

    def restart(
        self,
        prompts: list[list[int]],
        limits: list[int],
        seed: int,
        lookahead_policy: LookaheadPolicy | None,
        sources: list[list[int]] | None = None,
        streams: Sequence[int] | None = None,
    ) -> None:
        """As many other prompts, no longer than what there is room for; what was captured is used again."""
        self.state.refill(prompts, limits, sources)
        self.clock.reset()
        self.lookahead_policy = lookahead_policy
        self._begin(prompts, limits, seed, streams)

    @classmethod
    @torch.inference_mode()
    def of(cls, parts: Sequence[tuple["Engine", int]], slots: int) -> "Engine":
        """A row each of engines with one draft model, or none, from where they stand, with so many slots.

        The others are done with then: random streams are not copied.
        """
        batch = copy.copy(parts[0][0])
        batch._lengths = [engine._lengths[row] for engine, row in parts]
        batch._limits = [engine._limits[row] for engine, row in parts]
        batch.sampling = Samplings([engine._sampling_of(row) for engine, row in parts], batch.target.device)
        batch.state = State.of([(engine.state, row) for engine, row in parts], batch._lengths, slots)
        batch.random_streams = RandomStreams.of([(engine.random_streams, row) for engine, row in parts])
        batch.cache, *draft = (
            KVCache.of([(engine._caches[which], row) for engine, row in parts], batch._lengths, slots)
            for which in range(len(batch._caches))
        )
        if isinstance(batch.drafter, ModelDrafter):
            batch.drafter = batch.drafter.of(batch.sampling, *draft)
        batch._graphs = _Graphs() if batch._graphs else None
        return batch

    @torch.inference_mode()
    def put(self, row: int, part: tuple["Engine", int]) -> None:
        """Instead of a row of a batch that `of` made another, for which there is room."""
        other, place = part
        length = other._lengths[place]
        self._lengths[row], self._limits[row] = length, other._limits[place]
        assert isinstance(self.sampling, Samplings)
        self.sampling.put(row, other._sampling_of(place))  # the drafter's too
        self.state.put(row, (other.state, place), length)
        self.state.longest = max(self._lengths)
        self.random_streams.put(row, (other.random_streams, place))
        for cache, found in zip(self._caches, other._caches, strict=True):
            cache.put(row, (found, place), length)

    @torch.inference_mode()
    def rest(self, row: int) -> None:
        """Nobody asks for this row any more: it stays as short as can be and needs no random numbers."""
        assert isinstance(self.sampling, Samplings)
        self._lengths[row] = self._limits[row] = 1
        self.state.rest(row)
        self.sampling.put(row, Sampling())
        self.random_streams.rest(row)

    @property
    def _caches(self) -> list[KVCache]:
        """The target's, and the draft's if there is one."""
        found = [self.cache, self.drafter.cache if isinstance(self.drafter, ModelDrafter) else None]
        return [cache for cache in found if cache is not None]

    def _sampling_of(self, row: int) -> Sampling:
        return self.sampling.rows[row] if isinstance(self.sampling, Samplings) else self.sampling

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Read the prompts and emit each row's first token; packed as `Emitted` is."""
        with self.clock.phase("prefill"):
            if self.cache is None:
                self.cache = self.target.new_cache(*self.state.tokens.shape)
            hidden = fill(self.target, self.cache, self.state)
            if self.within_draft_context:
                self.drafter.prefill(self.state, self.cache, hidden)
            nothing = Proposal(self.state.tokens[:, :0])
            uniforms = self.random_streams.advance()
            verdict = verify(
                self.target.head(hidden)[:, None], nothing, self.sampling, uniforms[:, :0], uniforms[:, -1]
            )
            self.state.commit(verdict)
        return _packed(verdict)

    @torch.inference_mode()
    def iterate(self) -> Tensor:
        """Draft, verify, commit; packed as `Emitted` is. On a GPU the next iteration overwrites it."""
        uniforms, d = self.random_streams.advance(), self._lookahead()
        missed, self._missed = self._missed, 0 if d else self._missed + 1
        if self._graphs is None or (d and missed):
            return self._iteration(uniforms, d, missed)
        return self._graphs.run((d, self.sampling.greedy), lambda: self._iteration(uniforms, d, missed))

    def _iteration(self, uniforms: Tensor, d: int, missed: int) -> Tensor:
        assert self.cache is not None
        drafter = self.drafter if d else NoDrafter()
        nodes = d if drafter.nodes == drafter.lookahead else drafter.nodes  # a chain may be shorter than its longest
        with self.clock.phase("draft") if d else nullcontext():
            proposal = drafter.propose(self.state, uniforms[:, :nodes], missed)
            if d:
                self.target.broadcast(proposal.tokens, proposal.q)
        with self.clock.phase("verify"):
            if self.sampling.greedy and proposal.tree is None and self._graphs is None:
                settled = self._settled_in_one(proposal)
                if settled is not None:
                    return settled
            tokens, positions = self.state.tail(1, proposal.tokens)
            coins, last = uniforms[:, nodes : 2 * nodes], uniforms[:, -1]
            if proposal.tree is not None:
                return self._tree_verified(tokens, proposal, coins, last)
            if proposal.tokens.shape[1] < d:  # the drafter was not sure enough to go on
                coins = coins[:, : proposal.tokens.shape[1]]
            if self.sampling.greedy:
                vocab = self.target.shape.vocab
                best, choice = self.target.choose(tokens, positions, self.cache, self.state.span, vocab)
                if self._graphs is not None:
                    return _settled(best, choice, proposal, self.state)
                verdict = verify_choice(best, choice, proposal)
            else:
                logits = self.target.head(self.target(tokens, positions, self.cache, self.state.span))
                if self._graphs is not None and self.rule == "token":
                    return _judged(logits, proposal, self.sampling, coins, last, self.state)
                verdict = verify(logits, proposal, self.sampling, coins, last, self.rule)
        self.state.commit(verdict)
        return _packed(verdict)

    def _settled_in_one(self, proposal: Proposal) -> Tensor | None:
        """The pass, `verify_choice`, `State.commit` and `_packed` in one call, where there is such a kernel."""
        assert self.cache is not None
        state = self.state
        row = state.tokens, state.length, state.limit
        return self.target.commit_greedy(proposal.tokens, proposal.largest, *row, self.cache, UNSOUND)

    def _tree_verified(self, tokens: Tensor, proposal: Proposal, coins: Tensor, last: Tensor) -> Tensor:
        """One pass over the whole tree; what was accepted of it then lies in the caches as if it had been alone."""
        assert proposal.tree is not None
        assert self.cache is not None
        base = self.state.length - 1
        part = proposal.tree.part(base, 0, tokens.shape[1])
        hidden = self.target(tokens, part.positions, self.cache, self.state.span, part)
        verdict = verify(self.target.head(hidden), proposal, self.sampling, coins, last)
        assert verdict.path is not None
        self.cache.keep(base, verdict.path)
        node = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.accepted[:, None])[..., None]
        self.drafter.keep(base, verdict.path, hidden.gather(1, node.expand(-1, -1, hidden.shape[2])).squeeze(1))
        self.state.commit(verdict)
        return _packed(verdict)

    def rewind(self) -> None:
        """Forget what was emitted, all but each row's first token: caches are overwritten from there on."""
        self._lengths = [length + 1 for length in self._prompt_lengths]
        self.state.length.copy_(torch.tensor(self._lengths))
        self.state.longest = max(self._lengths)

    def run(self) -> Iterator[Emitted]:
        """Prefill, then iterations; on a GPU each result is handed over while the next iteration runs."""
        in_flight: deque[_Message] = deque()
        cuda = self.target.device.type == "cuda"
        side = torch.cuda.Stream(self.target.device) if cuda else None
        packed, begin_s = self.prefill(), 0.0
        while True:
            in_flight.append(_Message(packed, side))
            emitted = in_flight.popleft().read() if len(in_flight) > cuda else None  # on a GPU one iteration late
            if self.lookahead_policy and begin_s and emitted is not None:
                lookahead, accepted = len(emitted[0]) - 2, [row[0] for row in emitted]
                self.lookahead_policy.learn(lookahead, accepted, self.target.broadcast_s(time.perf_counter() - begin_s))
            self._bound_lengths(emitted, unread=sum(message.tokens for message in in_flight))
            if emitted is not None:
                yield emitted
            begin_s = time.perf_counter()
            packed = self.iterate()

    def follow(self, packed: Tensor) -> Emitted:
        """Read what was emitted without delay, for a caller who changes the batch between iterations."""
        emitted = _Message(packed, None).read()
        self._bound_lengths(emitted, unread=0)
        return emitted

    def _bound_lengths(self, emitted: Emitted | None, unread: int) -> None:
        """Follow the rows' lengths; until a result is read, its rows may have grown by a whole proposal."""
        if emitted is not None:
            rows = zip(self._lengths, emitted, self._limits, strict=True)
            self._lengths = [min(length + row[0] + 1, limit) for length, row, limit in rows]
        self.state.longest = min(max(self._lengths) + unread, max(self._limits))

    def _lookahead(self) -> int:
        """Of the next iteration."""
        if not self.within_draft_context:
            return 0
        return self.lookahead_policy.choose() if self.lookahead_policy else self.drafter.lookahead

    @property
    def within_draft_context(self) -> bool:
        """Whether some row is still short enough for the draft; to a longer one it proposes in vain, no more."""
        return self._draft_context is None or min(self._lengths) + self.drafter.lookahead <= self._draft_context


def _packed(verdict: Verdict) -> Tensor:
    accepted = torch.where(verdict.sound, verdict.accepted, UNSOUND)
    return torch.cat((accepted[:, None], verdict.tokens), 1)


def _settled(best: Tensor, choice: Tensor, proposal: Proposal, state: State) -> Tensor:
    """`verify_choice`, `State.commit` and `_packed` as one kernel."""
    from shallowdraft.kernels import gpu_choice

    drafted = _draft_logits(proposal)
    return gpu_choice.commit_greedy(
        best, choice, proposal.tokens, drafted, state.tokens, state.length, state.limit, UNSOUND
    )


def _judged(
    logits: Tensor, proposal: Proposal, sampling: Sampling | Samplings, coins: Tensor, last: Tensor, state: State
) -> Tensor:
    """`verify`, `State.commit` and `_packed` as two kernels."""
    from shallowdraft.kernels import gpu_choice

    size, vocab = logits.shape[:2], logits.shape[2]
    p, _, best = gpu_choice.distribution(logits.flatten(0, 1), sampling.numbers, vocab)
    p, best = p.view(*size, vocab), best.view(size)
    q, drafted = p[:, :0] if proposal.q is None else proposal.q, _draft_logits(proposal)
    return gpu_choice.commit_sampled(
        p, best, q, proposal.tokens, drafted, coins, last, state.tokens, state.length, state.limit, UNSOUND
    )


def _draft_logits(proposal: Proposal) -> Tensor:
    """The largest behind each proposed token [B, d]; zeros where no model proposed it."""
    if proposal.largest is None:
        return torch.zeros(proposal.tokens.shape, device=proposal.tokens.device)
    return proposal.largest


class _Graphs:
    """Whole iterations as CUDA graphs, one for each kind: run as they are once, captured at the second time."""

    def __init__(self) -> None:
        self._captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, kind: tuple[int, bool], iteration: Callable[[], Tensor]) -> Tensor:
        """A kind is a lookahead, and whether all rows are greedy."""
        if kind not in self._captured:
            self._captured[kind] = None
            return iteration()
        found = self._captured[kind]
        if found is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                emitted = iteration()
            found = self._captured[kind] = graph, emitted
        found[0].replay()
        return found[1]


class _Message:
    """What was emitted, on its way to the host: copied on a stream of its own, so that no iteration need wait."""

    def __init__(self, packed: Tensor, side: torch.cuda.Stream | None) -> None:
        self.tokens = packed.shape[1] - 1
        self._packed = packed
        self._arrived: torch.cuda.Event | None = None
        if side is not None:
            self._packed, self._arrived = _send(packed.clone(), side)

    def read(self) -> Emitted:
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: Emitted = self._packed.tolist()
        return rows


def _send(packed: Tensor, side: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    """Copy to pinned memory on the side stream; the event says when it is there."""
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(packed.device))
    with torch.cuda.stream(side):
        pinned.copy_(packed, non_blocking=True)
        packed.record_stream(side)
        arrived = torch.cuda.Event()
        arrived.record()
    return pinned, arrived
