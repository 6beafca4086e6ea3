"""shallowdraft predict: whether a draft pays, and at which lookahead."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import DraftCommand, Name, Number, Rate
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.cost import Prediction


@dataclass(frozen=True, kw_only=True)
class PredictCommand(DraftCommand):
    """Throughput, best lookahead and a verdict, from what `replay` and `profile` know, or from numbers you type in.

    shallowdraft predict --trace trace.jsonl --profile profile.jsonl
    shallowdraft predict --tar 3.1 --lookahead 5 --draft-ms 1.2 --target-ms 7.4 --plain-ms 6.9
    """

    trace: Name = None
    """What `record` wrote."""
    profile: Name = None
    """What `profile` wrote, on this machine."""
    draft: tuple[str, ...] = ()
    """Drafts to predict for. Default: all that the profile has."""
    tar: Rate = None
    """Tokens an iteration (mean acceptance length), of any engine."""
    acceptance_rate: Rate = None
    """Instead of --tar: the probability that a draft token is accepted, as if tokens were independent."""
    lookahead: Number = None
    """Draft tokens an iteration."""
    draft_ms: Rate = None
    """Milliseconds of the draft's steps in an iteration, all together."""
    target_ms: Rate = None
    """Milliseconds of the target's verification of an iteration."""
    plain_ms: Rate = None
    """Milliseconds a token without a draft. Default: as long as verification."""
    rest_ms: float = 0.0
    """Milliseconds of an iteration beside these."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"predictions": [{"draft", "lookahead", "tar", "tokens_per_s", "speed_up", "verdict", …}, …]}."""

    def run(self) -> int:
        typed = [self.tar or self.acceptance_rate, self.lookahead, self.draft_ms, self.target_ms]
        if (self.trace is None) != (self.profile is None):
            raise OptionError("a prediction needs both --trace and --profile")
        if self.trace is None and None in typed:
            raise OptionError(
                "give --trace and --profile, or numbers: "
                "--tar (or --acceptance-rate), --lookahead, --draft-ms and --target-ms"
            )
        found = [Forecast("", self._typed())] if self.trace is None else self._measured()
        if self.json_output:
            print(json.dumps({"predictions": [as_json(one) for one in found]}))
        else:
            show(found)
        return 0

    def _typed(self) -> "Prediction":
        from shallowdraft.cost import Iteration, Prediction, independent_tar

        assert self.lookahead is not None
        assert self.draft_ms is not None
        assert self.target_ms is not None
        if not 1 <= self.lookahead <= 32:
            raise OptionError(f"--lookahead is {self.lookahead}; it must be 1 to 32")
        if self.acceptance_rate is not None and not 0 <= self.acceptance_rate <= 1:
            raise OptionError(f"--acceptance-rate is {self.acceptance_rate}; it must be 0 to 1")
        tar = independent_tar(self.acceptance_rate or 0.0, self.lookahead) if self.tar is None else self.tar
        if not 1 <= tar <= self.lookahead + 1:
            raise OptionError(
                f"--tar is {tar}; at lookahead {self.lookahead} it lies between 1 and {self.lookahead + 1}"
            )
        times = Iteration(self.draft_ms / 1e3, self.target_ms / 1e3, self.rest_ms / 1e3)
        plain_ms = self.target_ms if self.plain_ms is None else self.plain_ms
        return Prediction(self.lookahead, tar, times, Iteration(0.0, plain_ms / 1e3).total_s)

    def _measured(self) -> "list[Forecast]":
        from shallowdraft import cost
        from shallowdraft.display.progress import notes
        from shallowdraft.profiling.measure import require_machine
        from shallowdraft.replaying.model import replay_model
        from shallowdraft.runs.profile import read_profile
        from shallowdraft.runs.trace import read_trace
        from shallowdraft.studying.forecast import forecast, interval

        assert self.trace is not None
        assert self.profile is not None
        self.set_threads()
        trace, profile = read_trace(Path(self.trace)), read_profile(Path(self.profile))
        profile.require_target(f"{trace.target}, whose trace this is,", trace.target_digest)
        notes(profile.notes)
        names = self.draft or profile.drafts
        if not names:
            raise OptionError(f"{self.profile} has the times of no draft model; name one with profile --draft")
        found = []
        for name in names:
            draft = self.load_draft(name)
            require_machine(profile, draft.device)
            replayed = replay_model(draft, trace)
            best = cost.best(forecast(replayed, profile))
            found.append(Forecast(name, best, interval(replayed, best)))
        return sorted(found, key=lambda one: -one.prediction.tokens_per_s)


@dataclass(frozen=True)
class Forecast:
    """A draft at its best lookahead."""

    draft: str
    prediction: "Prediction"
    interval: tuple[float, float] | None = None
    """95 % of the speed-up over prompts; unknown for numbers typed in."""


def as_json(found: Forecast) -> dict[str, Any]:
    from shallowdraft.runs.study import prediction_to_json

    return {"draft": found.draft, **prediction_to_json(found.prediction), "speed_up_interval": found.interval}


def show(found: list[Forecast]) -> None:
    from shallowdraft.display.tables import new_table, table_console

    columns = ("draft", "lookahead", "TAR", "draft ms", "verify ms", "rest ms", "tokens/s", "plain", "speed-up")
    table = new_table(*(columns if found[0].draft else columns[1:]))
    for row in found:
        one, times = row.prediction, row.prediction.iteration
        parts = [f"{seconds * 1e3:.2f}" for seconds in (times.draft_s, times.verify_s, times.other_s)]
        between = f" ({row.interval[0]:.2f}–{row.interval[1]:.2f})" if row.interval else ""
        speeds = [f"{one.tokens_per_s:.1f}", f"{1 / one.plain_s:.1f}", f"{one.speed_up:.2f}x{between}"]
        table.add_row(*([row.draft] if row.draft else []), str(one.lookahead), f"{one.tar:.2f}", *parts, *speeds)
    console = table_console()
    console.print(table)
    for row in found:
        if row.prediction.silence:
            console.print(f"{row.draft} is {row.prediction.silence}", soft_wrap=True)
    best = found[0].prediction
    fall = best.waterfall
    console.print(f"{found[0].draft} {best.verdict}".strip(), soft_wrap=True)
    console.print(
        f"of TAR {fall.ideal:.2f}, {fall.losses_text}: {fall.actual:.2f}x is left",
        style="dim",
        soft_wrap=True,
    )
