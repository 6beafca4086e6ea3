"""Ways to a faster draft: the TAR that a speed-up requires, and the TAR or draft time that matches the fastest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from shallowdraft import cost
from shallowdraft.cost import Iteration, Prediction
from shallowdraft.display.tabular import Cell
from shallowdraft.reporting.charts import (
    PROPOSER_TOOLTIP,
    REFERENCE_DASH,
    TAR_TITLE,
    TEXT_COLOUR,
    TIGHT_SCALE,
    WHERE_TOOLTIP,
    chart_of,
    height_of_rows,
    kind_colour,
    kind_shape,
    series_colour,
    series_dash,
    series_of,
    series_opacity,
    stacked_bars,
)
from shallowdraft.reporting.figures import UNFINISHED, Figure, Gap, Table
from shallowdraft.reporting.run import Entry, RunView

FURTHEST = 1.25  # times the best speed-up: the end of the lines of required TAR
HAS, EXTRA, BEYOND = "TAR", "extra TAR", "out of reach"
NOW, PARITY, NO_PARITY = "draft time now", "at parity", "no parity at 0 ms"
ALONE = "There is only one proposer, so none has to catch up; name more --drafts in the study."


def required_tar(run: RunView) -> Figure | Gap:
    """Chart the TAR that each speed-up requires, like the paper's Figure 11."""
    entries = run.predicted
    if not entries:
        return Gap("TAR that a speed-up requires", UNFINISHED)
    fastest, series = entries[0].best, series_of(entries)
    speed_ups = [entry.best.speed_up for entry in entries]
    ends = min(1.0, *speed_ups), FURTHEST * max(speed_ups)
    line_rows, point_rows = [], []
    for entry in reversed(entries):
        about = {"label": entry.label, "name": entry.name, "series": series[entry.label]}
        line_rows += [about | {"speed_up": speed_up, "tar": _tar_for(speed_up, entry.best)} for speed_up in ends]
        now = {"speed_up": entry.best.speed_up, "tar": _tar_for(entry.best.speed_up, entry.best)}
        point_rows.append(about | now | {"required": _tar_for(fastest.speed_up, entry.best)})
    x = alt.X("speed_up:Q", title="speed-up over plain decoding", scale=TIGHT_SCALE)
    y = alt.Y("tar:Q", title="required TAR", scale=TIGHT_SCALE)
    style = {"x": x, "y": y, "color": series_colour(series, lines=True), "opacity": series_opacity()}
    lines = chart_of(line_rows).mark_line().encode(strokeDash=series_dash(series), detail="label:N", **style)
    tooltip = [
        PROPOSER_TOOLTIP,
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
        alt.Tooltip("required:Q", title="TAR to match the fastest", format=".2f"),
    ]
    points = chart_of(point_rows).mark_point(filled=True, size=80).encode(tooltip=tooltip, **style)
    rule = chart_of([{"speed_up": fastest.speed_up}]).mark_rule(strokeDash=REFERENCE_DASH, color=TEXT_COLOUR)
    columns = ("proposer", "size", "TAR", "break-even TAR", "TAR to match the fastest")
    table = Table(columns, [_required_row(entry, fastest) for entry in entries])
    note = (
        "By the throughput model. A line is the TAR that a proposer requires at each speed-up, its point the TAR that "
        "it has. The dashed line is the speed-up of the fastest proposer."
    )
    finding = (
        f"{entries[0].label} breaks even at TAR {fastest.break_even_tar:.2f} and has {fastest.tar:.2f} {fastest.where}."
    )
    return Figure("required", finding, alt.layer(rule.encode(x=x), lines, points), table, note, 320)


def _tar_for(speed_up: float, prediction: Prediction) -> float:
    """Return the TAR at which a proposer with these times has a speed-up."""
    return cost.required_tar(speed_up / prediction.plain_s, prediction.iteration)


def _required_row(entry: Entry, fastest: Prediction) -> tuple[Cell, ...]:
    best = entry.best
    return entry.name, best.where, best.tar, best.break_even_tar, _tar_for(fastest.speed_up, best)


@dataclass(frozen=True)
class Lag:
    """The lag of a proposer behind the fastest one, both at the machine's speed during the former's runs."""

    entry: Entry
    extra_tar: float
    """The TAR that it lacks; below 0 it is the faster one by the throughput model."""
    parity_s: float
    """The draft time per iteration at which it would be as fast; below 0 no draft with its TAR could be."""

    @property
    def draft_s(self) -> float:
        return self.entry.best.iteration.draft_s

    @property
    def required_tar(self) -> float:
        return self.entry.best.tar + self.extra_tar

    @property
    def most_tar(self) -> float:
        return self.entry.best.most_tar

    @property
    def reduction_percent(self) -> float | None:
        """The part of the draft time that is too much; None if drafting takes no time."""
        return 100 * (1 - self.parity_s / self.draft_s) if self.draft_s else None

    @property
    def about(self) -> dict[str, str]:
        """The fields that every row of a chart has."""
        return {"label": self.entry.label, "name": self.entry.name, "where": self.entry.best.where}


def lags(entries: Sequence[Entry]) -> list[Lag]:
    """Return the lags of all proposers, beginning with the fastest, which has none."""
    fastest = entries[0].best
    result = [Lag(entries[0], 0.0, fastest.iteration.draft_s)]
    for entry in entries[1:]:
        # The fastest proposer's times, at the machine's speed when this one ran.
        scale = entry.best.plain_s / fastest.plain_s
        scaled = Iteration(*(scale * seconds for seconds in vars(fastest.iteration).values()))
        both = (entry.best.tar, entry.best.iteration, fastest.tar, scaled)
        result.append(Lag(entry, cost.extra_tar(*both), cost.parity_latency(*both)))
    return result


def extra_tar(run: RunView) -> Figure | Gap:
    """Chart the TAR that each proposer lacks to match the fastest, like the paper's Figure 7."""
    if len(run.predicted) < 2:
        return Gap("extra TAR", ALONE if run.predicted else UNFINISHED)
    all_lags = lags(run.predicted)
    rows = [row for lag in all_lags for row in _tar_bars(lag)]
    tooltip = [
        PROPOSER_TOOLTIP,
        WHERE_TOOLTIP,
        alt.Tooltip("kind:N", title="part"),
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
    ]
    chart = stacked_bars(
        rows, alt.X("tar:Q", title=TAR_TITLE, stack="zero"), _used_kinds(rows, (HAS, EXTRA, BEYOND)), tooltip
    )
    table = Table(
        ("proposer", "size", "TAR", "extra TAR", "required TAR", "highest possible TAR"),
        [
            (lag.entry.name, lag.entry.best.where, lag.entry.best.tar, lag.extra_tar, lag.required_tar, lag.most_tar)
            for lag in all_lags
        ],
    )
    note = (
        "Extra TAR is what a proposer lacks to be as fast as the fastest, by the throughput model. An iteration yields "
        "at most its lookahead and one token, and only one where the draft's context is full; more is out of reach."
    )
    return Figure("extra", _lacking_tar(all_lags), chart, table, note, height_of_rows(len(all_lags)))


def _tar_bars(lag: Lag) -> list[dict[str, Any]]:
    """Return the TAR that a proposer has, the TAR that it lacks, and what of that no proposal can bring."""
    has, required = lag.entry.best.tar, max(lag.entry.best.tar, lag.required_tar)
    lengths = {HAS: has, EXTRA: min(required, lag.most_tar) - has, BEYOND: required - lag.most_tar}
    return [
        lag.about | {"kind": kind, "order": order, "tar": length}
        for order, (kind, length) in enumerate(lengths.items())
        if length > 0
    ]


def _used_kinds(rows: Iterable[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    used = {row["kind"] for row in rows}
    return [kind for kind in kinds if kind in used]


def _lacking_tar(all_lags: Sequence[Lag]) -> str:
    """Return a sentence on the TAR that the second proposer lacks, and on those that cannot catch up."""
    fastest, second = all_lags[0].entry.label, all_lags[1]
    name = second.entry.label
    if second.extra_tar <= 0:
        sentence = f"By the throughput model {name} already has the TAR to be as fast as {fastest}"
    elif second.required_tar > second.most_tar:
        sentence = (
            f"To be as fast as {fastest}, {name} needs TAR {second.required_tar:.2f}, "
            f"and {second.most_tar:.3g} is the highest possible"
        )
    else:
        sentence = f"To be as fast as {fastest}, {name} needs {second.extra_tar:.2f} more tokens per iteration"
    return sentence + _hopeless([lag.required_tar > lag.most_tar for lag in all_lags[1:]], "whatever their TAR")


def _hopeless(cannot: Sequence[bool], condition: str) -> str:
    """Return how many other proposers cannot be as fast, unless only the first, which has a sentence already."""
    if not any(cannot[1:]):
        return "."
    return f"; {sum(cannot)} of {len(cannot)} others cannot be as fast, {condition}."


def parity(run: RunView) -> Figure | Gap:
    """Chart the draft time at which each proposer would match the fastest, like the paper's Table 5."""
    if len(run.predicted) < 2:
        return Gap("parity latency", ALONE if run.predicted else UNFINISHED)
    all_lags = lags(run.predicted)
    rows = [_draft_time_now(all_lags[0])]
    for lag in all_lags[1:]:
        rows += [_draft_time_now(lag), _draft_time_at_parity(lag)]
    base = chart_of(rows).encode(
        x=alt.X("ms:Q", title="draft time: ms per iteration"),
        y=alt.Y("label:N", sort=[lag.entry.label for lag in all_lags], title=None),
    )
    kinds = _used_kinds(rows, (NOW, PARITY, NO_PARITY))
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        color=kind_colour(kinds),
        shape=kind_shape(kinds),
        tooltip=[
            PROPOSER_TOOLTIP,
            WHERE_TOOLTIP,
            alt.Tooltip("kind:N", title="time"),
            alt.Tooltip("ms:Q", format=".3f"),
        ],
    )
    table = Table(
        ("proposer", "size", "draft ms", "parity draft ms", "reduction %"),
        [
            (lag.entry.name, lag.entry.best.where, 1e3 * lag.draft_s, 1e3 * lag.parity_s, lag.reduction_percent)
            for lag in all_lags
        ],
    )
    note = (
        "Parity latency is the draft time per iteration at which a proposer with the TAR that it has would be as fast "
        "as the fastest. If it is below 0 ms, no draft with that TAR can be as fast."
    )
    chart = alt.layer(base.mark_line(strokeWidth=1.5, color=TEXT_COLOUR).encode(detail="label:N"), points)
    return Figure("parity", _lacking_time(all_lags), chart, table, note, height_of_rows(len(all_lags)))


def _draft_time_now(lag: Lag) -> dict[str, Any]:
    return lag.about | {"kind": NOW, "ms": 1e3 * lag.draft_s}


def _draft_time_at_parity(lag: Lag) -> dict[str, Any]:
    return lag.about | {"kind": PARITY if lag.parity_s >= 0 else NO_PARITY, "ms": max(0.0, 1e3 * lag.parity_s)}


def _lacking_time(all_lags: Sequence[Lag]) -> str:
    """Return a sentence on the draft time that the second proposer may take, and on those that cannot catch up."""
    fastest, second = all_lags[0].entry.label, all_lags[1]
    name, times = second.entry.label, f"{1e3 * second.parity_s:.2f} ms instead of {1e3 * second.draft_s:.2f} ms"
    if second.parity_s < 0:
        sentence = f"No draft time makes {name} as fast as {fastest}"
    elif second.parity_s >= second.draft_s:
        sentence = f"{name} may draft for {times} per iteration and be as fast as {fastest}"
    else:
        sentence = f"To be as fast as {fastest}, {name} must draft for {times} per iteration"
    return sentence + _hopeless([lag.parity_s < 0 for lag in all_lags[1:]], "even if drafting took no time")
