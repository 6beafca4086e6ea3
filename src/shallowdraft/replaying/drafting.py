"""Drafting at every position of a trace, for proposals that no single pass tells. Shapes: B outputs, d lookahead."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.state import fill, new_state
from shallowdraft.decoding.verification import Proposal
from shallowdraft.models.decoder import Decoder
from shallowdraft.replaying.teacher_forcing import require_finite
from shallowdraft.runs.trace import Output

BATCH = 8  # outputs at a time


@torch.inference_mode()
def draft_everywhere(
    drafter: ModelDrafter, outputs: Sequence[Output], name: str, target: Decoder | None = None
) -> Iterator[tuple[Proposal, Tensor]]:
    """Yield, for each position behind the first token, the greedy proposals there, and how many tokens are right [B].

    With a `target`, the drafter shares its KV cache, and the target reads on by one token from position to position.
    Without, prompts must leave room for a proposal; positions without room repeat the last one that has room. In the
    end the model called `name` is refused if one of its logits was not finite.
    """
    texts, longest = [output.prompt + output.output for output in outputs], drafter.lookahead
    reader, device = target or drafter.decoder, drafter.decoder.device
    state = new_state(texts, [*map(len, texts)], longest, device)
    begins, ends = torch.tensor([len(output.prompt) for output in outputs], device=device), state.length.clone()
    last = ends if target is not None else ends.clamp(max=reader.shape.context - longest)
    state.length.copy_(begins)
    state.longest = int(begins.max())
    cache = drafter.cache = reader.new_cache(*state.tokens.shape)
    largest = [fill(reader, cache, state).amax(-1)]  # the prompt's logits are checked too
    ahead, unused = torch.arange(longest, device=device), torch.zeros(len(texts), longest, device=device)
    for count in range(1, max(len(output.output) for output in outputs)):
        state.length.copy_(torch.minimum(begins + count, last))
        state.longest = int(state.length.max())
        proposal = drafter.propose(state, unused, missed=0)
        assert proposal.largest is not None
        largest += proposal.largest.unbind(1)
        positions = state.length[:, None] + ahead[: proposal.tokens.shape[1]]  # [B, d]
        right = (proposal.tokens == state.tokens.gather(1, positions)) & (positions < ends[:, None])  # [B, d]
        yield proposal, right.cumprod(1).sum(1)
        if target is not None:
            target(*state.tail(1), cache, state.span)
    require_finite(torch.stack(largest), name)
