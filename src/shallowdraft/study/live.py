"""Live runs: on every prompt each way of decoding stands between plain runs, so that both meet the same machine.

All ways take a turn on a prompt, in an order that is drawn anew each time. Nothing is written before
a turn is over, and a turn begins with a plain run that counts for nothing, so that no run that counts
follows a write.

A run that stalled is taken again, and the first that did not is what counts. A prompt where a way always stalled counts
for none, so that all ways stand on the same prompts.

A speed-up above its TAR is impossible, as an iteration takes at least as long as a plain token. Such
a way is run on all prompts again, and all its runs count: chosen ones would make it slower than it
is. What stays above is no result, however wide its interval is: every figure that is shown can be.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NotRequired, TypedDict

import numpy as np

from shallowdraft.decoding.candidate import Candidate, ProposerKey
from shallowdraft.decoding.divergence import explain
from shallowdraft.decoding.generate import generate
from shallowdraft.decoding.options import DrafterName, Options
from shallowdraft.decoding.results import Generation
from shallowdraft.decoding.timing import MachineState, current_state
from shallowdraft.files import Count, Seconds, SomeSeconds
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.trace import Output
from shallowdraft.study.stalls import Key, Stall, key_of, stalled

KIND = "live runs"
AGAIN = 2  # times that a run is taken again which stalls, and a way on all prompts which is faster than can be


class StateThen(TypedDict):
    """Of the machine, before a run or after it."""

    plain_s: SomeSeconds
    handover_s: Seconds
    arithmetic_s: Seconds


class LiveRun(TypedDict):
    """What a line of live runs must have."""

    set: str
    id: str
    round: Count
    draft: str
    lookahead: Count
    drafter: NotRequired[DrafterName]
    tree: NotRequired[list[int]]
    emitted: Count
    iterations: Count
    seconds: SomeSeconds
    tie: bool
    states: tuple[StateThen, StateThen]


Run = tuple[Key, int, Candidate]
"""Prompt, round and way."""
Attempts = list[tuple[Record, Stall]]
"""Of a run, in the order in which they were made, each with whether it stalled."""


def run_live(
    target: Model,
    proposers: Mapping[ProposerKey, Options],
    candidates: Sequence[Candidate],
    outputs: Sequence[Output],
    path: Path,
    *,
    max_new_tokens: int,
    rounds: int,
    about: Record,
) -> Iterator[int]:
    """Decode every prompt in every way, between plain runs; yields how many are done.

    Done again is only what stalled, and a way whose speed-up cannot be.
    """
    file = Records.open(path, KIND, about, LiveRun)

    def taken(chosen: Sequence[Candidate], numbers: Sequence[int]) -> Iterator[int]:
        """Take what is left of some rounds; yield how many runs each turn had."""
        for due in (_never_run, _to_take_again):
            while turns := _turns(file, chosen, outputs, numbers, due):
                for output, number, left in turns:
                    file.append(*_turn(target, proposers, output, number, left, max_new_tokens))
                    yield len(left)

    total, numbers = rounds * len(outputs) * len(candidates), range(rounds)
    count = total - sum(len(left) for _, _, left in _turns(file, candidates, outputs, numbers, _never_run))
    yield count
    for done in taken(candidates, numbers):
        count = min(total, count + done)
        yield count
    for number in range(rounds, rounds + AGAIN):
        for _ in taken(list(measured(path, outputs, candidates).impossible), [number]):
            yield count


def _turn(
    target: Model,
    proposers: Mapping[ProposerKey, Options],
    output: Output,
    number: int,
    candidates: Sequence[Candidate],
    max_new_tokens: int,
) -> list[Record]:
    """Run these ways on a prompt, a plain run before and after each; only then look at what came out."""
    _state(target, output, max_new_tokens)  # behind what was written last
    states, runs = [_state(target, output, max_new_tokens)], []
    for candidate in candidates:
        runs.append(_decode(target, output, candidate.options(proposers) | {"max_new_tokens": max_new_tokens}))
        states.append(_state(target, output, max_new_tokens))
    place = {"set": output.set, "id": output.id, "output_digest": output.digest, "round": number}
    return [
        place | asdict(candidate) | _record(target, output, run) | {"states": [asdict(before), asdict(after)]}
        for candidate, run, (before, after) in zip(candidates, runs, pairwise(states), strict=True)
    ]


def _turns(
    file: Iterable[Record],
    candidates: Sequence[Candidate],
    outputs: Sequence[Output],
    numbers: Iterable[int],
    due: Callable[[Attempts], bool],
) -> list[tuple[Output, int, list[Candidate]]]:
    """Prompts and rounds with the ways that are due there, in the order in which they are to run."""
    made = _attempts(file, outputs)
    turns = [
        (
            output,
            number,
            [
                candidate
                for candidate in _drawn(candidates, output, number)
                if due(made.get((output.key[:2], number, candidate), []))
            ],
        )
        for number, output in product(numbers, outputs)
    ]
    return [turn for turn in turns if turn[2]]


def _drawn(candidates: Sequence[Candidate], output: Output, number: int) -> list[Candidate]:
    """Draw an order of all ways for a prompt and a round: the same whenever a run that was stopped goes on."""
    return Random(f"{number} {output.set} {output.id}").sample(candidates, len(candidates))


def _never_run(attempts: Attempts) -> bool:
    return not attempts


def _to_take_again(attempts: Attempts) -> bool:
    """Every attempt stalled, and there were not too many."""
    return all(stall for _, stall in attempts) and len(attempts) <= AGAIN


def _attempts(file: Iterable[Record], outputs: Sequence[Output]) -> dict[Run, Attempts]:
    """Of these prompts."""
    contexts = {output.key[:2]: len(output.prompt) + len(output.output) / 2 for output in outputs}
    texts = {output.key[:2]: output.digest for output in outputs}
    rows = [row for row in file if key_of(row) in texts and row.get("output_digest", "") in ("", texts[key_of(row)])]
    found: dict[Run, Attempts] = {}
    for row, stall in zip(rows, stalled(rows, contexts), strict=True):
        found.setdefault((key_of(row), row["round"], Candidate.of(row)), []).append((row, stall))
    return found


def _state(target: Model, output: Output, max_new_tokens: int) -> MachineState:
    """Decode plainly."""
    stats = _decode(target, output, {"max_new_tokens": max_new_tokens}).stats
    return current_state(target, (stats.total_s - stats.prefill_s) / max(1, stats.emitted))


def _decode(target: Model, output: Output, options: Options) -> Generation:
    """On a GPU by the second of two runs: the first may compile kernels and capture iterations."""
    if target.device.type == "cuda":
        generate(target, output.prompt, **options)
    return generate(target, output.prompt, **options)


def _record(target: Model, output: Output, run: Generation) -> Record:
    difference = explain(target, output.prompt, output.output, run.token_ids)
    return {
        "emitted": run.stats.emitted,
        "iterations": run.stats.iterations,
        "seconds": run.stats.total_s - run.stats.prefill_s,
        "draft_s": run.stats.draft_s,
        "target_s": run.stats.verify_s,
        "differs": None if difference is None else str(difference),
        "tie": difference is None or difference.tie,
    }


@dataclass(frozen=True)
class Measured:
    """A way against plain decoding."""

    tar: float
    tokens_per_s: float
    plain_tokens_per_s: float
    speed_up: float
    interval: tuple[float, float]
    lossless: bool
    """Every output is the trace's, but for ties of rounding."""
    states: dict[Key, list[MachineState]] = field(repr=False)
    """Of the machine before and after each run, by prompt."""

    def to_json(self) -> Record:
        return {name: value for name, value in vars(self).items() if name != "states"}


@dataclass(frozen=True)
class LiveRuns:
    """What they showed."""

    by_way: dict[Candidate, Measured] = field(default_factory=dict)
    """Ways that were run on every prompt."""
    impossible: dict[Candidate, Measured] = field(default_factory=dict)
    """Ways that were too, with a speed-up above their TAR: the machine was disturbed, and these are no results."""
    stalled: list[Key] = field(default_factory=list)
    """Prompts that no way counts: one of them stalled there, however often it was taken again."""
    lossless: bool | None = None
    """Every output is the trace's, but for ties of rounding; None where nothing was run."""


def measured(path: Path, outputs: Sequence[Output], candidates: Sequence[Candidate]) -> LiveRuns:
    """Read what these ways showed on these prompts, by rounds that were run on all of them.

    Speed-ups are ratios of sums over prompts, their intervals a bootstrap.
    """
    made: dict[Candidate, dict[int, dict[Key, Attempts]]] = {}
    for (key, number, candidate), attempts in _attempts(Records.read(path, KIND, LiveRun), outputs).items():
        made.setdefault(candidate, {}).setdefault(number, {})[key] = attempts
    keys = [output.key[:2] for output in outputs]
    whole: dict[Candidate, dict[Key, list[Attempts]]] = {}
    for candidate in candidates:
        rounds = [by_prompt for by_prompt in made.get(candidate, {}).values() if by_prompt.keys() == set(keys)]
        if rounds:
            whole[candidate] = {key: [by_prompt[key] for by_prompt in rounds] for key in keys}
    lost = [key for key in keys if any(_sound(one) is None for its in whole.values() for one in its[key])]
    enough = not lost or len(keys) - len(lost) > 1  # of one prompt that is left nobody knows how sure it is
    same = {candidate: _lossless(made[candidate].values()) for candidate in whole}
    every = (
        {candidate: _measured(whole[candidate], lost, lossless=same[candidate]) for candidate in whole}
        if enough
        else {}
    )
    return LiveRuns(
        by_way={candidate: run for candidate, run in every.items() if run.speed_up <= run.tar},
        impossible={candidate: run for candidate, run in every.items() if run.speed_up > run.tar},
        stalled=lost,
        lossless=all(same.values()) if same else None,
    )


def _sound(attempts: Attempts) -> Record | None:
    """The first that did not stall; of those that take so long whenever they are run between calm ones, the middle."""
    if len(attempts) > AGAIN and all(stall == "seeming" for _, stall in attempts):
        return sorted((row for row, _ in attempts), key=_seconds)[len(attempts) // 2]
    return next((row for row, stall in attempts if not stall), None)


def _seconds(row: Record) -> float:
    return float(row["seconds"])


def _lossless(rounds: Iterable[Mapping[Key, Attempts]]) -> bool:
    """Outputs are compared in all runs, those that stalled too."""
    return all(row["tie"] for by_prompt in rounds for attempts in by_prompt.values() for row, _ in attempts)


def _measured(by_prompt: Mapping[Key, list[Attempts]], lost: Sequence[Key], *, lossless: bool) -> Measured:
    kept = {key: [row for one in its if (row := _sound(one))] for key, its in by_prompt.items() if key not in lost}
    return _compare(kept, lossless=lossless)


def _compare(by_prompt: Mapping[Key, list[Record]], *, lossless: bool) -> Measured:
    def sums(figure: Callable[[Record], float]) -> np.ndarray:
        return np.array([sum(map(figure, rows)) for rows in by_prompt.values()])

    emitted, seconds = sums(lambda row: row["emitted"]), sums(_seconds)
    plain = sums(lambda row: row["emitted"] * fmean(state["plain_s"] for state in row["states"]))
    low, high = bootstrap(lambda draws: plain[draws].sum(1) / seconds[draws].sum(1), len(by_prompt))
    return Measured(
        tar=float(emitted.sum() / max(1.0, sums(lambda row: row["iterations"]).sum())),
        tokens_per_s=float(emitted.sum() / seconds.sum()),
        plain_tokens_per_s=float(emitted.sum() / plain.sum()),
        speed_up=float(plain.sum() / seconds.sum()),
        interval=(float(low), float(high)),
        lossless=lossless,
        states={key: [_machine(one) for row in rows for one in row["states"]] for key, rows in by_prompt.items()},
    )


def _machine(state: Record) -> MachineState:
    return MachineState(state["plain_s"], state["handover_s"], state["arithmetic_s"])
