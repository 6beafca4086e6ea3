"""A study: every proposer's acceptance, times and predicted speed, the best few verified live, one ranked table.

All raw records lie in the run's folder as JSON lines; a study that was stopped goes on, one with another draft reuses
the rest. A proposer that cannot be used is named and left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from shallowdraft import cost
from shallowdraft.decoding.candidate import Candidate
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.errors import OptionError, ShallowdraftError
from shallowdraft.models.model import Model
from shallowdraft.profiling.latency import (
    CONTEXTS,
    Point,
    Profile,
    about,
    fitting,
    longest_context,
    measure,
    points,
    read_profile,
)
from shallowdraft.progress import Follow
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records, write_whole
from shallowdraft.replay.result import Replay
from shallowdraft.replay.trace import Output, Trace, read_trace, record
from shallowdraft.study.cluster import Executor, Here
from shallowdraft.study.forecast import forecast, forecast_at, interval
from shallowdraft.study.live import LiveRuns, Measured, measured, run_live
from shallowdraft.study.proposers import Proposer
from shallowdraft.study.tokens import keep_inside

REPLAYS = "replays"
SHOWN = 3  # proposers whose generations can be looked into
NODES = (4, 8, 16)  # of trees, unless others are named
ALWAYS_MEASURED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # lookaheads; the others lie between


@dataclass(frozen=True)
class Plan:
    """What to study."""

    prompts: Sequence[tuple[str, Prompt]]
    """Each with the name of its set."""
    lookaheads: Sequence[int]
    max_new_tokens: int
    rounds: int = 3
    """Samples of each timing."""
    live: int = 3
    """How many proposers are verified live, each at its predicted best."""
    live_prompts: int = 40
    contexts: tuple[int, ...] = CONTEXTS
    """To time at, as far as models have room."""
    nodes: Sequence[int] = NODES
    """Of proposals that branch."""

    def sizes(self, proposer: Proposer) -> Sequence[int]:
        return self.nodes if proposer.branches else self.lookaheads


@dataclass(frozen=True)
class Row:
    """A proposer in the table, at its best."""

    proposer: Proposer
    candidate: Candidate
    prediction: cost.Prediction
    """With `live`: for the prompts and the speed of plain decoding that it met."""
    interval: tuple[float, float]
    """Of the predicted speed-up: the bootstrap of TAR over prompts."""
    live: Measured | None = None
    impossible: Measured | None = None
    """What was measured live, if it is above the TAR: no result, so that the prediction stands."""
    curve: Mapping[int, cost.Prediction] = field(default_factory=dict, repr=False)
    """At every size, on the machine as it was while profiling."""

    @property
    def speed_up(self) -> float:
        return self.live.speed_up if self.live else self.prediction.speed_up

    @property
    def disturbed(self) -> str | None:
        """Why what was measured is no result."""
        if self.impossible is None:
            return None
        (low, high), tar = self.impossible.interval, self.impossible.tar
        return (
            f"measured {self.impossible.speed_up:.3f}x ({low:.3f}–{high:.3f}), above its TAR of {tar:.3f} after all "
            "runs: impossible, as an iteration takes at least as long as a plain token; the machine was disturbed, and "
            "the prediction stands"
        )


@dataclass(frozen=True)
class Study:
    """The answer."""

    rows: list[Row]
    """Fastest first: those verified live by what was measured, then the others by what was predicted."""
    plain_tokens_per_s: float
    failed: dict[str, str] = field(default_factory=dict)
    """Who could not be used, and why."""
    stalled: list[str] = field(default_factory=list)
    """Prompts, with their sets, that were left out of what was measured live: the machine stalled on them."""
    lossless: bool | None = None
    """Every output of live runs is that of plain decoding, but for ties of rounding; None where nothing was run."""

    @property
    def verdict(self) -> str:
        best = self.rows[0]
        if not best.live:
            return f"{best.proposer.name} {best.prediction.verdict}"
        low, high = best.live.interval
        what = f"{best.proposer.name} {best.prediction.where}"
        if low > 1:
            return f"speculation pays: {what} is {best.live.speed_up:.2f}x as fast (95 %: {low:.2f} to {high:.2f})"
        if high < 1:
            return f"speculation does not pay: the best, {what}, is {best.live.speed_up:.2f}x as fast"
        return f"speculation makes no clear difference: {what} is {best.live.speed_up:.2f}x ({low:.2f} to {high:.2f})"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "rows": [
                {
                    "name": row.proposer.name,
                    **asdict(row.candidate),
                    "nodes": row.prediction.nodes,
                    "shape": row.proposer.shape,
                    "tar": row.prediction.tar,
                    "predicted_speed_up": row.prediction.speed_up,
                    "predicted_interval": row.interval,
                    "break_even_tar": row.prediction.break_even_tar,
                    "iteration": asdict(row.prediction.iteration),
                    "waterfall": asdict(row.prediction.waterfall),
                    "silence": asdict(silence) if (silence := row.prediction.silence) else None,
                    "live": None if row.live is None else row.live.to_json(),
                    "disturbed": row.impossible and {"why": row.disturbed, **row.impossible.to_json()},
                    "curve": [_flat(one) for one in row.curve.values()],
                }
                for row in self.rows
            ],
            "failed": self.failed,
            "stalled": self.stalled,
            "lossless": self.lossless,
        }


def study(
    target: Model,
    proposers: Sequence[Proposer],
    plan: Plan,
    folder: Path,
    follow: Follow,
    failed: Mapping[str, str] | None = None,
    executor: Executor | None = None,
) -> Study:
    """Do it, or what is left of it; `failed` says who could not even be loaded, `executor` where to replay."""
    left_out = dict(failed or {})
    if not proposers:
        raise OptionError("no draft can be used: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    trace = _recorded(target, plan, folder / "trace.jsonl", follow)
    found = _replayed(proposers, trace, plan, folder, left_out, follow, executor or Here())
    _keep(found, trace, plan, folder / "replays.jsonl")
    profile = _profiled(target, found, plan, folder / "profile.jsonl", follow)
    made = [(one, replayed, forecast(replayed, profile, plan.sizes(one))) for one, replayed in found]
    made.sort(key=lambda one: -cost.best(one[2]).tokens_per_s)
    best = [(one, replayed.candidate(cost.best(curve).size)) for one, replayed, curve in made[: plan.live]]
    live = _verified(target, best, trace, plan, folder / "live.jsonl", follow)
    ranked = [(_row(*one, profile, live), one[1]) for one in made]
    ranked.sort(key=lambda one: (one[0].live is None, -one[0].speed_up))
    shown = [(row.proposer, replayed, row.prediction.size) for row, replayed in ranked[:SHOWN]]
    keep_inside(target, shown, folder / "inside.jsonl")
    rows = [row for row, _ in ranked]
    met = [row.live.plain_tokens_per_s for row in rows if row.live]
    stalled = [" ".join(key) for key in live.stalled]
    plain_tokens_per_s = median(met) if met else 1 / profile.plain_s(trace.mean_context)
    result = Study(rows, plain_tokens_per_s, left_out, stalled, live.lossless)
    write_whole(folder / "study.json", json.dumps(result.to_json(), indent=2) + "\n")
    return result


def _flat(one: cost.Prediction) -> Record:
    sizes = {"size": one.size, "lookahead": one.lookahead, "nodes": one.nodes}
    times = {"tar": one.tar, **asdict(one.iteration), "plain_s": one.plain_s}
    return sizes | times | {"silence": asdict(one.silence) if one.silence else None}


def _keep(found: Sequence[tuple[Proposer, Replay]], trace: Trace, plan: Plan, path: Path) -> None:
    """What every replay knows, for the report."""
    file = Records.open(path, REPLAYS, {"target": trace.target, "target_digest": trace.target_digest})
    file.renew((_kept(*one, plan) for one in found), "drafter", "draft")


def _kept(proposer: Proposer, found: Replay, plan: Plan) -> Record:
    names = ("name", "drafter", "draft", "shape", "layers", "parameters")
    by_position = found.walk.acceptance_by_position(max(plan.sizes(proposer))).tolist()
    candidate = found.candidate(found.walk.sizes[0])
    about = {name: getattr(proposer, name) for name in names} | {"digest": candidate.digest, "dtype": candidate.dtype}
    return found.to_json() | about | {"acceptance_by_position": by_position}


def _recorded(target: Model, plan: Plan, path: Path, follow: Follow) -> Trace:
    steps = record(target, plan.prompts, path, max_new_tokens=plan.max_new_tokens, sampling=Sampling())
    follow("recording the target", steps, len(plan.prompts))
    trace, wanted = read_trace(path), {(name, prompt.id) for name, prompt in plan.prompts}
    chosen = [output for output in trace.outputs if output.key[:2] in wanted]
    return replace(trace, outputs=chosen)


def _replayed(
    proposers: Sequence[Proposer],
    trace: Trace,
    plan: Plan,
    folder: Path,
    failed: dict[str, str],
    follow: Follow,
    executor: Executor,
) -> list[tuple[Proposer, Replay]]:
    results: dict[int, Replay | ShallowdraftError] = {}

    def passes() -> Iterator[int]:
        for number, result in executor.map(partial(_replay, trace, plan, folder), proposers):
            results[number] = result
            yield len(results)

    follow("replaying", passes(), len(proposers))
    found: list[tuple[Proposer, Replay]] = []
    for number, proposer in enumerate(proposers):
        if isinstance(result := results[number], ShallowdraftError):
            failed[proposer.name] = str(result)
        else:
            found.append((proposer, result))
    if not found:
        raise OptionError("nothing can propose: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    return found


def _replay(trace: Trace, plan: Plan, folder: Path, proposer: Proposer) -> Replay | ShallowdraftError:
    try:
        return proposer.replay(trace, plan.sizes(proposer), folder)
    except ShallowdraftError as error:
        return error


def _profiled(
    target: Model, found: Sequence[tuple[Proposer, Replay]], plan: Plan, path: Path, follow: Follow
) -> Profile:
    wanted = [point for one in found for point in _places(target, one[0], _timed(*one, plan), plan)]
    options = {proposer.whose: proposer.options for proposer, _ in found}
    follow("timing iterations", measure(target, options, wanted, path, plan.rounds), plan.rounds * len(wanted))
    return read_profile(path)


def _places(target: Model, proposer: Proposer, candidates: Sequence[Candidate], plan: Plan) -> list[Point]:
    """Where to time a proposer: nowhere that it is silent."""
    most = longest_context(target.shape.context, proposer.context, max(candidate.lookahead for candidate in candidates))
    return points(candidates, fitting(plan.contexts, most), [1])


def _timed(proposer: Proposer, found: Replay, plan: Plan) -> list[Candidate]:
    """Every tree; chains at lookaheads between which the others lie."""
    if proposer.branches:
        return list(dict.fromkeys(map(found.candidate, plan.nodes)))
    some = found.candidate(plan.lookaheads[0])
    return [replace(some, lookahead=lookahead) for lookahead in timed_at(plan.lookaheads)]


def timed_at(lookaheads: Sequence[int]) -> list[int]:
    """Lookaheads to time so that all of these lie between them."""
    longest = max(lookaheads)
    return [d for d in ALWAYS_MEASURED if d < longest] + [longest]


def _row(
    proposer: Proposer,
    found: Replay,
    curve: Mapping[int, cost.Prediction],
    profile: Profile,
    live: LiveRuns,
) -> Row:
    """What was verified live is predicted again for the speed of plain decoding that it met."""
    prediction = cost.best(curve)
    candidate = found.candidate(prediction.size)
    run = live.by_way.get(candidate)
    if run:
        prediction = forecast_at(found, profile, prediction.size, run.states)
    return Row(proposer, candidate, prediction, interval(found, prediction), run, live.impossible.get(candidate), curve)


def _verified(
    target: Model,
    chosen: Sequence[tuple[Proposer, Candidate]],
    trace: Trace,
    plan: Plan,
    path: Path,
    follow: Follow,
) -> LiveRuns:
    if not plan.live:
        return LiveRuns()
    outputs = spread([output for output in trace.outputs if len(output.output) > 1], plan.live_prompts)
    setting = about(target) | {"max_new_tokens": plan.max_new_tokens}
    options, candidates = (
        {proposer.whose: proposer.options for proposer, _ in chosen},
        [candidate for _, candidate in chosen],
    )
    steps = run_live(
        target, options, candidates, outputs, path, max_new_tokens=plan.max_new_tokens, rounds=1, about=setting
    )
    follow("running the best live", steps, len(outputs) * len(candidates))
    return measured(path, outputs, candidates)


def spread(outputs: Sequence[Output], count: int) -> list[Output]:
    """So many of them, evenly over all sets."""
    step = max(1.0, len(outputs) / count)
    return [outputs[int(index * step)] for index in range(min(count, len(outputs)))]
