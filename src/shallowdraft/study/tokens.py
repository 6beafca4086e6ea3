"""Inside generations: for some prompts, where every token of the text came from, kept for the report."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from shallowdraft.decoding.text import text_after, text_stream
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.model import choices
from shallowdraft.replay.result import Replay
from shallowdraft.replay.trace import Output
from shallowdraft.study.proposers import Proposer

KIND = "inside"
ENDS = 3  # of the prompts: so many where the winner does best, and so many where it does worst
PROMPT_CHARACTERS = 400  # of a prompt's end

Source = Literal["accepted", "correction", "bonus", "own"]
"""A draft token; the target's instead of one; the target's behind a proposal that was accepted whole; the target's
where nothing was proposed."""


def keep_inside(target: Model, shown: Sequence[tuple[Proposer, Replay, int]], path: Path) -> None:
    """For proposers, the winner first, each at its chosen size."""
    file = Records.open(path, KIND, {"target": target.name, "target_digest": target.digest})
    rows = _ends(shown[0][1], shown[0][2])
    found = (_inside(target, *one, row) for one in shown for row in rows)
    file.renew(found, "set", "id", "sample", "drafter", "draft")


def _ends(found: Replay, size: int) -> list[int]:
    """Outputs of least and most tokens an iteration."""
    long = [row for row, output in enumerate(found.trace.outputs) if len(output.output) > 1]
    tars = {row: found.walk.emitted[row] / found.walk.at(size)[row] for row in long}
    ordered = sorted(long, key=tars.__getitem__)
    return list(dict.fromkeys([*ordered[-ENDS:][::-1], *ordered[:ENDS]]))


def _inside(target: Model, proposer: Proposer, found: Replay, size: int, row: int) -> Record:
    output, candidate = found.trace.outputs[row], found.candidate(size)
    draft = proposer.options.get("draft") if proposer.drafter == "model" else None
    proposed = choices(draft, output, found.trace.vocabulary["size"]) if draft else []
    came_from = sources(found.iterations_in(row, size), len(output.output))
    replaced = [
        _spelled(target, [*output.prompt, *output.output[:at]], proposed[at - 1])
        if one == "correction" and at <= len(proposed)
        else None
        for at, one in enumerate(came_from)
    ]
    return {
        "set": output.set,
        "id": output.id,
        "sample": output.sample,
        **asdict(candidate),
        "tar": float(found.walk.tar(np.array([row]))[found.walk.sizes.index(size)]),
        "prompt": target.decode(output.prompt)[-PROMPT_CHARACTERS:],
        "tokens": [list(one) for one in zip(_pieces(target, output), came_from, replaced, strict=True)],
    }


def sources(iterations: Sequence[tuple[int, int]], count: int) -> list[Source]:
    """Of so many tokens, the first of which prefill yields; iterations by what they keep and what they propose."""
    return ["own", *chain.from_iterable(_of_iteration(*one) for one in iterations)][:count]


def _of_iteration(kept: int, proposed: int) -> Iterator[Source]:
    for _ in range(kept):
        yield "accepted"
    yield "own" if not proposed else "bonus" if kept == proposed else "correction"


def _pieces(target: Model, output: Output) -> list[str]:
    """Text by token; a character of several tokens counts for the last of them."""
    if target.tokenizer is None:
        return [f"{token} " for token in output.output]
    stream = text_stream(target, output.prompt)
    found = [stream.push(token) for token in output.output]
    found[-1] += stream.flush()
    return found


def _spelled(target: Model, before: Sequence[int], token: int) -> str:
    """A token as it would stand behind others."""
    return str(token) if target.tokenizer is None else text_after(target, before, [token])
