"""Live runs: on every prompt each way of decoding stands between plain runs, so that both meet the same machine.

A run that stalled is taken again, and the first that did not is what counts. A prompt where a way always stalled counts
for none, so that all ways stand on the same prompts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NotRequired, TypedDict

import numpy as np

from shallowdraft.decoding.divergence import explain
from shallowdraft.decoding.generation import DrafterName, Generation, Options, generate
from shallowdraft.decoding.timing import MachineState, state_of
from shallowdraft.decoding.ways import Way, Whose
from shallowdraft.files import Count, Seconds, SomeSeconds
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.traces import Output
from shallowdraft.study.stalls import Key, Stall, key_of, stalled

KIND = "live runs"
AGAIN = 2  # times that a run is taken again which stalls


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


Run = tuple[Key, int, Way]
"""Prompt, round and way."""
Attempts = list[tuple[Record, Stall]]
"""Of a run, in the order in which they were made, each with whether it stalled."""


def run_live(
    target: Model,
    proposers: Mapping[Whose, Options],
    ways: Sequence[Way],
    outputs: Sequence[Output],
    path: Path,
    *,
    max_new_tokens: int,
    rounds: int,
    about: Record,
) -> Iterator[int]:
    """Decode every prompt in every way, between plain runs; yields how many are done. Only stalls are done again."""
    file = Records.open(path, KIND, about, LiveRun)
    total = rounds * len(outputs) * len(ways)
    count = total - sum(len(left) for _, _, left in _turns(file, ways, outputs, rounds, _never_run))
    yield count
    for due in (_never_run, _to_take_again):
        while turns := _turns(file, ways, outputs, rounds, due):
            for output, number, left in turns:
                before = _state(target, output, max_new_tokens)
                for way in left:
                    made = _decode(target, output, way.options(proposers), max_new_tokens)
                    after = _state(target, output, max_new_tokens)
                    states = {"states": [asdict(state) for state in (before, after)]}
                    file.append({"set": output.set, "id": output.id, "round": number} | asdict(way) | made | states)
                    before = after
                    count = min(total, count + 1)
                    yield count


def _turns(
    file: Iterable[Record],
    ways: Sequence[Way],
    outputs: Sequence[Output],
    rounds: int,
    due: Callable[[Attempts], bool],
) -> list[tuple[Output, int, list[Way]]]:
    """Prompts and rounds with the ways that are due there."""
    made = _attempts(file, outputs)
    found = [
        (output, number, [way for way in ways if due(made.get((output.key[:2], number, way), []))])
        for number, output in product(range(rounds), outputs)
    ]
    return [turn for turn in found if turn[2]]


def _never_run(attempts: Attempts) -> bool:
    return not attempts


def _to_take_again(attempts: Attempts) -> bool:
    """Every attempt stalled, and there were not too many."""
    return all(stall for _, stall in attempts) and len(attempts) <= AGAIN


def _attempts(file: Iterable[Record], outputs: Sequence[Output]) -> dict[Run, Attempts]:
    """Of these prompts."""
    contexts = {output.key[:2]: len(output.prompt) + len(output.output) / 2 for output in outputs}
    rows = [row for row in file if key_of(row) in contexts]
    found: dict[Run, Attempts] = {}
    for row, stall in zip(rows, stalled(rows, contexts), strict=True):
        found.setdefault((key_of(row), row["round"], Way.of(row)), []).append((row, stall))
    return found


def _state(target: Model, output: Output, max_new_tokens: int) -> MachineState:
    """Decode plainly."""
    stats = _generated(target, output, {"max_new_tokens": max_new_tokens}).stats
    return state_of(target, (stats.total_s - stats.prefill_s) / max(1, stats.emitted))


def _generated(target: Model, output: Output, options: Options) -> Generation:
    """On a GPU by the second of two runs: the first may compile kernels and capture iterations."""
    if target.device.type == "cuda":
        generate(target, output.prompt, **options)
    return generate(target, output.prompt, **options)


def _decode(target: Model, output: Output, options: Options, max_new_tokens: int) -> Record:
    run = _generated(target, output, options | {"max_new_tokens": max_new_tokens})
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

    by_way: dict[Way, Measured] = field(default_factory=dict)
    """Of ways that were run on every prompt."""
    stalled: list[Key] = field(default_factory=list)
    """Prompts that no way counts: one of them stalled there, however often it was taken again."""
    lossless: bool | None = None
    """Every output is the trace's, but for ties of rounding; None where nothing was run."""


def measured(path: Path, outputs: Sequence[Output], ways: Sequence[Way]) -> LiveRuns:
    """Of these prompts and ways; speed-ups are ratios of sums over prompts, their intervals a bootstrap."""
    made: dict[Way, dict[Key, list[Attempts]]] = {}
    for (key, _, way), attempts in _attempts(Records.read(path, KIND, LiveRun), outputs).items():
        made.setdefault(way, {}).setdefault(key, []).append(attempts)
    keys = [output.key[:2] for output in outputs]
    whole = {way: made[way] for way in ways if way in made and made[way].keys() == set(keys)}
    lost = [key for key in keys if any(_sound(one) is None for its in whole.values() for one in its[key])]
    enough = not lost or len(keys) - len(lost) > 1  # of one prompt that is left nobody knows how sure it is
    found = {way: _measured(by_prompt, lost) for way, by_prompt in whole.items()} if enough else {}
    same = [_lossless(by_prompt) for by_prompt in whole.values()]
    return LiveRuns(found, lost, all(same) if same else None)


def _sound(attempts: Attempts) -> Record | None:
    """The first that did not stall; of those that take so long whenever they are run between calm ones, the middle."""
    if len(attempts) > AGAIN and all(stall == "seeming" for _, stall in attempts):
        return sorted((row for row, _ in attempts), key=_seconds)[len(attempts) // 2]
    return next((row for row, stall in attempts if not stall), None)


def _seconds(row: Record) -> float:
    return float(row["seconds"])


def _lossless(by_prompt: Mapping[Key, list[Attempts]]) -> bool:
    """Outputs are compared in all runs, those that stalled too."""
    return all(row["tie"] for its in by_prompt.values() for attempts in its for row, _ in attempts)


def _measured(by_prompt: Mapping[Key, list[Attempts]], lost: Sequence[Key]) -> Measured:
    kept = {key: [row for one in its if (row := _sound(one))] for key, its in by_prompt.items() if key not in lost}
    return _compare(kept, lossless=_lossless(by_prompt))


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
