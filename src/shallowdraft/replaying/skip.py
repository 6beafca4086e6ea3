"""Replay of a target that skips parts of itself: its proposal at every position of a trace, exact for greedy decoding.

It drafts in the whole target's KV cache, but attends to its own entries for the tokens that it has just proposed. So no
single pass tells its proposals: it drafts at every position, and the whole target reads on by one token.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from shallowdraft.decoding.drafters.skip import SkipDrafter
from shallowdraft.files import Count
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replaying.drafting import BATCH, draft_everywhere
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, OutputKey, Trace

KIND = "skip replay"


class _SkipReplayFields(TypedDict):
    """The fields of a line: an output, and how many of the longest proposal's tokens are right at each position."""

    set: str
    id: str
    sample: Count
    draft: str
    longest: Count
    right: list[Count]
    output_digest: str


def skip_name(skips: Collection[int]) -> str:
    """Return the name of a set of skipped parts in records."""
    return "skip " + ",".join(map(str, sorted(skips)))


def replay_skip(
    target: Model, skips: Collection[int], trace: Trace, lookaheads: Sequence[int], path: Path
) -> CountedReplay:
    """Replay the target without some parts at every lookahead; outputs that the file at `path` has are not redone."""
    trace.require_greedy()
    name, longest = skip_name(skips), max(lookaheads)
    file = open_skip_replays(path, target)
    right_by_key = _recorded(file, trace, name, longest)
    missing = [output for output in trace.outputs if output.key not in right_by_key]
    for first in range(0, len(missing), BATCH):
        chunk = missing[first : first + BATCH]
        for output, right in zip(chunk, drafted_right(target, skips, chunk, longest), strict=True):
            key = {"set": output.set, "id": output.id, "sample": output.sample, "output_digest": output.digest}
            file.append(key | {"draft": name, "longest": longest, "right": right})
            right_by_key[output.key] = right
    # By output and position [N, positions]; a shorter proposal keeps the same tokens up to its end.
    longest_right = [np.array(right_by_key[output.key], dtype=int) for output in trace.outputs]
    kept = {d: [np.minimum(right, d).tolist() for right in longest_right] for d in lookaheads}
    return CountedReplay(name, trace, {d: Candidate(name, d, "skip") for d in lookaheads}, kept)


def open_skip_replays(path: Path, target: Model) -> Records:
    """Begin a file of skip replays, or go on with one of the same target."""
    about = {"target": target.name, "target_digest": target.digest}
    return Records.open(path, KIND, about, _SkipReplayFields)


def _recorded(file: Records, trace: Trace, name: str, longest: int) -> dict[OutputKey, list[int]]:
    """Return the numbers of right tokens that the file has for the trace's outputs, from proposals long enough."""
    outputs = {output.key: output for output in trace.outputs}
    right_by_key = {}
    for row in file:
        key = row["set"], row["id"], row["sample"]
        if row["draft"] == name and row["longest"] >= longest and _is_of(row, outputs.get(key)):
            right_by_key[key] = row["right"]
    return right_by_key


def _is_of(row: Record, output: Output | None) -> bool:
    """Return whether a record is of exactly this text, and has all its positions."""
    return output is not None and row["output_digest"] == output.digest and len(row["right"]) == len(output.output) - 1


def drafted_right(target: Model, skips: Collection[int], outputs: Sequence[Output], longest: int) -> list[list[int]]:
    """Return how many of `longest` draft tokens are right, by output and position behind its first token."""
    drafter = SkipDrafter(target.decoder, skips, longest, Sampling())
    # By position and output; beyond the end of a shorter output the numbers mean nothing.
    right = [counts.tolist() for _, counts in draft_everywhere(drafter, outputs, target.name, target.decoder)]
    return [[counts[row] for counts in right[: len(output.output) - 1]] for row, output in enumerate(outputs)]
