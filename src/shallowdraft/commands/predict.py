"""shallowdraft predict: whether a draft pays, and at which lookahead."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import DraftCommand, Drafts, Json, Name, OptionalLookahead, OptionalTrace, Rate
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.results import Predictions


@dataclass(frozen=True, kw_only=True)
class PredictCommand(DraftCommand):
    """Throughput, best lookahead and a verdict, from what `replay` and `profile` know, or from numbers you type in.

    shallowdraft predict --trace trace.jsonl --profile profile.jsonl
    shallowdraft predict --tar 3.1 --lookahead 5 --draft-ms 1.2 --verify-ms 7.4 --plain-ms 6.9
    """

    trace: OptionalTrace = None
    profile: Name = None
    """Profile of this machine, a file that `profile` wrote."""
    drafts: Drafts = ()
    tar: Rate = None
    """Tokens an iteration (mean acceptance length), of any engine."""
    acceptance_rate: Rate = None
    """Instead of --tar: the probability that a draft token is accepted, as if tokens were independent."""
    lookahead: OptionalLookahead = None
    draft_ms: Rate = None
    """Milliseconds of the draft's steps in an iteration, all together."""
    verify_ms: Rate = None
    """Milliseconds of the target's verification in an iteration."""
    plain_ms: Rate = None
    """Milliseconds a token without a draft. Default: as long as verification."""
    other_ms: float = 0.0
    """Milliseconds of an iteration beside drafting and verification."""
    json_output: Json = False
    """Print {"predictions": [{"draft", "lookahead", "tar", "tokens_per_s", "speed_up", "verdict", …}, …]}."""

    def run(self) -> int:
        typed = [self.tar or self.acceptance_rate, self.lookahead, self.draft_ms, self.verify_ms]
        if (self.trace is None) != (self.profile is None):
            raise OptionError("a prediction needs both --trace and --profile")
        if self.trace is None and None in typed:
            raise OptionError(
                "give --trace and --profile, or numbers: "
                "--tar (or --acceptance-rate), --lookahead, --draft-ms and --verify-ms"
            )
        result = self._from_numbers() if self.trace is None else self._from_files()
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result)
        return 0

    def _from_numbers(self) -> "Predictions":
        from shallowdraft.api.inputs import require_lookahead
        from shallowdraft.cost import Iteration, Prediction, independent_tar
        from shallowdraft.results import DraftPrediction, Predictions

        assert self.lookahead is not None
        assert self.draft_ms is not None
        assert self.verify_ms is not None
        require_lookahead(self.lookahead)
        if self.acceptance_rate is not None and not 0 <= self.acceptance_rate <= 1:
            raise OptionError(f"--acceptance-rate is {self.acceptance_rate}; it must be 0 to 1")
        tar = independent_tar(self.acceptance_rate or 0.0, self.lookahead) if self.tar is None else self.tar
        if not 1 <= tar <= self.lookahead + 1:
            raise OptionError(
                f"--tar is {tar}; at lookahead {self.lookahead} it lies between 1 and {self.lookahead + 1}"
            )
        times = Iteration(self.draft_ms / 1e3, self.verify_ms / 1e3, self.other_ms / 1e3)
        plain_ms = self.verify_ms if self.plain_ms is None else self.plain_ms
        prediction = Prediction(self.lookahead, tar, times, Iteration(0.0, plain_ms / 1e3).total_s)
        return Predictions((DraftPrediction("", prediction),))

    def _from_files(self) -> "Predictions":
        from shallowdraft.api.measuring import predict
        from shallowdraft.display.progress import notes

        assert self.trace is not None
        assert self.profile is not None
        self.set_threads()
        result = predict(self.trace, **self.arguments(predict) | {"drafts": self.drafts or None})
        notes(result.notes)
        return result


def show(result: "Predictions") -> None:
    """Print the table and the verdict on the fastest."""
    from shallowdraft.display.tables import new_table, table_console

    columns = ("draft", "lookahead", "TAR", "draft ms", "verify ms", "other ms", "tokens/s", "plain", "speed-up")
    named = bool(result.drafts[0].draft)
    table = new_table(*(columns if named else columns[1:]))
    for draft in result.drafts:
        prediction, times = draft.prediction, draft.prediction.iteration
        parts = [f"{seconds * 1e3:.2f}" for seconds in (times.draft_s, times.verify_s, times.other_s)]
        between = f" ({draft.interval[0]:.2f}–{draft.interval[1]:.2f})" if draft.interval else ""
        speed_up = f"{prediction.speed_up:.2f}x{between}"
        speeds = [f"{prediction.tokens_per_s:.1f}", f"{1 / prediction.plain_s:.1f}", speed_up]
        name = [draft.draft] if named else []
        table.add_row(*name, str(prediction.lookahead), f"{prediction.tar:.2f}", *parts, *speeds)
    console = table_console()
    console.print(table)
    for draft in result.drafts:
        if draft.prediction.silence:
            console.print(f"{draft.draft} is {draft.prediction.silence}", soft_wrap=True)
    console.print(result.caption, soft_wrap=True)
    fall = result.drafts[0].prediction.waterfall
    text = f"of TAR {fall.ideal:.2f}, {fall.losses_text}: {fall.actual:.2f}x is left"
    console.print(text, style="dim", soft_wrap=True)
