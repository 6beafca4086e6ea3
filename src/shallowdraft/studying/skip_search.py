"""Which of its parts a target can leave out when it drafts for itself: Bayesian optimisation of predicted tokens/s.

Part 2 i is the attention of layer i, part 2 i + 1 its FFN. Acceptance comes from decoding a trace's prompts with the
parts left out; seconds come from a few timings, because a step costs what is kept of it. Of many that are judged on a
few prompts the luckiest looks best, so whatever looks better than the best so far must go on with more prompts.
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
TIMED = (1, 2, 4, 8)  # lookaheads
WARM_UP, COUNT, TURNS = 2, 6, 3  # iterations and turns of a timing
PROMPTS, ROUNDS, NEW_TOKENS = 8, 6, 48  # of a round, of the whole judgement

Skips = tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft step, by what it keeps, and of all else in an iteration."""

    plain_s: PositiveSeconds
    start_s: Seconds
    attention_s: Seconds
    """Of one layer."""
    ffn_s: Seconds
    layers: int
    rest_s: dict[str, PositiveSeconds]
    """By lookahead: verification and what lies between."""

    def step_s(self, skips: Skips) -> float:
        attention = self.layers - sum(part % 2 == 0 for part in skips)
        ffn = self.layers - sum(part % 2 for part in skips)
        return self.start_s + attention * self.attention_s + ffn * self.ffn_s

    def iteration_s(self, skips: Skips, lookahead: int) -> float:
        return lookahead * self.step_s(skips) + self._rest(lookahead)

    def _rest(self, lookahead: int) -> float:
        """Measured, or between two that were."""
        below = max(d for d in TIMED if d <= lookahead)
        above = min(d for d in TIMED if d >= lookahead)
        share = (lookahead - below) / max(1, above - below)
        return self.rest_s[str(below)] * (1 - share) + self.rest_s[str(above)] * share


@dataclass(frozen=True)
class Trial:
    """What was tried, and what it is worth at its best lookahead."""

    skips: Skips
    uniform: bool
    """Whether it is a regular pattern, tried first."""
    lookahead: int
    tar: float
    speed_up: float
    """Predicted, over plain decoding."""
    prompts: int = PROMPTS
    """On which it was judged; more than the first few if it looked better than what was best before."""


def uniform_skips(layers: int) -> list[Skips]:
    """Early exits, and every second, third, fourth layer: all of it, or its attention."""
    exits = [range(2 * max(1, round(layers * share)), 2 * layers) for share in (0.25, 0.5, 0.75, 0.9)]
    found = [tuple(skipped) for skipped in exits]
    for step in (2, 3, 4, 6):
        chosen = range(1, layers - 1, step)
        found += [tuple(2 * layer for layer in chosen), tuple(part for i in chosen for part in (2 * i, 2 * i + 1))]
    return [skips for skips in dict.fromkeys(found) if skips]


def measure_costs(target: Model, prompt: Sequence[int]) -> Costs:
    """Time drafting with some parts and others, and all else of an iteration at some lookaheads."""
    from scipy.optimize import nnls  # what was searched can be read without it

    layers = target.shape.layers
    both = range(2 * layers)
    patterns = (both[:0], both[::2], both[1::2], both, both[layers // 2 :], both[layers:])
    candidates: list[Options] = [{"drafter": "skip", "skips": tuple(one), "lookahead": TIMED[-1]} for one in patterns]
    candidates += [{"drafter": "skip", "skips": (), "lookahead": lookahead} for lookahead in TIMED[:-1]]
    turns = time_beside_plain(target, [list(prompt)], candidates, warm_up=WARM_UP, count=COUNT, turns=TURNS)
    best = [
        min((turn[candidate][1] for turn in turns), key=lambda times: times.total_s)
        for candidate in range(len(candidates))
    ]
    steps = [times.draft_s / COUNT / TIMED[-1] for times in best[: len(patterns)]]
    kept = [
        [1, layers - sum(part % 2 == 0 for part in one), layers - sum(part % 2 for part in one)] for one in patterns
    ]
    (start_s, attention_s, ffn_s), _ = nnls(np.array(kept, dtype=float), np.array(steps))
    rests = [(times.total_s - times.draft_s) / COUNT for times in (*best[len(patterns) :], best[0])]
    return Costs(
        plain_s=min(beside.total_s for turn in turns for beside, *_ in turn) / COUNT,
        start_s=float(start_s),
        attention_s=float(attention_s),
        ffn_s=float(ffn_s),
        layers=layers,
        rest_s={str(lookahead): rest for lookahead, rest in zip(TIMED, rests, strict=True)},
    )


def judge(
    target: Model, rounds: Sequence[Sequence[Output]], costs: Costs, skips: Skips, uniform: bool, bar: float
) -> Trial:
    """Decode the prompts of a trace, round after round while it is predicted to be faster than the bar."""
    accepted: list[int] = []
    prompts = 0
    for outputs in rounds:
        outs = generate(
            target,
            [output.prompt for output in outputs],
            drafter="skip",
            skips=skips,
            lookahead=LONGEST,
            max_new_tokens=NEW_TOKENS,
            stop_tokens=(),
        )
        accepted += [count for out in outs for count in out.accepted_by_iteration]
        prompts += len(outputs)
        found = _fastest(accepted, costs, Trial(skips, uniform, 1, 1.0, 0.0, prompts))
        if found.speed_up <= bar:
            break
    return found


def _fastest(accepted: Sequence[int], costs: Costs, trial: Trial) -> Trial:
    """Predict from acceptance by position which lookahead is fastest, and how fast."""
    tar, chance, best = 1.0, 1.0, trial
    for lookahead in range(1, LONGEST + 1):
        reached = sum(count >= lookahead - 1 for count in accepted)
        chance *= sum(count >= lookahead for count in accepted) / max(1, reached)
        tar += chance
        speed_up = tar * costs.plain_s / costs.iteration_s(trial.skips, lookahead)
        if speed_up > best.speed_up:
            best = replace(trial, lookahead=lookahead, tar=tar, speed_up=speed_up)
    return best


def search(target: Model, trace: Trace, path: Path, trials: int) -> Iterator[int]:
    """Try so many sets of parts, or what is left of them; how many are done. Each is in the file before the next."""
    try:
        import optuna
    except ImportError:
        raise OptionError("the search needs optuna; install it: pip install 'shallowdraft[train]'") from None
    trace.require_target(target.name, target.digest)
    if not trace.sampling.greedy:
        raise OptionError("the trace was sampled; the search needs a greedy one (record without --temperature)")
    rounds = _rounds(trace.outputs)
    chosen = [output for outputs in rounds for output in outputs]
    about = {
        "target": target.name,
        "target_digest": target.digest,
        "outputs": [output.key for output in chosen],
        "outputs_digest": text_digest([output.digest for output in chosen]),
        "new_tokens": NEW_TOKENS,
    }
    records = Records.open(path, KIND, about)
    known, tried = _read(records)
    costs = known or measure_costs(target, rounds[0][0].prompt)
    if not known:
        records.append(asdict(costs))
    parts = [f"part {part}" for part in range(2 * target.shape.layers)]
    either: dict[str, Any] = dict.fromkeys(parts, optuna.distributions.CategoricalDistribution((False, True)))

    def named(skips: Skips) -> dict[str, Any]:
        return {name: part in skips for part, name in enumerate(parts)}

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=len(tried) + 1))
    for one in tried:
        study.add_trial(optuna.trial.create_trial(params=named(one.skips), distributions=either, value=one.speed_up))
    first = [skips for skips in uniform_skips(target.shape.layers) if skips not in {one.skips for one in tried}]
    yield len(tried)
    for number in range(len(tried), trials):
        uniform = bool(first)
        if uniform:
            study.enqueue_trial(named(first.pop(0)))
        asked = study.ask(either)
        skips = tuple(part for part, name in enumerate(parts) if asked.params[name])
        bar = 0.0 if uniform else max((one.speed_up for one in tried), default=0.0)
        found = judge(target, rounds, costs, skips, uniform, bar)
        tried.append(found)
        study.tell(asked, found.speed_up)
        records.append(asdict(found))
        yield number + 1


def _rounds(outputs: Sequence[Output]) -> list[Sequence[Output]]:
    """So many outputs a round, each from all over the trace."""
    count = max(1, min(ROUNDS, len(outputs) // PROMPTS))
    most = min(len(outputs), count * PROMPTS)
    chosen = [outputs[number * len(outputs) // most] for number in range(most)]
    return [chosen[first::count] for first in range(count)]


def read_trials(path: Path) -> list[Trial]:
    """What a search has tried, the best first."""
    _, found = _read(Records.read(path, KIND))
    if not found:
        raise RecordError(f"{path}: nothing was tried yet; run skip-search on")
    return sorted(found, key=lambda trial: -trial.speed_up)


def _read(file: Records) -> tuple[Costs | None, list[Trial]]:
    """What was measured first, if it was, and what was tried."""
    lines = file.placed()
    first = next(lines, None)
    if first is None:
        return None, []
    where, record = first
    costs = from_record(Costs, record, where, RecordError)
    if lacking := {str(lookahead) for lookahead in TIMED} - costs.rest_s.keys():
        raise RecordError(f"{where}: rest_s has no times of lookahead {min(lacking)}; search anew")
    return costs, [from_record(Trial, record, where, RecordError) for where, record in lines]
