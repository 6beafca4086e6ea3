"""Replay for a target that skips parts of itself: what it proposes at every place of a trace, exact for greedy.

It drafts in the whole target's cache, but sees its own entries for what it has just proposed. So no one pass tells what
it proposes: it drafts at every place, and the whole target reads on by one token. Shapes: B outputs, d lookahead.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from shallowdraft.decoding.drafters import SkipDrafter
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.decoding.state import fill, new_state
from shallowdraft.decoding.ways import Way
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.replays import Counted
from shallowdraft.replay.traces import Output, Trace, require_greedy, require_numbers

KIND = "skip replay"
BATCH = 8  # outputs at a time


def name_of(skips: Collection[int]) -> str:
    """What records call it."""
    return "skip " + ",".join(map(str, sorted(skips)))


def replay_skips(target: Model, skips: Collection[int], trace: Trace, lookaheads: Sequence[int], path: Path) -> Counted:
    """At every lookahead. It takes time, so that what was found is kept in a file and not looked for again."""
    require_greedy(trace)
    name, longest = name_of(skips), max(lookaheads)
    file = Records.open(path, KIND, {"target": target.name, "target_digest": target.digest})
    outputs = {output.key: output.digest for output in trace.outputs}
    known = {
        _key(row): row["right"]
        for row in file
        if row["draft"] == name and row["longest"] >= longest and row["output_digest"] == outputs.get(_key(row))
    }
    left = [output for output in trace.outputs if output.key not in known]
    for first in range(0, len(left), BATCH):
        chunk = left[first : first + BATCH]
        for output, right in zip(chunk, drafted_right(target, skips, chunk, longest), strict=True):
            about = {"set": output.set, "id": output.id, "sample": output.sample, "output_digest": output.digest}
            file.append(about | {"draft": name, "longest": longest, "right": right})
            known[output.key] = right
    kept = {d: [[min(d, right) for right in known[output.key]] for output in trace.outputs] for d in lookaheads}
    return Counted(name, trace, {d: Way(name, d, "skip") for d in lookaheads}, kept)


def _key(row: Record) -> tuple[str, str, int]:
    return row["set"], row["id"], row["sample"]


@torch.inference_mode()
def drafted_right(target: Model, skips: Collection[int], outputs: Sequence[Output], longest: int) -> list[list[int]]:
    """For each output, of every place behind its first token: how many of `longest` tokens drafted there are right."""
    decoder, texts = target.decoder, [output.prompt + output.output for output in outputs]
    state = new_state(texts, [*map(len, texts)], longest, target.device)
    begun, ends = torch.tensor([len(output.prompt) for output in outputs], device=target.device), state.length.clone()
    state.length.copy_(begun)
    state.longest = int(begun.max())
    cache = decoder.new_cache(*state.tokens.shape)
    drafter = SkipDrafter(decoder, skips, longest, Sampling())
    hidden = fill(decoder, cache, state)
    drafter.prefill(state, cache, hidden)
    ahead, unused = torch.arange(longest, device=target.device), torch.zeros(len(texts), longest, device=target.device)
    found: list[list[int]] = []
    largest = [hidden.amax(-1)]  # what is skipped counts too
    for count in range(1, max(len(output.output) for output in outputs)):
        state.length.copy_(torch.minimum(begun + count, ends))
        state.longest = int(state.length.max())
        proposal = drafter.propose(state, unused, missed=0)
        assert proposal.largest is not None
        largest += proposal.largest.unbind(1)
        places = state.length[:, None] + ahead  # [B, d]
        right = (proposal.tokens == state.tokens.gather(1, places)) & (places < ends[:, None])
        found.append(right.cumprod(1).sum(1).tolist())
        decoder(*state.tail(1), cache, state.span)
    require_numbers(torch.stack(largest), target.name)
    return [[step[row] for step in found[: len(output.output) - 1]] for row, output in enumerate(outputs)]
