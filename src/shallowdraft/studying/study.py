"""A study: every proposer's acceptance, times and predicted speed; the fastest few verified live; one ranked table.

Its stages are record, replay, profile, predict and live runs. All raw records lie in the run's folder: an interrupted
study goes on, and one with another draft reuses the rest. A proposer that cannot be used is named and left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from shallowdraft import cost
from shallowdraft.cost import Prediction
from shallowdraft.errors import OptionError, ShallowdraftError
from shallowdraft.models.model import Model
from shallowdraft.profiling.measure import CONTEXTS, all_points, describe, fitting, longest_context, measure
from shallowdraft.progress import Follow
from shallowdraft.prompts import Prompt
from shallowdraft.replaying.recording import record
from shallowdraft.replaying.result import Replay
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.part_times import Point
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.replays import ReplayRecord, write_replays
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.study import StudyResult, StudyRow, write_study
from shallowdraft.runs.trace import Output, Trace, read_trace
from shallowdraft.studying.cluster import Executor, Here
from shallowdraft.studying.forecast import forecast, forecast_in_states, interval
from shallowdraft.studying.live import LiveResults, measured, run_live
from shallowdraft.studying.proposers import Proposer
from shallowdraft.studying.tokens import keep_tokens

SHOWN_TEXTS = 3  # candidates that the report shows token by token
NODES = (4, 8, 16)  # of trees, unless others are named
TIMED_LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # times of the others lie between


@dataclass(frozen=True)
class Plan:
    """The settings of a study."""

    prompts: Sequence[tuple[str, Prompt]]
    """Prompts with the names of their sets."""
    lookaheads: Sequence[int]
    max_new_tokens: int
    rounds: int = 3
    """Rounds of timing."""
    live: int = 3
    """Number of proposers that are verified live, each at its predicted best size."""
    live_prompts: int = 40
    contexts: tuple[int, ...] = CONTEXTS
    """Contexts at which iterations are timed, as far as models have room."""
    nodes: Sequence[int] = NODES
    """Sizes of trees."""

    def sizes(self, proposer: Proposer) -> Sequence[int]:
        return self.nodes if proposer.branches else self.lookaheads


@dataclass(frozen=True)
class Replayed:
    """A proposer with its replay and, once it was profiled, its predictions by size."""

    proposer: Proposer
    replay: Replay
    curve: Mapping[int, Prediction] = field(default_factory=dict)

    @property
    def best(self) -> Prediction:
        return cost.best(self.curve)

    @property
    def candidate(self) -> Candidate:
        """The candidate at the best size."""
        return self.replay.candidate(self.best.size)


def study(
    target: Model,
    proposers: Sequence[Proposer],
    plan: Plan,
    folder: Path,
    follow: Follow,
    failed: Mapping[str, str] | None = None,
    executor: Executor | None = None,
) -> StudyResult:
    """Run all stages, or go on where an interrupted study stopped.

    `failed` says which drafts could not even be loaded; `executor` is where replays run.
    """
    run, left_out = RunFolder(folder), dict(failed or {})
    if not proposers:
        raise OptionError("no draft can be used: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    trace = _record(target, plan, run.trace, follow)
    replayed = _replay_all(proposers, trace, plan, folder, left_out, follow, executor or Here())
    about = {"target": trace.target, "target_digest": trace.target_digest}
    write_replays(run.replays, about, (_replay_record(entry, plan) for entry in replayed))
    profile = _profile(target, replayed, plan, run.profile, follow)
    replayed = [replace(entry, curve=forecast(entry.replay, profile, plan.sizes(entry.proposer))) for entry in replayed]
    replayed.sort(key=lambda entry: -entry.best.tokens_per_s)
    live = _verify_live(target, replayed[: plan.live], trace, plan, run.live, follow)
    ranked = [(entry, _row(entry, profile, live)) for entry in replayed]
    ranked.sort(key=lambda pair: (pair[1].live is None, -pair[1].speed_up))
    shown = [(entry.proposer, entry.replay, row.prediction.size) for entry, row in ranked[:SHOWN_TEXTS]]
    keep_tokens(target, shown, run.tokens)
    rows = tuple(row for _, row in ranked)
    plain_speeds = [row.live.plain_tokens_per_s for row in rows if row.live]
    result = StudyResult(
        rows,
        median(plain_speeds) if plain_speeds else 1 / profile.plain_s(trace.mean_context),
        left_out,
        tuple(" ".join(key) for key in live.stalled),
        live.lossless,
    )
    write_study(run.study, result)
    return result


def _record(target: Model, plan: Plan, path: Path, follow: Follow) -> Trace:
    """Record the outputs that the trace lacks, and return those of the plan's prompts."""
    steps = record(target, plan.prompts, path, max_new_tokens=plan.max_new_tokens, sampling=Sampling())
    follow("recording the target", steps, len(plan.prompts))
    trace, keys = read_trace(path), {(set_name, prompt.id) for set_name, prompt in plan.prompts}
    return replace(trace, outputs=[output for output in trace.outputs if output.prompt_key in keys])


def _replay_all(
    proposers: Sequence[Proposer],
    trace: Trace,
    plan: Plan,
    folder: Path,
    failed: dict[str, str],
    follow: Follow,
    executor: Executor,
) -> list[Replayed]:
    """Replay every proposer; those that fail are added to `failed`."""
    results: dict[int, Replay | ShallowdraftError] = {}

    def passes() -> Iterator[int]:
        for number, result in executor.map(partial(_replay, trace, plan, folder), proposers):
            results[number] = result
            yield len(results)

    follow("replaying", passes(), len(proposers))
    replayed: list[Replayed] = []
    for number, proposer in enumerate(proposers):
        if isinstance(result := results[number], ShallowdraftError):
            failed[proposer.name] = str(result)
        else:
            replayed.append(Replayed(proposer, result))
    if not replayed:
        raise OptionError("nothing can propose: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    return replayed


def _replay(trace: Trace, plan: Plan, folder: Path, proposer: Proposer) -> Replay | ShallowdraftError:
    try:
        return proposer.replay(trace, plan.sizes(proposer), folder)
    except ShallowdraftError as error:
        return error


def _replay_record(entry: Replayed, plan: Plan) -> ReplayRecord:
    proposer, sizes = entry.proposer, plan.sizes(entry.proposer)
    candidate = entry.replay.candidate(entry.replay.counts.sizes[0])
    return replace(
        entry.replay.record(proposer.drafter),
        name=proposer.name,
        draft=proposer.draft,
        digest=candidate.digest,
        dtype=candidate.dtype,
        shape=proposer.shape,
        layers=proposer.layers,
        parameters=proposer.parameters,
        acceptance_by_position=tuple(entry.replay.counts.acceptance_by_position(max(sizes)).tolist()),
    )


def _profile(target: Model, replayed: Sequence[Replayed], plan: Plan, path: Path, follow: Follow) -> Profile:
    """Take the samples that the profile lacks."""
    points = [point for entry in replayed for point in _points(target, entry, plan)]
    options = {entry.proposer.key: entry.proposer.options for entry in replayed}
    follow("timing iterations", measure(target, options, points, path, plan.rounds), plan.rounds * len(points))
    return read_profile(path)


def _points(target: Model, entry: Replayed, plan: Plan) -> list[Point]:
    """Return the points at which a proposer is timed: none where its context is full."""
    candidates = _timed_candidates(entry, plan)
    longest_lookahead = max(candidate.lookahead for candidate in candidates)
    longest = longest_context(target.shape.context, entry.proposer.context, longest_lookahead)
    return all_points(candidates, fitting(plan.contexts, longest), [1])


def _timed_candidates(entry: Replayed, plan: Plan) -> list[Candidate]:
    """Return every tree; chains only at lookaheads between which the others lie."""
    if entry.proposer.branches:
        return list(dict.fromkeys(map(entry.replay.candidate, plan.nodes)))
    shortest = entry.replay.candidate(plan.lookaheads[0])
    return [replace(shortest, lookahead=lookahead) for lookahead in timed_lookaheads(plan.lookaheads)]


def timed_lookaheads(lookaheads: Sequence[int]) -> list[int]:
    """Return the lookaheads to time, so that all given ones lie between them."""
    longest = max(lookaheads)
    return [lookahead for lookahead in TIMED_LOOKAHEADS if lookahead < longest] + [longest]


def _verify_live(
    target: Model, best: Sequence[Replayed], trace: Trace, plan: Plan, path: Path, follow: Follow
) -> LiveResults:
    """Run the best candidates live on some prompts of every set."""
    if not plan.live:
        return LiveResults()
    outputs = spread([output for output in trace.outputs if len(output.output) > 1], plan.live_prompts)
    about = describe(target) | {"max_new_tokens": plan.max_new_tokens}
    options = {entry.proposer.key: entry.proposer.options for entry in best}
    candidates = [entry.candidate for entry in best]
    steps = run_live(
        target, options, candidates, outputs, path, max_new_tokens=plan.max_new_tokens, rounds=1, about=about
    )
    follow("running the best live", steps, len(outputs) * len(candidates))
    return measured(path, outputs, candidates)


def spread(outputs: Sequence[Output], count: int) -> list[Output]:
    """Return at most `count` outputs, evenly spread over all of them, and so over all sets."""
    step = max(1.0, len(outputs) / count)
    return [outputs[int(index * step)] for index in range(min(count, len(outputs)))]


def _row(entry: Replayed, profile: Profile, live: LiveResults) -> StudyRow:
    """Return a row of the table; a candidate that ran live is predicted again for the machine as it was then."""
    prediction, candidate = entry.best, entry.candidate
    result, impossible = live.by_candidate.get(candidate), live.impossible.get(candidate)
    if result:
        prediction = forecast_in_states(entry.replay, profile, prediction.size, result.states)
    return StudyRow(
        entry.proposer.name,
        candidate,
        entry.proposer.shape,
        prediction,
        interval(entry.replay, prediction),
        result.speed if result else None,
        impossible.speed if impossible else None,
        tuple(entry.curve.values()),
    )
