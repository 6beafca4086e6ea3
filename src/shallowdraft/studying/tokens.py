"""The source of each token of some outputs, kept for the report."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np

from shallowdraft.decoding.text import text_after, text_stream
from shallowdraft.models.model import Model
from shallowdraft.replaying.model import likeliest_tokens
from shallowdraft.replaying.result import Replay
from shallowdraft.runs.tokens import Source, TokenSources, write_tokens
from shallowdraft.runs.trace import Output
from shallowdraft.studying.proposers import Proposer

SHOWN_AT_EACH_END = 3  # outputs on which the fastest candidate does best, and on which it does worst
PROMPT_CHARACTERS = 400  # kept of a prompt's end


def keep_tokens(target: Model, shown: Sequence[tuple[Proposer, Replay, int]], path: Path) -> None:
    """Write the sources of tokens for proposers at their chosen sizes, the fastest first."""
    _, fastest, size = shown[0]
    rows = _best_and_worst(fastest, size)
    about = {"target": target.name, "target_digest": target.digest}
    write_tokens(path, about, (_token_sources(target, *candidate, row) for candidate in shown for row in rows))


def _best_and_worst(replay: Replay, size: int) -> list[int]:
    """Return the outputs with the most and with the fewest tokens per iteration."""
    long = [row for row, output in enumerate(replay.trace.outputs) if len(output.output) > 1]
    tars = {row: replay.counts.emitted[row] / replay.counts.at(size)[row] for row in long}
    ordered = sorted(long, key=tars.__getitem__)
    return list(dict.fromkeys([*ordered[-SHOWN_AT_EACH_END:][::-1], *ordered[:SHOWN_AT_EACH_END]]))


def _token_sources(target: Model, proposer: Proposer, replay: Replay, size: int, row: int) -> TokenSources:
    output = replay.trace.outputs[row]
    draft = proposer.options.get("draft") if proposer.drafter == "model" else None
    proposed = likeliest_tokens(draft, output, replay.trace.vocabulary["size"]) if draft else []
    came_from = sources(replay.greedy_iterations(row, size), len(output.output))
    replaced = [
        _spelled(target, [*output.prompt, *output.output[:place]], proposed[place - 1])
        if source == "correction" and place <= len(proposed)
        else None
        for place, source in enumerate(came_from)
    ]
    return TokenSources(
        set=output.set,
        id=output.id,
        sample=output.sample,
        **asdict(replay.candidate(size)),
        tar=float(replay.counts.tar(np.array([row]))[replay.counts.sizes.index(size)]),
        prompt=target.decode(output.prompt)[-PROMPT_CHARACTERS:],
        tokens=tuple(zip(_pieces(target, output), came_from, replaced, strict=True)),
    )


def sources(iterations: Sequence[tuple[int, int]], count: int) -> list[Source]:
    """Return the source of each of `count` tokens, given how many tokens each iteration keeps and proposes.

    The prefill yields the first token.
    """
    return ["own", *chain.from_iterable(_of_iteration(*counts) for counts in iterations)][:count]


def _of_iteration(kept: int, proposed: int) -> Iterator[Source]:
    for _ in range(kept):
        yield "accepted"
    yield "own" if not proposed else "bonus" if kept == proposed else "correction"


def _pieces(target: Model, output: Output) -> list[str]:
    """Return the text of each token; a character of several tokens belongs to the last of them."""
    if target.tokenizer is None:
        return [f"{token} " for token in output.output]
    stream = text_stream(target, output.prompt)
    pieces = [stream.push(token) for token in output.output]
    pieces[-1] += stream.flush()
    return pieces


def _spelled(target: Model, before: Sequence[int], token: int) -> str:
    """Return the text of a token as it would stand after others."""
    return str(token) if target.tokenizer is None else text_after(target, before, [token])
