"""Live runs: ways of decoding take turns on every prompt, so that they meet the same machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shallowdraft.decoding.divergence import explain
from shallowdraft.decoding.generation import Options, generate
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records
from shallowdraft.replay.traces import Output

KIND = "live runs"


@dataclass(frozen=True, order=True)
class Way:
    """A draft at a lookahead; no draft and 0 is plain decoding."""

    draft: str = ""
    lookahead: int = 0


PLAIN = Way()


def run_live(
    target: Model,
    drafts: Mapping[str, Model],
    ways: Sequence[Way],
    outputs: Sequence[Output],
    path: Path,
    *,
    max_new_tokens: int,
    rounds: int,
    about: Record,
) -> Iterator[int]:
    """Decode every prompt in every way, plain decoding first; yields how many runs are done. Nothing is done twice."""
    file = Records.open(path, KIND, about)
    done = {(Way(row["draft"], row["lookahead"]), row["set"], row["id"], row["round"]) for row in file}
    turns = [
        (number, output, way)
        for number in range(rounds)
        for output in outputs
        for way in (PLAIN, *ways)
        if (way, output.set, output.id, number) not in done
    ]
    total = rounds * len(outputs) * (1 + len(ways))
    yield total - len(turns)
    if turns:
        _decode(target, drafts, turns[0][2], turns[0][1], max_new_tokens)  # warms up
    for count, (number, output, way) in enumerate(turns, 1):
        made = _decode(target, drafts, way, output, max_new_tokens)
        file.append({**asdict(way), "set": output.set, "id": output.id, "round": number} | made)
        yield total - len(turns) + count


def _decode(target: Model, drafts: Mapping[str, Model], way: Way, output: Output, max_new_tokens: int) -> Record:
    options: Options = {"max_new_tokens": max_new_tokens}
    if way != PLAIN:
        options |= {"draft": drafts[way.draft], "lookahead": way.lookahead}
    run = generate(target, output.prompt, **options)
    difference = explain(target, output.prompt, output.output, run.token_ids)
    return {
        "emitted": run.stats.emitted,
        "iterations": run.stats.iterations,
        "seconds": run.stats.total_s - run.stats.prefill_s,
        "differs": None if difference is None else str(difference),
        "tie": difference is None or difference.tie,
    }


@dataclass(frozen=True)
class Measured:
    """A way against plain decoding."""

    tar: float
    tokens_per_s: float
    speed_up: float
    interval: tuple[float, float]
    lossless: bool
    """Every output is the trace's, but for ties of rounding."""


def measured(path: Path) -> dict[Way, Measured]:
    """By way; the speed-up is a ratio of sums over prompts, its interval a bootstrap over them."""
    rows: dict[Way, dict[tuple[str, str], list[Record]]] = {}
    for row in Records.read(path, KIND):
        rows.setdefault(Way(row["draft"], row["lookahead"]), {}).setdefault((row["set"], row["id"]), []).append(row)
    return {way: _compare(found, rows[PLAIN]) for way, found in rows.items()}


def _compare(way: dict[tuple[str, str], list[Record]], plain: dict[tuple[str, str], list[Record]]) -> Measured:
    keys = [key for key in way if key in plain]
    sums = np.array(
        [
            [
                sum(row[name] for row in side[key])
                for side in (way, plain)
                for name in ("emitted", "seconds", "iterations")
            ]
            for key in keys
        ]
    )

    def ratio(chosen: np.ndarray) -> np.ndarray:
        emitted, seconds, _, plain_emitted, plain_seconds, _ = sums[chosen].sum(-2).T
        return np.asarray(emitted / seconds * plain_seconds / plain_emitted)

    low, high = bootstrap(ratio, len(keys))
    emitted, seconds, iterations = sums[:, :3].sum(0)
    return Measured(
        float(emitted / max(1, iterations)),
        float(emitted / seconds),
        float(ratio(np.arange(len(keys)))),
        (float(low), float(high)),
        all(row["tie"] for found in way.values() for row in found),
    )
