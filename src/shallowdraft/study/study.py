"""A study: every draft's acceptance, times and predicted speed, the best few verified live, one ranked table.

All raw records lie in the run's folder as JSON lines; a study that was stopped goes on, one with another draft reuses
the rest. A draft that cannot be used is named and left out.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shallowdraft import cost
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.errors import OptionError, ShallowdraftError
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.profiling.latency import Profile, about, measure, points, read_profile
from shallowdraft.prompts import Prompt
from shallowdraft.replay.acceptance import Replay, replay
from shallowdraft.replay.traces import Output, Trace, read_trace, record
from shallowdraft.study.forecast import forecast, forecast_at, interval
from shallowdraft.study.live import Measured, Way, measured, run_live

Follow = Callable[[str, Iterator[int], int], None]
"""Given what is being done, an iterator of how much is done that must be taken to its end, and how much there is."""

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
    """How many drafts are verified live, each at its predicted best lookahead."""
    live_prompts: int = 40
    contexts: tuple[int, ...] = (64, 256)


@dataclass(frozen=True)
class Row:
    """A draft in the table."""

    draft: str
    shape: str
    prediction: cost.Prediction
    """With `live`: for the prompts and the speed of plain decoding that it met."""
    interval: tuple[float, float]
    """Of the predicted speed-up: the bootstrap of TAR over prompts."""
    live: Measured | None = None

    @property
    def speed_up(self) -> float:
        return self.live.speed_up if self.live else self.prediction.speed_up


@dataclass(frozen=True)
class Study:
    """The answer."""

    rows: list[Row]
    """Fastest first: those verified live by what was measured, then the others by what was predicted."""
    plain_tokens_per_s: float
    failed: dict[str, str] = field(default_factory=dict)
    """Drafts that could not be used, and why."""

    @property
    def verdict(self) -> str:
        best = self.rows[0]
        if not best.live:
            return f"{best.draft} {best.prediction.verdict}"
        low, high = best.live.interval
        what = f"{best.draft} at lookahead {best.prediction.lookahead}"
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
                    "draft": row.draft,
                    "shape": row.shape,
                    "lookahead": row.prediction.lookahead,
                    "tar": row.prediction.tar,
                    "predicted_speed_up": row.prediction.speed_up,
                    "predicted_interval": row.interval,
                    "break_even_tar": row.prediction.break_even_tar,
                    "iteration": asdict(row.prediction.iteration),
                    "waterfall": asdict(row.prediction.waterfall),
                    "live": None if row.live is None else row.live.to_json(),
                }
                for row in self.rows
            ],
            "failed": self.failed,
        }


def study(
    target: Model, load: Callable[[str], Model], names: Sequence[str], plan: Plan, folder: Path, follow: Follow
) -> Study:
    """Do it, or what is left of it."""
    trace = _recorded(target, plan, folder / "trace.jsonl", follow)
    drafts, failed = _load_all(target, load, names)
    replays = _replayed(drafts, trace, failed, follow)
    profile = _profiled(target, {name: drafts[name] for name in replays}, plan, folder / "profile.jsonl", follow)
    made = {name: cost.best(forecast(found, profile, plan.lookaheads)) for name, found in replays.items()}
    order = sorted(made, key=lambda name: -made[name].tokens_per_s)
    ways = [Way(name, made[name].lookahead) for name in order]
    live = _verified(target, drafts, ways[: plan.live], trace, plan, folder / "live.jsonl", follow)
    rows = [_row(replays[way.draft], profile, made[way.draft], drafts[way.draft], live.get(way)) for way in ways]
    rows.sort(key=lambda row: (row.live is None, -row.speed_up))
    met = [row.live.plain_tokens_per_s for row in rows if row.live]
    result = Study(rows, median(met) if met else 1 / profile.plain_s(trace.mean_context), failed)
    _write(folder / "study.json", result.to_json())
    return result


def _recorded(target: Model, plan: Plan, path: Path, follow: Follow) -> Trace:
    steps = record(target, plan.prompts, path, max_new_tokens=plan.max_new_tokens, sampling=Sampling())
    follow("recording the target", steps, len(plan.prompts))
    trace, wanted = read_trace(path), {(name, prompt.id) for name, prompt in plan.prompts}
    chosen = [output for output in trace.outputs if output.key[:2] in wanted]
    return Trace(trace.target, trace.vocabulary, trace.sampling, chosen)


def _load_all(
    target: Model, load: Callable[[str], Model], names: Sequence[str]
) -> tuple[dict[str, Model], dict[str, str]]:
    drafts: dict[str, Model] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            draft = load(name)
            check_vocabulary(target, draft).require()
        except (ShallowdraftError, OSError) as error:
            failed[name] = str(error)
        else:
            drafts[name] = draft
    if not drafts:
        raise OptionError("no draft can be used: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    return drafts, failed


def _replayed(drafts: Mapping[str, Model], trace: Trace, failed: dict[str, str], follow: Follow) -> dict[str, Replay]:
    found: dict[str, Replay] = {}

    def passes() -> Iterator[int]:
        for count, (name, draft) in enumerate(drafts.items(), 1):
            try:
                found[name] = replay(draft, trace, fits=True)
            except ShallowdraftError as error:
                failed[name] = str(error)
            yield count

    follow("replaying drafts", passes(), len(drafts))
    return found


def _profiled(target: Model, drafts: Mapping[str, Model], plan: Plan, path: Path, follow: Follow) -> Profile:
    longest = max(plan.lookaheads)
    room = min(model.shape.context for model in (target, *drafts.values()))
    contexts = [context for context in plan.contexts if context < room - 64 * (longest + 1)] or [max(1, room // 8)]
    wanted = points(list(drafts), timed_at(plan.lookaheads), contexts, [1])
    follow("timing iterations", measure(target, drafts, wanted, path, plan.rounds), plan.rounds * len(wanted))
    return read_profile(path)


def timed_at(lookaheads: Sequence[int]) -> list[int]:
    """Lookaheads to time so that all of these lie between them."""
    longest = max(lookaheads)
    return [d for d in ALWAYS_MEASURED if d < longest] + [longest]


def _row(found: Replay, profile: Profile, prediction: cost.Prediction, draft: Model, live: Measured | None) -> Row:
    """What was verified live is predicted again for the speed of plain decoding that it met."""
    if live:
        prediction = forecast_at(found, profile, prediction.lookahead, live.states)
    return Row(found.draft, str(draft.shape), prediction, interval(found, prediction), live)


def _verified(
    target: Model,
    drafts: Mapping[str, Model],
    ways: Sequence[Way],
    trace: Trace,
    plan: Plan,
    path: Path,
    follow: Follow,
) -> dict[Way, Measured]:
    if not plan.live:
        return {}
    outputs = spread([output for output in trace.outputs if len(output.output) > 1], plan.live_prompts)
    setting = about(target) | {"max_new_tokens": plan.max_new_tokens}
    steps = run_live(target, drafts, ways, outputs, path, max_new_tokens=plan.max_new_tokens, rounds=1, about=setting)
    follow("running the best live", steps, len(outputs) * len(ways))
    return measured(path)


def spread(outputs: Sequence[Output], count: int) -> list[Output]:
    """So many of them, evenly over all sets."""
    step = max(1.0, len(outputs) / count)
    return [outputs[int(index * step)] for index in range(min(count, len(outputs)))]


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
