"""The engine: state -> propose -> verify -> commit. An iteration never waits for the device and never reads a value.

Shapes: B rows, d lookahead.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shallowdraft.decoding.clock import new_clock
from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.emitted import Emitted, Transfer, pack
from shallowdraft.decoding.graphs import IterationGraphs
from shallowdraft.decoding.lookahead_policy import LookaheadPolicy
from shallowdraft.decoding.random_streams import RandomStreams
from shallowdraft.decoding.row_lengths import RowLengths
from shallowdraft.decoding.sampling import Samplings
from shallowdraft.decoding.state import State, fill, new_source, new_state
from shallowdraft.decoding.verification import Proposal, Rule, verify
from shallowdraft.decoding.verifiers import VerificationPass, choose_verifier
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.runs.sampling import Sampling


class Engine:
    """Decodes the rows of a batch: `run` for a batch that stays as it is, `prefill` and `iterate` for one that changes.

    Made by `for_prompts`, or by `from_rows` of other engines.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        sampling: Sampling | Samplings,
        state: State,
        random_streams: RandomStreams,
        lengths: RowLengths,
        rule: Rule = "token",
        lookahead_policy: LookaheadPolicy | None = None,
    ) -> None:
        self.target, self.drafter, self.sampling, self.rule = target, drafter, sampling, rule
        self.state, self.random_streams, self.lengths = state, random_streams, lengths
        self.lookahead_policy = lookahead_policy
        self.cache: KVCache | None = None
        """Made by the first prefill."""
        self.clock = new_clock(target.device)
        self._graphs = IterationGraphs() if target.device.type == "cuda" else None
        self._missed = 0  # iterations since the drafter was last asked

    @classmethod
    def for_prompts(
        cls,
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
    ) -> "Engine":
        """Create an engine for new prompts, one a row; a row ends when its prompt and new tokens reach its limit."""
        state = new_state(prompts, limits, drafter.nodes, target.device, slots)
        if sources:
            state.source = new_source(sources, target.device)
        random_streams = RandomStreams(len(prompts), drafter.nodes, target.device)
        random_streams.begin(None if sampling.greedy else sampling.seed, _most_iterations(prompts, limits), streams)
        draft_limit = None if draft_context is None else draft_context - drafter.lookahead
        lengths = RowLengths([len(prompt) for prompt in prompts], limits, draft_limit)
        return cls(target, drafter, sampling, state, random_streams, lengths, rule, lookahead_policy)

    @classmethod
    @torch.inference_mode()
    def from_rows(cls, rows: Sequence[tuple["Engine", int]], slots: int) -> "Engine":
        """Build a batch from single rows of other engines, each continuing where it stopped.

        The engines must have the same target and the same draft model, or none. Do not use them
        again before they have other prompts or rows: the random streams now belong to the batch.
        Shared with the first engine: the target, the draft model and the rule. New: state, caches,
        the sampling of each row, clock and graphs.
        """
        first = rows[0][0]
        assert first.lookahead_policy is None, "a batch that rows join has one lookahead"
        lengths = RowLengths.from_rows([(engine.lengths, index) for engine, index in rows])
        sampling = Samplings([engine._sampling_of(index) for engine, index in rows], first.target.device)
        target_cache, *draft_cache = (
            KVCache.of([(engine._caches[which], index) for engine, index in rows], lengths.committed, slots)
            for which in range(len(first._caches))
        )
        drafter = first.drafter
        if isinstance(drafter, ModelDrafter):
            drafter = drafter.for_batch(sampling, *draft_cache)
        state = State.from_rows([(engine.state, index) for engine, index in rows], lengths.committed, slots)
        random_streams = RandomStreams.from_rows([(engine.random_streams, index) for engine, index in rows])
        batch = cls(first.target, drafter, sampling, state, random_streams, lengths, first.rule)
        batch.cache = target_cache
        batch._missed = max(engine._missed for engine, _ in rows)  # reading again what a draft has read does no harm
        return batch

    def restart(
        self,
        prompts: list[list[int]],
        limits: list[int],
        sampling: Sampling,
        lookahead_policy: LookaheadPolicy | None = None,
        sources: list[list[int]] | None = None,
        streams: Sequence[int] | None = None,
        iterations_ahead: int | None = None,
    ) -> None:
        """Start again with other prompts, one a row, for which there must be room; captured iterations stay valid.

        Random numbers are made for all iterations at once, or for `iterations_ahead` of them.
        """
        self.state.refill(prompts, limits, sources)
        self.clock.reset()
        self.sampling, self.lookahead_policy = sampling, lookahead_policy
        self.lengths = RowLengths([len(prompt) for prompt in prompts], limits, self.lengths.draft_limit)
        iterations = iterations_ahead or _most_iterations(prompts, limits)
        self.random_streams.begin(None if sampling.greedy else sampling.seed, iterations, streams)
        self._missed = 0

    @torch.inference_mode()
    def replace_row(self, row: int, engine: "Engine", index: int) -> None:
        """Overwrite a row of a batch that `from_rows` built with row `index` of another engine; there must be room."""
        assert isinstance(self.sampling, Samplings)
        self.lengths.replace_row(row, engine.lengths, index)
        self.sampling.replace_row(row, engine._sampling_of(index))  # for the drafter too, which shares the object
        self.state.replace_row(row, engine.state, index, self.lengths.committed[row])
        self.state.longest = self.lengths.bound()
        self.random_streams.replace_row(row, engine.random_streams, index)
        for cache, other in zip(self._caches, engine._caches, strict=True):
            cache.put(row, (other, index), self.lengths.committed[row])

    @torch.inference_mode()
    def idle_row(self, row: int) -> None:
        """Idle a row that has left the batch: it becomes as short as possible and draws no random numbers."""
        assert isinstance(self.sampling, Samplings)
        self.lengths.idle_row(row)
        self.state.idle_row(row)
        self.sampling.replace_row(row, Sampling())
        self.random_streams.idle_row(row)

    @property
    def _caches(self) -> list[KVCache]:
        """The target's KV cache, and the draft model's if there is one."""
        caches = [self.cache, self.drafter.cache if isinstance(self.drafter, ModelDrafter) else None]
        return [cache for cache in caches if cache is not None]

    def _sampling_of(self, row: int) -> Sampling:
        return self.sampling.rows[row] if isinstance(self.sampling, Samplings) else self.sampling

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Read the prompts and emit each row's first token, packed as `Emitted` describes."""
        with self.clock.phase("prefill"):
            if self.cache is None:
                self.cache = self.target.new_cache(*self.state.tokens.shape)
            hidden = fill(self.target, self.cache, self.state)
            if self.lengths.within_draft_context:
                self.drafter.prefill(self.state, self.cache, hidden)
            uniforms = self.random_streams.advance()
            logits, nothing = self.target.head(hidden)[:, None], Proposal(self.state.tokens[:, :0])
            verdict = verify(logits, nothing, self.sampling, uniforms[:, :0], uniforms[:, -1])
            self.state.commit(verdict)
        return pack(verdict)

    @torch.inference_mode()
    def iterate(self) -> Tensor:
        """Run an iteration and return what it emitted, packed; on a GPU the next iteration overwrites the result."""
        uniforms, d = self.random_streams.advance(), self._next_lookahead()
        missed, self._missed = self._missed, 0 if d else self._missed + 1
        # A drafter that missed iterations reads more tokens than usual, which is not worth a graph of its own.
        if self._graphs is None or (d and missed):
            return self._iteration(uniforms, d, missed)
        return self._graphs.run((d, self.sampling.greedy), lambda: self._iteration(uniforms, d, missed))

    def _iteration(self, uniforms: Tensor, d: int, missed: int) -> Tensor:
        """Propose, verify and commit, with the random numbers that `RandomStreams` describes."""
        assert self.cache is not None
        # A chain may be shorter than the longest one; a tree always has all its nodes.
        draws = d if d == 0 or self.drafter.nodes == self.drafter.lookahead else self.drafter.nodes
        proposal = self._propose(uniforms, draws, missed) if d else Proposal(self.state.tokens[:, :0])
        with self.clock.phase("verify"):
            verifier = choose_verifier(
                greedy=self.sampling.greedy,
                branching=proposal.tree is not None,
                rule=self.rule,
                triton=self._graphs is not None,
            )
            models = self.target, self.drafter, self.cache
            rows = self.state, self.sampling, self.rule
            return verifier(VerificationPass(*models, *rows, proposal, uniforms, draws))

    def _propose(self, uniforms: Tensor, draws: int, missed: int) -> Proposal:
        with self.clock.phase("draft"):
            proposal = self.drafter.propose(self.state, uniforms[:, :draws], missed)
            self.target.broadcast(proposal.tokens, proposal.q)
        return proposal

    def rewind(self) -> None:
        """Forget everything emitted except each row's first token; the caches are overwritten from there on."""
        self.lengths.rewind()
        self.state.length.copy_(torch.tensor(self.lengths.committed))
        self.state.longest = max(self.lengths.committed)

    def run(self) -> Iterator[Emitted]:
        """Prefill, then iterate without end; on a GPU each result is read while the next iteration runs."""
        in_flight: deque[Transfer] = deque()
        cuda = self.target.device.type == "cuda"
        side = torch.cuda.Stream(self.target.device) if cuda else None
        packed, begin_s = self.prefill(), 0.0
        while True:
            in_flight.append(Transfer(packed, side))
            emitted = in_flight.popleft().read() if len(in_flight) > cuda else None  # on a GPU one iteration late
            if self.lookahead_policy and begin_s and emitted is not None:
                lookahead, accepted = len(emitted[0]) - 2, [row[0] for row in emitted]
                self.lookahead_policy.learn(lookahead, accepted, self.target.broadcast_s(time.perf_counter() - begin_s))
            self._advance(emitted, unread=sum(transfer.tokens for transfer in in_flight))
            if emitted is not None:
                yield emitted
            begin_s = time.perf_counter()
            packed = self.iterate()

    def read(self, packed: Tensor) -> Emitted:
        """Read a result at once, for a caller that changes the batch between iterations."""
        emitted = Transfer(packed, None).read()
        self._advance(emitted, unread=0)
        return emitted

    def _advance(self, emitted: Emitted | None, unread: int) -> None:
        """Follow the rows' lengths; rows whose result is unread may have grown by a whole proposal."""
        if emitted is not None:
            self.lengths.advance(emitted)
        self.state.longest = self.lengths.bound(unread)

    def _next_lookahead(self) -> int:
        if not self.lengths.within_draft_context:
            return 0
        return self.lookahead_policy.choose() if self.lookahead_policy else self.drafter.lookahead


def _most_iterations(prompts: list[list[int]], limits: list[int]) -> int:
    """Return a bound on the iterations that the rows take: each emits at least one token."""
    return max(limit - len(prompt) for limit, prompt in zip(limits, prompts, strict=True))
