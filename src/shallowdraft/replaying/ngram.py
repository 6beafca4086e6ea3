"""Replay of n-grams: the drafter's own search in the recorded text, without a model, exact for greedy decoding."""

from collections.abc import Sequence

import numpy as np

from shallowdraft.decoding.drafters.ngram import continuation, copy_length, longest_match, to_text
from shallowdraft.replaying.result import CountedReplay
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.trace import Output, Trace

NAME = "n-gram"


def replay_ngram(trace: Trace, lookaheads: Sequence[int], *, whole: bool = False) -> CountedReplay:
    """Replay n-grams at every lookahead.

    With `whole` every proposal is as long as the lookahead, as the drafter's always are on a GPU.
    """
    trace.require_greedy()
    longest = [_longest_proposals(output, max(lookaheads)) for output in trace.outputs]
    kept: dict[int, list[list[int]]] = {}
    proposed: dict[int, list[list[int]]] = {}
    for lookahead in lookaheads:
        kept[lookahead], proposed[lookahead] = [], []
        for of_output in longest:
            lengths = [lookahead if whole else min(lookahead, worthwhile) for worthwhile, _ in of_output]
            proposed[lookahead].append(lengths)
            kept[lookahead].append([min(length, right) for length, (_, right) in zip(lengths, of_output, strict=True)])
    candidates = {lookahead: Candidate(NAME, lookahead, "ngram") for lookahead in lookaheads}
    return CountedReplay(NAME, trace, candidates, kept, proposed)


def _longest_proposals(output: Output, longest: int) -> list[tuple[int, int]]:
    """Return, for each position behind the first token, how many tokens are worth proposing, and how many are right."""
    text, proposals = to_text(output.prompt + output.output), []
    for length in range(len(output.prompt) + 1, len(text)):
        start, matched = longest_match(text[:length])
        ahead = [ord(token) for token in text[length : length + longest]]
        right = np.equal(continuation(text[:length], start, len(ahead)), ahead)
        proposals.append((copy_length(text[:length], start, matched), int(right.cumprod().sum())))
    return proposals
