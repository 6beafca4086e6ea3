"""Does it pay: speed-ups, predicted and measured."""

from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

import altair as alt

from shallowdraft.reporting.figures import (
    COLOURS,
    INK,
    NEAR,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    Values,
    chosen,
    data,
    marked,
    percent,
    rows_high,
)
from shallowdraft.reporting.run import Entry, RunView

PREDICTED, MEASURED = "predicted", "measured"
NO_LIVE = "No speed-up was measured; run the study again with --live 3."


def speed_ups(run: RunView) -> Figure | Gap:
    """Every proposer at its best, with intervals."""
    if not run.predicted:
        return Gap("speed-ups", UNFINISHED)
    rows = list(chain.from_iterable(_bars(one) for one in run.predicted))
    order = [one.label for one in run.predicted]
    chart = speed_up_chart(rows, order, (PREDICTED, MEASURED), "how known")
    columns = (
        "proposer", "size", "predicted speed-up", "from", "to", "measured speed-up", "from", "to", "tokens/s",
    )  # fmt: skip
    table = Table(columns, [_row(one, run) for one in run.predicted])
    note = (
        "Bars are 95 % intervals over prompts. The dashed line is plain decoding; what lies left of it does not pay. "
        "Only the best few are run live; what is predicted of them is for the machine as it was then."
    )
    return Figure("speed-up", _fastest(run), chart, table, note, rows_high(len(order)))


def speed_up_chart(rows: Values, order: Sequence[str], kinds: Sequence[str], what: str) -> alt.TopLevelMixin:
    """Labels down, each with its kinds; a tooltip says what a kind is."""
    base = alt.Chart(data(rows)).encode(
        y=alt.Y("label:N", sort=list(order), title=None),
        yOffset=alt.YOffset("kind:N", sort=list(kinds)),
        color=chosen(kinds),
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=alt.X("speed_up:Q", title="speed-up over plain decoding", scale=NEAR),
        shape=marked(kinds),
        tooltip=[
            alt.Tooltip("name:N", title="proposer"),
            alt.Tooltip("kind:N", title=what),
            alt.Tooltip("where:N", title="size"),
            alt.Tooltip("speed_up:Q", title="speed-up", format=".3f"),
            alt.Tooltip("low:Q", title="95 % from", format=".3f"),
            alt.Tooltip("high:Q", title="95 % to", format=".3f"),
        ],
    )
    intervals = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=NEAR), x2="high:Q")
    even = alt.Chart(data([{"even": 1}])).mark_rule(strokeDash=[4, 4], color=INK).encode(x="even:Q")
    return alt.layer(even, intervals, points)


def _bars(one: Entry) -> list[dict[str, object]]:
    about = {"label": one.label, "name": one.name, "where": one.best.where}
    low, high = one.interval
    found = [about | {"kind": PREDICTED, "speed_up": one.best.speed_up, "low": low, "high": high}]
    if one.live:
        low, high = one.live.interval
        found.append(about | {"kind": MEASURED, "speed_up": one.live.speed_up, "low": low, "high": high})
    return found


def _row(one: Entry, run: RunView) -> tuple[str | float | None, ...]:
    live = (one.live.speed_up, *one.live.interval) if one.live else (None, None, None)
    return (one.name, one.best.where, one.best.speed_up, *one.interval, *live, run.tokens_per_s(one))


def _fastest(run: RunView) -> str:
    first = run.predicted[0]
    low, high = first.bounds
    said = f"{first.label} {first.best.where} is fastest: {first.speed_up:.2f} times plain decoding, {first.how} "
    losing = sum(one.speed_up < 1 for one in run.predicted)
    verb = "is" if losing == 1 else "are"
    rest = f"; {losing} of {len(run.predicted)} {verb} slower than plain decoding" if losing else ""
    ahead = max(run.predicted, key=lambda one: one.speed_up)
    if ahead.speed_up > first.speed_up:
        why = "disturbed when it was measured" if ahead.disturbed else "not run live"
        rest += f"; {ahead.label}, {why}, may be faster: {ahead.speed_up:.2f} times, predicted"
    return f"{said}(95 %: {low:.2f} to {high:.2f}){rest}."


def predicted_against_measured(run: RunView) -> Figure | Gap:
    """The paper's Figure 12."""
    if not run.measured:
        return Gap("predicted against measured", NO_LIVE if run.verdict else UNFINISHED)
    rows = [_both(one) for one in run.measured]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    ends = [
        min(min(row["low"], row["live_low"]) for row in rows),
        max(max(row["high"], row["live_high"]) for row in rows),
    ]
    base = alt.Chart(data(rows))
    x = alt.X("measured:Q", title="measured speed-up", scale=NEAR)
    y = alt.Y("predicted:Q", title="predicted speed-up", scale=NEAR)
    points = base.mark_point(filled=True, size=80, opacity=1, color=COLOURS[0]).encode(
        x=x,
        y=y,
        tooltip=[
            alt.Tooltip("name:N", title="proposer"),
            alt.Tooltip("measured:Q", format=".3f"),
            alt.Tooltip("predicted:Q", format=".3f"),
        ],
    )
    across = base.mark_rule(color=COLOURS[0]).encode(x=alt.X("live_low:Q", scale=NEAR), x2="live_high:Q", y=y)
    up = base.mark_rule(color=COLOURS[0]).encode(x=x, y=alt.Y("low:Q", scale=NEAR), y2="high:Q")
    same = alt.Chart(data([{"both": end} for end in ends])).mark_line(strokeDash=[4, 4], color=INK)
    diagonal = same.encode(x=alt.X("both:Q", scale=NEAR), y=alt.Y("both:Q", scale=NEAR))
    many = f"in the median over {len(rows)} proposers, {percent(max(errors))} at most"
    finding = f"Predictions were {percent(median(errors))} off{'' if len(rows) == 1 else ' ' + many}."
    columns = ("proposer", "measured speed-up", "predicted speed-up", "error %")
    table = Table(
        columns,
        [(row["name"], row["measured"], row["predicted"], 100 * e) for row, e in zip(rows, errors, strict=True)],
    )
    note = "On the dashed line both are the same. Bars are 95 % intervals over prompts."
    return Figure("prediction", finding, alt.layer(diagonal, across, up, points), table, note)


def _both(one: Entry) -> dict[str, Any]:
    assert one.live
    (low, high), (live_low, live_high) = one.interval, one.live.interval
    known = {"name": one.name, "measured": one.live.speed_up, "predicted": one.best.speed_up}
    return known | {"low": low, "high": high, "live_low": live_low, "live_high": live_high}
