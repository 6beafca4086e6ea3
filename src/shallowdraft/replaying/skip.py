"""Replay for a target that skips parts of itself: what it proposes at every place of a trace, exact for greedy.

It drafts in the whole target's cache, but sees its own entries for what it has just proposed. So no one pass tells what
it proposes: it drafts at every place, and the whole target reads on by one token.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

from shallowdraft.decoding.drafters.skip import SkipDrafter
from shallowdraft.files import Count
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replaying.drafting import BATCH, draft_everywhere
from shallowdraft.replaying.result import Counted
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace

KIND = "skip replay"


def name_of(skips: Collection[int]) -> str:
    """What records call it."""
    return "skip " + ",".join(map(str, sorted(skips)))


def replay_skip(target: Model, skips: Collection[int], trace: Trace, lookaheads: Sequence[int], path: Path) -> Counted:
    """At every lookahead. It takes time, so that what was found is kept in a file and not looked for again."""
    trace.require_greedy()
    name, longest = name_of(skips), max(lookaheads)
    about = {"target": target.name, "target_digest": target.digest}
    file = Records.open(path, KIND, about, _Right)
    outputs = {output.key: output for output in trace.outputs}
    known = {
        _key(row): row["right"]
        for row in file
        if row["draft"] == name and row["longest"] >= longest and _is_of(row, outputs.get(_key(row)))
    }
    left = [output for output in trace.outputs if output.key not in known]
    for first in range(0, len(left), BATCH):
        chunk = left[first : first + BATCH]
        for output, right in zip(chunk, drafted_right(target, skips, chunk, longest), strict=True):
            place = {"set": output.set, "id": output.id, "sample": output.sample, "output_digest": output.digest}
            file.append(place | {"draft": name, "longest": longest, "right": right})
            known[output.key] = right
    kept = {d: [[min(d, right) for right in known[output.key]] for output in trace.outputs] for d in lookaheads}
    return Counted(name, trace, {d: Candidate(name, d, "skip") for d in lookaheads}, kept)


class _Right(TypedDict):
    """What a line must have."""

    set: str
    id: str
    sample: Count
    draft: str
    longest: Count
    right: list[Count]
    output_digest: str


def _is_of(row: Record, output: Output | None) -> bool:
    """Whether a record is of this very text, and has all of its places."""
    return output is not None and row["output_digest"] == output.digest and len(row["right"]) == len(output.output) - 1


def _key(row: Record) -> tuple[str, str, int]:
    return row["set"], row["id"], row["sample"]


def drafted_right(target: Model, skips: Collection[int], outputs: Sequence[Output], longest: int) -> list[list[int]]:
    """For each output, of every place behind its first token: how many of `longest` tokens drafted there are right."""
    drafter = SkipDrafter(target.decoder, skips, longest, Sampling())
    right = [found.tolist() for _, found in draft_everywhere(drafter, outputs, target.name, target.decoder)]
    return [[place[row] for place in right[: len(output.output) - 1]] for row, output in enumerate(outputs)]
