"""Search for the parts that a target should skip when it drafts for itself, by Bayesian optimisation of its speed.

Part 2 i is the attention of layer i, part 2 i + 1 its FFN. Acceptance comes from decoding a trace's prompts with the
parts skipped. Seconds come from a few timings, because a draft step takes the time of the parts that it keeps. Among
many sets of parts that are judged on a few prompts the luckiest looks best, so a set that looks better than the best so
far is judged on more prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shallowdraft.decoding.generate import generate
from shallowdraft.decoding.options import Options
from shallowdraft.decoding.timing import time_beside_plain
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.files import PositiveSeconds, Seconds, from_record
from shallowdraft.identity import text_digest
from shallowdraft.models.model import Model
from shallowdraft.records import Records
from shallowdraft.runs.trace import Output, Trace

KIND = "skip search"
LONGEST = 8  # lookahead at which acceptance is counted
TIMED = (1, 2, 4, 8)  # lookaheads; times of the others lie between
WARM_UP, COUNT, TURNS = 2, 6, 3  # iterations and turns of a timing
PROMPTS, ROUNDS = 8, 6  # prompts of a round, and rounds at most
NEW_TOKENS = 48  # per prompt

Skips = tuple[int, ...]
"""The numbers of skipped parts, in order."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft step, by the parts that it keeps, and of everything else in an iteration."""

    plain_s: PositiveSeconds
    """Seconds per token of plain decoding."""
    start_s: Seconds
    """Seconds of a step that keeps no part: embedding, head and sampling."""
    attention_s: Seconds
    """Seconds of one layer's attention."""
    ffn_s: Seconds
    """Seconds of one layer's FFN."""
    layers: int
    rest_s: dict[str, PositiveSeconds]
    """Seconds of verification and everything else but drafting, by lookahead."""

    def step_s(self, skips: Skips) -> float:
        attention, ffn = kept_parts(self.layers, skips)
        return self.start_s + attention * self.attention_s + ffn * self.ffn_s

    def iteration_s(self, skips: Skips, lookahead: int) -> float:
        return lookahead * self.step_s(skips) + self._without_draft_s(lookahead)

    def _without_draft_s(self, lookahead: int) -> float:
        """Return the seconds beside drafting, on a straight line between timed lookaheads."""
        below = max(timed for timed in TIMED if timed <= lookahead)
        above = min(timed for timed in TIMED if timed >= lookahead)
        share = (lookahead - below) / max(1, above - below)
        return self.rest_s[str(below)] * (1 - share) + self.rest_s[str(above)] * share


@dataclass(frozen=True)
class Trial:
    """A set of skipped parts, and its predicted speed at its best lookahead."""

    skips: Skips
    uniform: bool
    """Whether it is a regular pattern, tried first."""
    lookahead: int
    tar: float
    speed_up: float
    """The predicted speed-up over plain decoding."""
    prompts: int = PROMPTS
    """Prompts on which it was judged: more than the first round's if it looked better than the best before."""


def kept_parts(layers: int, skips: Sequence[int]) -> tuple[int, int]:
    """Return how many attentions and how many FFNs are not skipped."""
    skipped_attention = sum(part % 2 == 0 for part in skips)
    return layers - skipped_attention, layers - (len(skips) - skipped_attention)


def uniform_skips(layers: int) -> list[Skips]:
    """Return regular patterns: early exits, and every 2nd, 3rd, 4th or 6th layer, or only its attention, left out."""
    exits = [range(2 * max(1, round(layers * share)), 2 * layers) for share in (0.25, 0.5, 0.75, 0.9)]
    patterns = [tuple(skipped) for skipped in exits]
    for step in (2, 3, 4, 6):
        chosen = range(1, layers - 1, step)  # the first and the last layer stay
        patterns.append(tuple(2 * layer for layer in chosen))
        patterns.append(tuple(part for layer in chosen for part in (2 * layer, 2 * layer + 1)))
    return [skips for skips in dict.fromkeys(patterns) if skips]


def measure_costs(target: Model, prompt: Sequence[int]) -> Costs:
    """Time drafting with several sets of parts, and the rest of an iteration at several lookaheads."""
    from scipy.optimize import nnls  # not at the top: trials can be read without it

    layers = target.shape.layers
    parts = range(2 * layers)
    # No part skipped, all attention, all FFNs, everything, and two early exits.
    patterns = (parts[:0], parts[::2], parts[1::2], parts, parts[layers // 2 :], parts[layers:])
    candidates: list[Options] = [
        {"drafter": "skip", "skips": tuple(skips), "lookahead": TIMED[-1]} for skips in patterns
    ]
    candidates += [{"drafter": "skip", "skips": (), "lookahead": lookahead} for lookahead in TIMED[:-1]]
    turns = time_beside_plain(target, [list(prompt)], candidates, warm_up=WARM_UP, count=COUNT, turns=TURNS)
    # The fastest turn counts: disturbances only add time.
    fastest = [
        min((turn[candidate][1] for turn in turns), key=lambda times: times.total_s)
        for candidate in range(len(candidates))
    ]
    steps_s = [times.draft_s / COUNT / TIMED[-1] for times in fastest[: len(patterns)]]
    # step_s = start_s + attentions * attention_s + FFNs * ffn_s, one equation per pattern; no part takes less than 0 s.
    kept = [[1, *kept_parts(layers, skips)] for skips in patterns]
    (start_s, attention_s, ffn_s), _ = nnls(np.array(kept, dtype=float), np.array(steps_s))
    by_lookahead = (*fastest[len(patterns) :], fastest[0])  # nothing skipped, in the order of TIMED
    rests_s = [(times.total_s - times.draft_s) / COUNT for times in by_lookahead]
    return Costs(
        plain_s=min(beside.total_s for turn in turns for beside, *_ in turn) / COUNT,
        start_s=float(start_s),
        attention_s=float(attention_s),
        ffn_s=float(ffn_s),
        layers=layers,
        rest_s={str(lookahead): rest_s for lookahead, rest_s in zip(TIMED, rests_s, strict=True)},
    )


def judge(
    target: Model, rounds: Sequence[Sequence[Output]], costs: Costs, skips: Skips, uniform: bool, bar: float
) -> Trial:
    """Decode a trace's prompts round after round, as long as the predicted speed-up is above the bar."""
    accepted: list[int] = []
    prompts = 0
    for outputs in rounds:
        generations = generate(
            target,
            [output.prompt for output in outputs],
            drafter="skip",
            skips=skips,
            lookahead=LONGEST,
            max_new_tokens=NEW_TOKENS,
            stop_tokens=(),
        )
        for generation in generations:
            accepted += generation.accepted_by_iteration
        prompts += len(outputs)
        trial = _fastest(accepted, costs, Trial(skips, uniform, 1, 1.0, 0.0, prompts))
        if trial.speed_up <= bar:
            break
    return trial


def _fastest(accepted: Sequence[int], costs: Costs, trial: Trial) -> Trial:
    """Return the trial at its fastest lookahead, predicted from the acceptance by position."""
    tar, chance, best = 1.0, 1.0, trial
    for lookahead in range(1, LONGEST + 1):
        # chance: that an iteration keeps its draft token number `lookahead`, the product of the acceptance up to there.
        # TAR is 1, the target's own token, plus the sum of these chances.
        reached = sum(count >= lookahead - 1 for count in accepted)
        chance *= sum(count >= lookahead for count in accepted) / max(1, reached)
        tar += chance
        speed_up = tar * costs.plain_s / costs.iteration_s(trial.skips, lookahead)
        if speed_up > best.speed_up:
            best = replace(trial, lookahead=lookahead, tar=tar, speed_up=speed_up)
    return best


def search(target: Model, trace: Trace, path: Path, trials: int) -> Iterator[int]:
    """Try sets of parts until the file has `trials` of them, and yield how many it has.

    Each trial is in the file before the next one begins, so that an interrupted search goes on.
    """
    try:
        import optuna
    except ImportError:
        raise OptionError("the search needs optuna; install it: pip install 'shallowdraft[train]'") from None
    trace.require_target(target.name, target.digest)
    if not trace.sampling.greedy:
        raise OptionError("the trace was sampled; the search needs a greedy one (record without --temperature)")
    rounds = _rounds(trace.outputs)
    file = _open_trials(path, target, rounds)
    costs, tried = _read(file)
    if costs is None:
        costs = measure_costs(target, rounds[0][0].prompt)
        file.append(asdict(costs))
    parts = [f"part {part}" for part in range(2 * target.shape.layers)]
    skipped_or_not: dict[str, Any] = dict.fromkeys(parts, optuna.distributions.CategoricalDistribution((False, True)))

    def parameters(skips: Skips) -> dict[str, Any]:
        return {name: part in skips for part, name in enumerate(parts)}

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The seed changes with the number of trials, so that a search that goes on does not draw the same sets again.
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=len(tried) + 1))
    for trial in tried:
        params = parameters(trial.skips)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=skipped_or_not, value=trial.speed_up))
    earlier_skips = {trial.skips for trial in tried}
    regular = [skips for skips in uniform_skips(target.shape.layers) if skips not in earlier_skips]
    yield len(tried)
    for number in range(len(tried), trials):
        uniform = bool(regular)
        if uniform:
            study.enqueue_trial(parameters(regular.pop(0)))
        asked = study.ask(skipped_or_not)
        skips = tuple(part for part, name in enumerate(parts) if asked.params[name])
        # Regular patterns are judged on all prompts: the search starts from them.
        bar = 0.0 if uniform else max((trial.speed_up for trial in tried), default=0.0)
        trial = judge(target, rounds, costs, skips, uniform, bar)
        tried.append(trial)
        study.tell(asked, trial.speed_up)
        file.append(asdict(trial))
        yield number + 1


def _rounds(outputs: Sequence[Output]) -> list[Sequence[Output]]:
    """Return rounds of PROMPTS outputs, each with outputs from all over the trace."""
    count = max(1, min(ROUNDS, len(outputs) // PROMPTS))
    most = min(len(outputs), count * PROMPTS)
    chosen = [outputs[number * len(outputs) // most] for number in range(most)]
    return [chosen[first::count] for first in range(count)]


def _open_trials(path: Path, target: Model, rounds: Sequence[Sequence[Output]]) -> Records:
    """Begin the record of a search, or go on with one of the same target and prompts."""
    outputs = [output for of_round in rounds for output in of_round]
    about = {
        "target": target.name,
        "target_digest": target.digest,
        "outputs": [output.key for output in outputs],
        "outputs_digest": text_digest([output.digest for output in outputs]),
        "new_tokens": NEW_TOKENS,
    }
    return Records.open(path, KIND, about)


def read_trials(path: Path) -> list[Trial]:
    """Read the trials of a search, the best first."""
    _, trials = _read(Records.read(path, KIND))
    if not trials:
        raise RecordError(f"{path}: nothing was tried yet; run skip-search on")
    return sorted(trials, key=lambda trial: -trial.speed_up)


def _read(file: Records) -> tuple[Costs | None, list[Trial]]:
    """Read the costs, which are the first line, and the trials; None if the file has no line yet."""
    lines = file.placed()
    first = next(lines, None)
    if first is None:
        return None, []
    where, record = first
    costs = from_record(Costs, record, where, RecordError)
    if lacking := {str(lookahead) for lookahead in TIMED} - costs.rest_s.keys():
        raise RecordError(f"{where}: rest_s has no times of lookahead {min(lacking)}; search again into another file")
    return costs, [from_record(Trial, record, where, RecordError) for where, record in lines]
