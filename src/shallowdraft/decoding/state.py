"""What decoding has produced so far, on the device.

Shapes: B rows, S slots, T tokens of a pass, C d_model, R tokens of a source.
Invariant: a row's `length` counts its committed tokens; a cache holds valid entries for all of them but the last
(a draft's cache: but the last two). Whatever lies beyond is overwritten before it is attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shallowdraft.decoding.verification import Verdict
from shallowdraft.models.cache import EncoderInput, KVCache
from shallowdraft.models.decoder import Decoder

PREFILL_CHUNK = 512
SLOTS_STEP = 256  # on a GPU: few sizes, so that captured iterations fit other prompts
SPAN_STEP = 64  # attended lengths are rounded up, so that kernels see few different shapes


@dataclass
class State:
    """The rows being decoded."""

    tokens: Tensor  # [B, S] prompts and what was emitted; void beyond `length`
    length: Tensor  # [B] committed tokens
    limit: Tensor  # [B] where a row ends; its length never passes this
    longest: int
    """A bound on every row's length that the host knows without asking the device."""
    lookahead: int
    source: EncoderInput | None = None
    """What an encoder reads; the tokens are then the decoder's alone."""

    def __post_init__(self) -> None:
        self._steps = torch.arange(-2, self.lookahead + 1, device=self.tokens.device)

    @property
    def span(self) -> int:
        """How many slots a pass must look at: every committed token and one proposal, rounded up; on a GPU all.

        There an iteration is captured once, for any length.
        """
        if self.tokens.is_cuda:
            return self.tokens.shape[1]
        needed = self.longest + self.lookahead
        return min(-(-needed // SPAN_STEP) * SPAN_STEP, self.tokens.shape[1])

    def steps(self, start: int, stop: int) -> Tensor:
        """The numbers from `start` to before `stop` <= lookahead + 1; from -2 on they are made already."""
        if start < -2:
            return torch.arange(start, stop, device=self.tokens.device)
        return self._steps[start + 2 : stop + 2]

    def tail(self, count: int, proposed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The last `count` committed tokens, behind them what is proposed [B, d], and their positions: [B, count + d].

        A row that has ended may be shorter; its tokens stand at position 0 then.
        """
        proposed = self.tokens[:, :0] if proposed is None else proposed
        if self.tokens.is_cuda:
            from shallowdraft.kernels import gpu_choice

            return gpu_choice.tail(self.tokens, self.length, count, proposed)
        positions = (self.length[:, None] + self.steps(-count, proposed.shape[1])).clamp(min=0)
        return torch.cat((self.tokens.gather(1, positions[:, :count]), proposed), 1), positions

    def commit(self, verdict: Verdict) -> None:
        """Append what was emitted; void tokens behind it are overwritten by the next commit."""
        self.tokens.scatter_(1, self.length[:, None] + self.steps(0, verdict.tokens.shape[1]), verdict.tokens)
        self.length.copy_(torch.minimum(self.length + verdict.accepted + 1, self.limit))

    @property
    def source_slots(self) -> int:
        return self.source.tokens.shape[1] if self.source else 0

    @classmethod
    def of(cls, parts: Sequence[tuple["State", int]], lengths: Sequence[int], slots: int) -> "State":
        """A row each of others, so long, with so many slots."""
        first = parts[0][0]
        length, limit = (
            torch.stack([getattr(state, name)[row] for state, row in parts]) for name in ("length", "limit")
        )
        batch = cls(first.tokens.new_zeros(len(parts), slots), length, limit, max(lengths), first.lookahead)
        for row, (part, known) in enumerate(zip(parts, lengths, strict=True)):
            batch.put(row, part, known)
        return batch

    def put(self, row: int, part: tuple["State", int], known: int) -> None:
        """Instead of a row another, so long."""
        other, place = part
        self.tokens[row, :known] = other.tokens[place, :known]
        self.length[row], self.limit[row] = other.length[place], other.limit[place]

    def rest(self, row: int) -> None:
        """One token, and no room for more."""
        self.length[row] = self.limit[row] = 1

    def refill(self, prompts: list[list[int]], limits: list[int], sources: list[list[int]] | None = None) -> None:
        """Other prompts in the same memory."""
        fresh = new_state(prompts, limits, self.lookahead, torch.device("cpu"), self.tokens.shape[1])
        self.tokens.copy_(fresh.tokens)
        self.length.copy_(fresh.length)
        self.limit.copy_(fresh.limit)
        self.longest = fresh.longest
        if self.source and sources:
            read = new_source(sources, torch.device("cpu"), self.source_slots)
            self.source.tokens.copy_(read.tokens)
            self.source.length.copy_(read.length)


def new_state(
    prompts: list[list[int]], limits: list[int], lookahead: int, device: torch.device, slots: int | None = None
) -> State:
    """Rows that hold their prompts, with room for `limits` tokens each and one proposal more."""
    longest = max(len(prompt) for prompt in prompts)
    tokens, lengths = _padded(prompts, slots or slots_for(limits, lookahead, device))
    return State(tokens.to(device), lengths.to(device), torch.tensor(limits).to(device), longest, lookahead)


def new_source(texts: list[list[int]], device: torch.device, slots: int | None = None) -> EncoderInput:
    tokens, lengths = _padded(texts, slots or source_slots_for(texts, device))
    return EncoderInput(tokens.to(device), lengths.to(device))


def _padded(texts: list[list[int]], slots: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, slots], 0 beyond each row's, and lengths [B]."""
    longest = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), slots, dtype=torch.int64)
    tokens[:, :longest] = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    return tokens, torch.tensor([len(text) for text in texts])


def slots_for(limits: list[int], lookahead: int, device: torch.device) -> int:
    """Room for so many tokens and one proposal."""
    return _rounded(max(limits) + lookahead + 1, device)


def source_slots_for(texts: list[list[int]] | None, device: torch.device) -> int:
    """Room for what an encoder reads, if there is one."""
    return _rounded(max(map(len, texts)), device) if texts else 0


def _rounded(slots: int, device: torch.device) -> int:
    """On a GPU rounded up, so that it fits other prompts too."""
    return slots if device.type == "cpu" else -(-slots // SLOTS_STEP) * SLOTS_STEP


def fill(decoder: Decoder, cache: KVCache, state: State) -> Tensor:
    """Prefill: read the source, if there is one, and run every row's tokens through the decoder in chunks -> hidden
    state [B, C] of each row's last one.

    Rows are padded on the right. What padding writes lies beyond the row's length, so it is overwritten in time.
    """
    rows = state.tokens.shape[0]
    last = state.length - 1
    hidden = torch.zeros(0)
    decoder.read_source(state.source, cache)
    for start in range(0, state.longest, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, state.longest)
        positions = torch.arange(start, stop, device=last.device).expand(rows, -1)
        chunk = decoder(state.tokens[:, start:stop], positions, cache, stop)
        inside = (last - start).clamp(0, stop - start - 1)
        found = chunk.gather(1, inside[:, None, None].expand(-1, 1, chunk.shape[-1])).squeeze(1)
        hidden = found if start == 0 else torch.where((last >= start)[:, None], found, hidden)
    return hidden
