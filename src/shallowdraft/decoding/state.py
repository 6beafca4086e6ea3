"""The tokens of the rows being decoded, on the device.

Shapes: B rows, S slots, T tokens of a pass, C d_model, R tokens of a source. Invariant: a row's
`length` counts its committed tokens; a cache holds valid entries for all of them but the last (a
draft's cache: but the last two). Whatever lies beyond is overwritten before it is attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shallowdraft.decoding.verification import Verdict
from shallowdraft.models.cache import EncoderInput, KVCache
from shallowdraft.models.decoder import Decoder

PREFILL_CHUNK = 512
SLOTS_STEP = 256  # slots are rounded up to this on a GPU, so that captured iterations fit other prompts
SPAN_STEP = 64  # attended lengths are rounded up to this, so that kernels see few different shapes


@dataclass
class State:
    """The rows being decoded."""

    tokens: Tensor  # [B, S] the prompt and what was emitted; void beyond `length`
    length: Tensor  # [B] committed tokens
    limit: Tensor  # [B] the length at which a row ends; its length never passes this
    longest: int
    """A bound on every row's length that the host knows without asking the device."""
    lookahead: int
    """The most draft tokens of a row in an iteration, the nodes of a tree included."""
    source: EncoderInput | None = None
    """The text that the encoder of an encoder–decoder reads; `tokens` are then the decoder's alone."""

    def __post_init__(self) -> None:
        self._steps = torch.arange(-2, self.lookahead + 1, device=self.tokens.device)

    @property
    def span(self) -> int:
        """The number of slots that a pass attends to: every committed token and one proposal, rounded up.

        On a GPU all slots, because an iteration is captured once for any length.
        """
        if self.tokens.is_cuda:
            return self.tokens.shape[1]
        needed = self.longest + self.lookahead
        return min(-(-needed // SPAN_STEP) * SPAN_STEP, self.tokens.shape[1])

    def steps(self, start: int, stop: int) -> Tensor:
        """Return the integers from `start` to before `stop` <= lookahead + 1, without an allocation from -2 on."""
        if start < -2:
            return torch.arange(start, stop, device=self.tokens.device)
        return self._steps[start + 2 : stop + 2]

    def tail(self, count: int, proposed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the last `count` committed tokens with proposed ones [B, d] behind them, and the positions of both.

        Both results are [B, count + d]. An idle row may have fewer tokens: what it lacks is read at
        position 0.
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
    def from_rows(cls, rows: Sequence[tuple["State", int]], lengths: Sequence[int], slots: int) -> "State":
        """Combine rows of other states, each named by its state and index, given their lengths."""
        first = rows[0][0]
        length = torch.stack([state.length[index] for state, index in rows])
        limit = torch.stack([state.limit[index] for state, index in rows])
        batch = cls(first.tokens.new_zeros(len(rows), slots), length, limit, max(lengths), first.lookahead)
        for row, ((state, index), count) in enumerate(zip(rows, lengths, strict=True)):
            batch.replace_row(row, state, index, count)
        return batch

    def replace_row(self, row: int, state: "State", index: int, count: int) -> None:
        """Overwrite a row with the `count` committed tokens of row `index` of another state."""
        self.tokens[row, :count] = state.tokens[index, :count]
        self.length[row], self.limit[row] = state.length[index], state.limit[index]

    def idle_row(self, row: int) -> None:
        """Shorten a row to one token, without room for more."""
        self.length[row] = self.limit[row] = 1

    def refill(self, prompts: list[list[int]], limits: list[int], sources: list[list[int]] | None = None) -> None:
        """Write other prompts to the same memory."""
        fresh = new_state(prompts, limits, self.lookahead, torch.device("cpu"), self.tokens.shape[1])
        self.tokens.copy_(fresh.tokens)
        self.length.copy_(fresh.length)
        self.limit.copy_(fresh.limit)
        self.longest = fresh.longest
        if self.source and sources:
            source = new_source(sources, torch.device("cpu"), self.source_slots)
            self.source.tokens.copy_(source.tokens)
            self.source.length.copy_(source.length)


def new_state(
    prompts: list[list[int]], limits: list[int], lookahead: int, device: torch.device, slots: int | None = None
) -> State:
    """Create rows that hold their prompts, with room for `limits` tokens each and one proposal more."""
    longest = max(len(prompt) for prompt in prompts)
    tokens, lengths = _padded(prompts, slots or slots_for(limits, lookahead, device))
    return State(tokens.to(device), lengths.to(device), torch.tensor(limits).to(device), longest, lookahead)


def new_source(texts: list[list[int]], device: torch.device, slots: int | None = None) -> EncoderInput:
    """Create the texts that an encoder reads, one a row."""
    tokens, lengths = _padded(texts, slots or source_slots_for(texts, device))
    return EncoderInput(tokens.to(device), lengths.to(device))


def _padded(texts: list[list[int]], slots: int) -> tuple[Tensor, Tensor]:
    """Return tokens [B, slots], padded with 0 on the right, and their lengths [B]."""
    longest = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), slots, dtype=torch.int64)
    tokens[:, :longest] = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    return tokens, torch.tensor([len(text) for text in texts])


def slots_for(limits: list[int], lookahead: int, device: torch.device) -> int:
    """Return the slots that rows of up to `limits` tokens need, one proposal more included."""
    return _rounded(max(limits) + lookahead + 1, device)


def source_slots_for(texts: list[list[int]] | None, device: torch.device) -> int:
    """Return the slots that the texts of an encoder need; 0 without texts."""
    return _rounded(max(map(len, texts)), device) if texts else 0


def _rounded(slots: int, device: torch.device) -> int:
    """Round up on a GPU, so that the memory fits other prompts too."""
    return slots if device.type == "cpu" else -(-slots // SLOTS_STEP) * SLOTS_STEP


def fill(decoder: Decoder, cache: KVCache, state: State) -> Tensor:
    """Prefill: read the source, if there is one, and run every row's tokens through the decoder in chunks.

    Return the hidden state [B, C] of each row's last token. Rows are padded on the right. What
    padding writes to the cache lies beyond the row's length, so it is overwritten before it is
    attended to.
    """
    rows = state.tokens.shape[0]
    last = state.length - 1
    hidden = torch.zeros(0)
    decoder.read_source(state.source, cache)
    for start in range(0, state.longest, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, state.longest)
        positions = torch.arange(start, stop, device=last.device).expand(rows, -1)
        chunk = decoder(state.tokens[:, start:stop], positions, cache, stop)  # [B, T, C]
        # Rows whose last token lies in an earlier chunk keep the hidden state that they have.
        inside = (last - start).clamp(0, stop - start - 1)
        chosen = chunk.gather(1, inside[:, None, None].expand(-1, 1, chunk.shape[-1])).squeeze(1)
        hidden = chosen if start == 0 else torch.where((last >= start)[:, None], chosen, hidden)
    return hidden
