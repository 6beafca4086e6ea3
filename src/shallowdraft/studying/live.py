"""Live runs: every candidate decodes every prompt between two plain runs, so that both meet the same machine.

All candidates take a turn on a prompt, in an order that is drawn for each turn. Nothing is written before a turn is
over, and a turn begins with a plain run that does not count, so that no run that counts follows a write.

A run that stalled is taken again, and the first that did not stall counts. A prompt on which some candidate always
stalled counts for none of them, so that all are compared on the same prompts.

A speed-up above its TAR is impossible, as an iteration takes at least as long as a plain token. Such a candidate runs
on all prompts again, and all its runs count: choosing among them would make it slower than it is. If it stays above, it
has no result, however wide its interval is: every figure that is shown can be true.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from shallowdraft.decoding.candidate import options_of
from shallowdraft.decoding.divergence import explain
from shallowdraft.decoding.generate import generate
from shallowdraft.decoding.options import Options
from shallowdraft.decoding.results import Generation
from shallowdraft.decoding.timing import current_state
from shallowdraft.intervals import bootstrap
from shallowdraft.models.model import Model
from shallowdraft.records import Record
from shallowdraft.runs.candidate import Candidate, ProposerKey
from shallowdraft.runs.live import LiveRun, append_live_runs, live_runs_of, open_live_runs, read_live_runs
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.study import LiveSpeed
from shallowdraft.runs.trace import Output, PromptKey
from shallowdraft.studying.stalls import Stall, find_stalls

REPEATS = 2  # times that a stalled run is taken again, and an impossible candidate on all prompts

RunKey = tuple[PromptKey, int, Candidate]
"""The prompt, round and candidate of a run."""
Attempts = list[tuple[LiveRun, Stall]]
"""All attempts at a run in their order, each with whether it stalled."""


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
    """Decode every prompt with every candidate, between plain runs, and yield how many runs are done.

    Runs that the file has are not done again, unless they stalled or their candidate's speed-up is impossible.
    """
    file = open_live_runs(path, about)

    def take(chosen: Sequence[Candidate], numbers: Sequence[int]) -> Iterator[int]:
        """Take the missing and stalled runs of some rounds, and yield the number of runs of each turn."""
        # Stalled runs come after all others, as a stall may last.
        for is_due in (_never_run, _to_repeat):
            while turns := _turns(live_runs_of(file), chosen, outputs, numbers, is_due):
                for output, number, due in turns:
                    append_live_runs(file, _turn(target, proposers, output, number, due, max_new_tokens))
                    yield len(due)

    total, numbers = rounds * len(outputs) * len(candidates), range(rounds)
    missing = _turns(live_runs_of(file), candidates, outputs, numbers, _never_run)
    runs_done = total - sum(len(due) for _, _, due in missing)
    yield runs_done
    for taken in take(candidates, numbers):
        runs_done = min(total, runs_done + taken)
        yield runs_done
    # Whole further rounds of impossible candidates; between them they may have become possible.
    for number in range(rounds, rounds + REPEATS):
        for _ in take(list(measured(path, outputs, candidates).impossible), [number]):
            yield runs_done


def _turn(
    target: Model,
    proposers: Mapping[ProposerKey, Options],
    output: Output,
    number: int,
    candidates: Sequence[Candidate],
    max_new_tokens: int,
) -> list[LiveRun]:
    """Run candidates on a prompt, a plain run before and after each, and compare their outputs afterwards."""
    _plain_state(target, output, max_new_tokens)  # does not count, as it follows a write
    # states[i] and states[i + 1] are the machine before and after candidate i: neighbours share a plain run.
    states, generations = [_plain_state(target, output, max_new_tokens)], []
    for candidate in candidates:
        options = options_of(candidate, proposers)
        options["max_new_tokens"] = max_new_tokens
        generations.append(_decode(target, output, options))
        states.append(_plain_state(target, output, max_new_tokens))
    # Comparing takes passes of the target, so it waits until all candidates have run.
    return [
        _live_run(target, output, number, candidate, generation, state_pair)
        for candidate, generation, state_pair in zip(candidates, generations, pairwise(states), strict=True)
    ]


def _turns(
    runs: Sequence[LiveRun],
    candidates: Sequence[Candidate],
    outputs: Sequence[Output],
    numbers: Iterable[int],
    is_due: Callable[[Attempts], bool],
) -> list[tuple[Output, int, list[Candidate]]]:
    """Return prompts and rounds with the candidates that are due, in the order in which they are to run."""
    attempts = _attempts(runs, outputs)
    turns = []
    for number, output in product(numbers, outputs):
        order = _drawn_order(candidates, output, number)
        due = [candidate for candidate in order if is_due(attempts.get((output.prompt_key, number, candidate), []))]
        if due:
            turns.append((output, number, due))
    return turns


def _drawn_order(candidates: Sequence[Candidate], output: Output, number: int) -> list[Candidate]:
    """Draw an order for a prompt and a round, the same one whenever an interrupted study goes on."""
    return Random(f"{number} {output.set} {output.id}").sample(candidates, len(candidates))


def _never_run(attempts: Attempts) -> bool:
    return not attempts


def _to_repeat(attempts: Attempts) -> bool:
    """Return whether every attempt stalled and another is allowed."""
    return all(stall for _, stall in attempts) and len(attempts) <= REPEATS


def _attempts(runs: Sequence[LiveRun], outputs: Sequence[Output]) -> dict[RunKey, Attempts]:
    """Return the attempts at every run of these outputs; runs of other texts under the same key are left out."""
    contexts = {output.prompt_key: output.mean_context for output in outputs}
    digests = {output.prompt_key: output.digest for output in outputs}
    of_outputs = [
        run
        for run in runs
        if run.prompt_key in digests and run.output_digest in ("", digests[run.prompt_key])  # early runs have none
    ]
    # Whether a run stalled shows beside all other runs, so stalls are found before runs are grouped.
    attempts: dict[RunKey, Attempts] = {}
    for run, stall in zip(of_outputs, find_stalls(of_outputs, contexts), strict=True):
        attempts.setdefault((run.prompt_key, run.round, run.candidate), []).append((run, stall))
    return attempts


def _plain_state(target: Model, output: Output, max_new_tokens: int) -> MachineState:
    """Decode plainly, and return the state of the machine."""
    stats = _decode(target, output, {"max_new_tokens": max_new_tokens}).stats
    return current_state(target, (stats.total_s - stats.prefill_s) / max(1, stats.emitted))


def _decode(target: Model, output: Output, options: Options) -> Generation:
    """Decode a prompt; on a GPU twice, as the first run may compile kernels and capture iterations."""
    if target.device.type == "cuda":
        generate(target, output.prompt, **options)
    return generate(target, output.prompt, **options)


def _live_run(
    target: Model,
    output: Output,
    number: int,
    candidate: Candidate,
    generation: Generation,
    states: tuple[MachineState, MachineState],
) -> LiveRun:
    difference = explain(target, output.prompt, output.output, generation.token_ids)
    stats = generation.stats
    return LiveRun(
        output.set,
        output.id,
        output.digest,
        number,
        candidate,
        emitted=stats.emitted,
        iterations=stats.iterations,
        seconds=stats.total_s - stats.prefill_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        differs=None if difference is None else str(difference),
        tie=difference is None or difference.tie,
        states=states,
    )


@dataclass(frozen=True)
class LiveResult:
    """The speed of a candidate against plain decoding, and the states of the machine during its runs."""

    speed: LiveSpeed
    states: dict[PromptKey, list[MachineState]] = field(repr=False)
    """The states of the machine before and after each run, by prompt."""


@dataclass(frozen=True)
class LiveResults:
    """The results of all candidates' live runs."""

    by_candidate: dict[Candidate, LiveResult] = field(default_factory=dict)
    """Candidates that ran on every prompt."""
    impossible: dict[Candidate, LiveResult] = field(default_factory=dict)
    """Candidates that ran on every prompt with a speed-up above their TAR: the machine was disturbed."""
    stalled: list[PromptKey] = field(default_factory=list)
    """Prompts that count for no candidate, as every attempt of some candidate stalled there."""
    lossless: bool | None = None
    """Whether every output is the trace's, but for ties of rounding; None if nothing ran."""


def measured(path: Path, outputs: Sequence[Output], candidates: Sequence[Candidate]) -> LiveResults:
    """Read the results of candidates on these outputs, from the rounds that ran on all of them."""
    # A round of a candidate counts if it was run on all prompts, so that all prompts weigh the same.
    by_round: dict[Candidate, dict[int, dict[PromptKey, Attempts]]] = {}
    for (key, number, candidate), attempts in _attempts(read_live_runs(path), outputs).items():
        by_round.setdefault(candidate, {}).setdefault(number, {})[key] = attempts
    keys = [output.prompt_key for output in outputs]
    by_prompt: dict[Candidate, dict[PromptKey, list[Attempts]]] = {}
    for candidate in candidates:
        whole_rounds = [prompts for prompts in by_round.get(candidate, {}).values() if prompts.keys() == set(keys)]
        if whole_rounds:
            by_prompt[candidate] = {key: [prompts[key] for prompts in whole_rounds] for key in keys}
    stalled = [key for key in keys if _always_stalled(key, by_prompt.values())]
    lossless = {candidate: _lossless(by_round[candidate].values()) for candidate in by_prompt}
    results = {}
    if not stalled or len(keys) - len(stalled) > 1:  # one remaining prompt would have no interval
        for candidate, attempts_of in by_prompt.items():
            counting = {key: _counting_runs(rounds) for key, rounds in attempts_of.items() if key not in stalled}
            results[candidate] = _result(counting, lossless=lossless[candidate])
    # No engine can be faster than its TAR (see above): a result above it shows a disturbed machine.
    return LiveResults(
        {candidate: result for candidate, result in results.items() if result.speed.speed_up <= result.speed.tar},
        {candidate: result for candidate, result in results.items() if result.speed.speed_up > result.speed.tar},
        stalled,
        all(lossless.values()) if lossless else None,
    )


def _always_stalled(key: PromptKey, by_prompt: Iterable[Mapping[PromptKey, list[Attempts]]]) -> bool:
    """Return whether some round of some candidate has no run of this prompt that counts."""
    return any(_counting_run(attempts) is None for prompts in by_prompt for attempts in prompts[key])


def _counting_runs(rounds: Sequence[Attempts]) -> list[LiveRun]:
    return [run for attempts in rounds if (run := _counting_run(attempts))]


def _counting_run(attempts: Attempts) -> LiveRun | None:
    """Return the first attempt that did not stall.

    If all seemed slow though the plain runs beside them were not, the candidate is slow here: the median counts.
    """
    if len(attempts) > REPEATS and all(stall == "seeming" for _, stall in attempts):
        return sorted((run for run, _ in attempts), key=lambda run: run.seconds)[len(attempts) // 2]
    return next((run for run, stall in attempts if not stall), None)


def _lossless(rounds: Iterable[Mapping[PromptKey, Attempts]]) -> bool:
    """Return whether all outputs are the trace's; those of stalled runs are compared too."""
    return all(run.tie for prompts in rounds for attempts in prompts.values() for run, _ in attempts)


def _result(by_prompt: Mapping[PromptKey, list[LiveRun]], *, lossless: bool) -> LiveResult:
    """Compare a candidate with plain decoding: ratios of sums over prompts, with a bootstrap over prompts."""

    def sums(figure: Callable[[LiveRun], float]) -> np.ndarray:
        """Return the sum of a figure over the runs of each prompt [prompts]."""
        return np.array([sum(map(figure, runs)) for runs in by_prompt.values()])

    def plain_s(run: LiveRun) -> float:
        """Return the seconds of plain decoding for as many tokens, on the machine around this run."""
        return run.emitted * fmean(state.plain_s for state in run.states)

    # [prompts] each: ratios of their sums weigh long outputs more, as a user's total time does.
    emitted, seconds, plain = sums(lambda run: run.emitted), sums(lambda run: run.seconds), sums(plain_s)
    low, high = bootstrap(lambda draws: plain[draws].sum(1) / seconds[draws].sum(1), len(by_prompt))
    speed = LiveSpeed(
        tar=float(emitted.sum() / max(1.0, sums(lambda run: run.iterations).sum())),
        tokens_per_s=float(emitted.sum() / seconds.sum()),
        plain_tokens_per_s=float(emitted.sum() / plain.sum()),
        speed_up=float(plain.sum() / seconds.sum()),
        interval=(float(low), float(high)),
        lossless=lossless,
    )
    states = {key: list(chain.from_iterable(run.states for run in runs)) for key, runs in by_prompt.items()}
    return LiveResult(speed, states)
