"""Replay for n-grams: the drafter's own search in the recorded text, without a model, exact for greedy decoding."""

from collections.abc import Sequence

import numpy as np

from shallowdraft.decoding.drafters import FOR_A_MATCH, earlier, onward
from shallowdraft.decoding.ways import Way
from shallowdraft.replay.replays import Counted
from shallowdraft.replay.traces import Output, Trace, require_greedy

NAME = "n-gram"


def replay_copies(trace: Trace, lookaheads: Sequence[int], *, whole: bool = False) -> Counted:
    """At every lookahead; `whole` as of the drafter, which it always is on a GPU."""
    require_greedy(trace)
    found = [_copies(output, max(lookaheads)) for output in trace.outputs]
    worth = [[FOR_A_MATCH * matched for matched, _ in row] for row in found]
    offered = {d: [[d if whole else min(d, count) for count in row] for row in worth] for d in lookaheads}
    kept = {
        d: [
            [min(count, right) for count, (_, right) in zip(counts, row, strict=True)]
            for counts, row in zip(offered[d], found, strict=True)
        ]
        for d in lookaheads
    }
    return Counted(NAME, trace, {d: Way(NAME, d, "ngram") for d in lookaheads}, kept, offered)


def _copies(output: Output, longest: int) -> list[tuple[int, int]]:
    """Of every place behind the first token: how many tokens match there, and how many copied ones would be right."""
    text, found = np.array(output.prompt + output.output), []
    for length in range(len(output.prompt) + 1, len(text)):
        start, matched = earlier(text[:length])
        ahead = text[length : length + longest]
        right = np.equal(onward(text[:length], start, len(ahead)), ahead)
        found.append((matched, int(right.cumprod().sum())))
    return found
