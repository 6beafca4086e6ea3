"""Drafting at every place of a trace, for proposals that no one pass tells. Shapes: B outputs, d lookahead."""

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
    """Yield for each place behind the first token what is proposed there greedily, and how much of it is right [B].

    With a `target` its cache is the drafter's too, and it reads on by one token from place to place. Without, places
    where a proposal does not fit into the draft's context repeat the last one where it does; prompts must leave room.
    In the end the model called `name` is refused if its logits were no numbers.
    """
    texts, longest = [output.prompt + output.output for output in outputs], drafter.lookahead
    reader, device = target or drafter.decoder, drafter.decoder.device
    state = new_state(texts, [*map(len, texts)], longest, device)
    begun, ends = torch.tensor([len(output.prompt) for output in outputs], device=device), state.length.clone()
    last = ends if target is not None else ends.clamp(max=reader.shape.context - longest)
    state.length.copy_(begun)
    state.longest = int(begun.max())
    cache = drafter.cache = reader.new_cache(*state.tokens.shape)
    largest = [fill(reader, cache, state).amax(-1)]  # what is skipped counts too
    ahead, unused = torch.arange(longest, device=device), torch.zeros(len(texts), longest, device=device)
    for count in range(1, max(len(output.output) for output in outputs)):
        state.length.copy_(torch.minimum(begun + count, last))
        state.longest = int(state.length.max())
        proposal = drafter.propose(state, unused, missed=0)
        assert proposal.largest is not None
        largest += proposal.largest.unbind(1)
        places = state.length[:, None] + ahead[: proposal.tokens.shape[1]]
        right = (proposal.tokens == state.tokens.gather(1, places)) & (places < ends[:, None])
        yield proposal, right.cumprod(1).sum(1)
        if target is not None:
            target(*state.tail(1), cache, state.span)
    require_finite(torch.stack(largest), name)
