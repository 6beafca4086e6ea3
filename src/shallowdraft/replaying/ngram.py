"""Replay for n-grams: the drafter's own search in the recorded text, without a model, exact for greedy decoding."""

from collections.abc import Sequence

import numpy as np

from shallowdraft.decoding.drafters.ngram import continuation, copy_length, longest_match, to_text
from shallowdraft.replaying.result import Counted
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace

NAME = "n-gram"


def replay_ngram(trace: Trace, lookaheads: Sequence[int], *, whole: bool = False) -> Counted:
    """At every lookahead; `whole` as of the drafter, which it always is on a GPU."""
    trace.require_greedy()
    found = [_copies(output, max(lookaheads)) for output in trace.outputs]
    offered = {d: [[d if whole else min(d, count) for count, _ in row] for row in found] for d in lookaheads}
    kept = {
        d: [
            [min(count, right) for count, (_, right) in zip(counts, row, strict=True)]
            for counts, row in zip(offered[d], found, strict=True)
        ]
        for d in lookaheads
    }
    return Counted(NAME, trace, {d: Candidate(NAME, d, "ngram") for d in lookaheads}, kept, offered)


def _copies(output: Output, longest: int) -> list[tuple[int, int]]:
    """Of every place behind the first token: how many tokens are worth copying there, and how many would be right."""
    text, found = to_text(output.prompt + output.output), []
    for length in range(len(output.prompt) + 1, len(text)):
        start, matched = longest_match(text[:length])
        ahead = [ord(token) for token in text[length : length + longest]]
        right = np.equal(continuation(text[:length], start, len(ahead)), ahead)
        found.append((copy_length(text[:length], start, matched), int(right.cumprod().sum())))
    return found
