"""Replay for a target that skips parts of itself: what it proposes at every place of a trace, exact for greedy.

It drafts in the whole target's cache, but sees its own entries for what it has just proposed. So no one pass tells what
it proposes: it drafts at every place, and the whole target reads on by one token. Shapes: B outputs, d lookahead.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

import torch

from shallowdraft.decoding.drafters import SkipDrafter
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.decoding.state import fill, new_state
from shallowdraft.decoding.ways import Way
from shallowdraft.files import Count
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.replays import Counted
from shallowdraft.replay.traces import Output, Trace, require_greedy

KIND = "skip replay"
BATCH = 8  # outputs at a time


def name_of(skips: Collection[int]) -> str:
    """What records call it."""
    return "skip " + ",".join(map(str, sorted(skips)))


def replay_skips(target: Model, skips: Collection[int], trace: Trace, lookaheads: Sequence[int], path: Path) -> Counted:
    """At every lookahead. It takes time, so that what was found is kept in a file and not looked for again."""
    require_greedy(trace)
    name, longest = name_of(skips), max(lookaheads)
    file = Records.open(path, KIND, {"target": target.name}, _Right)
    places = {output.key: len(output.output) - 1 for output in trace.outputs}
    known = {
        _key(row): row["right"]
        for row in file
        if row["draft"] == name and row["longest"] >= longest and places.get(_key(row)) == len(row["right"])
    }
    left = [output for output in trace.outputs if output.key not in known]
    for first in range(0, len(left), BATCH):
        outputs = left[first : first + BATCH]
        for output, right in zip(outputs, drafted_right(target, skips, outputs, longest), strict=True):
            about = {"set": output.set, "id": output.id, "sample": output.sample}
            file.append(about | {"draft": name, "longest": longest, "right": right})
            known[output.key] = right
    kept = {d: [[min(d, right) for right in known[output.key]] for output in trace.outputs] for d in lookaheads}
    return Counted(name, trace, {d: Way(name, d, "skip") for d in lookaheads}, kept)


class _Right(TypedDict):
    """What a line must have."""

    set: str
    id: str
    sample: Count
    draft: str
    longest: Count
    right: list[Count]


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
    drafter.prefill(state, cache, fill(decoder, cache, state))
    ahead, unused = torch.arange(longest, device=target.device), torch.zeros(len(texts), longest, device=target.device)
    found: list[list[int]] = []
    for count in range(1, max(len(output.output) for output in outputs)):
        state.length.copy_(torch.minimum(begun + count, ends))
        state.longest = int(state.length.max())
        proposed = drafter.propose(state, unused, missed=0).tokens
        places = state.length[:, None] + ahead  # [B, d]
        right = (proposed == state.tokens.gather(1, places)) & (places < ends[:, None])
        found.append(right.cumprod(1).sum(1).tolist())
        decoder(*state.tail(1), cache, state.span)
    return [[step[row] for step in found[: len(output.output) - 1]] for row, output in enumerate(outputs)]
