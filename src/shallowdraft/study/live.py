"""Live runs: on every prompt each way of decoding stands between plain runs, so that both meet the same machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from shallowdraft.decoding.divergence import explain
from shallowdraft.decoding.generation import Options, generate
from shallowdraft.decoding.timing import MachineState, state_of
from shallowdraft.decoding.ways import Way, Whose
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.traces import Output

KIND = "live runs"


Key = tuple[str, str]
"""Set and id of a prompt."""


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
    """Decode every prompt in every way, between plain runs; yields how many are done. Nothing is done twice."""
    file = Records.open(path, KIND, about)
    done = {(row["set"], row["id"], row["round"], Way.of(row)) for row in file}
    total = rounds * len(outputs) * len(ways)
    turns = [
        (output, [way for way in ways if (output.set, output.id, number, way) not in done], number)
        for number, output in product(range(rounds), outputs)
    ]
    count = total - sum(len(left) for _, left, _ in turns)
    yield count
    for output, left, number in turns:
        before = _state(target, output, max_new_tokens) if left else None
        for way in left:
            made = _decode(target, output, way.options(proposers), max_new_tokens)
            after = _state(target, output, max_new_tokens)
            states = {"states": [asdict(state) for state in (before, after) if state]}
            file.append({"set": output.set, "id": output.id, "round": number} | asdict(way) | made | states)
            before = after
            count += 1
            yield count


def _state(target: Model, output: Output, max_new_tokens: int) -> MachineState:
    """Decode plainly."""
    stats = generate(target, output.prompt, max_new_tokens=max_new_tokens).stats
    return state_of(target, (stats.total_s - stats.prefill_s) / max(1, stats.emitted))


def _decode(target: Model, output: Output, options: Options, max_new_tokens: int) -> Record:
    options["max_new_tokens"] = max_new_tokens
    run = generate(target, output.prompt, **options)
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


def measured(path: Path) -> dict[Way, Measured]:
    """By way; the speed-up is a ratio of sums over prompts, its interval a bootstrap over them."""
    found: dict[Way, dict[Key, list[Record]]] = {}
    for row in Records.read(path, KIND):
        found.setdefault(Way.of(row), {}).setdefault((row["set"], row["id"]), []).append(row)
    return {way: _compare(by_prompt) for way, by_prompt in found.items()}


def _compare(by_prompt: Mapping[Key, list[Record]]) -> Measured:
    def sums(figure: Callable[[Record], float]) -> np.ndarray:
        return np.array([sum(map(figure, rows)) for rows in by_prompt.values()])

    emitted, seconds = sums(lambda row: row["emitted"]), sums(lambda row: row["seconds"])
    plain = sums(lambda row: row["emitted"] * fmean(state["plain_s"] for state in row["states"]))
    low, high = bootstrap(lambda draws: plain[draws].sum(1) / seconds[draws].sum(1), len(by_prompt))
    return Measured(
        tar=float(emitted.sum() / max(1.0, sums(lambda row: row["iterations"]).sum())),
        tokens_per_s=float(emitted.sum() / seconds.sum()),
        plain_tokens_per_s=float(emitted.sum() / plain.sum()),
        speed_up=float(plain.sum() / seconds.sum()),
        interval=(float(low), float(high)),
        lossless=all(row["tie"] for rows in by_prompt.values() for row in rows),
        states={key: [MachineState(**one) for row in rows for one in row["states"]] for key, rows in by_prompt.items()},
    )
