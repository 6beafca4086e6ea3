"""Does speculation pay: speed-ups, predicted and measured."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import altair as alt

from shallowdraft.display.tabular import Cell
from shallowdraft.reporting.charts import (
    COLOURS,
    PROPOSER_TOOLTIP,
    REFERENCE_DASH,
    TEXT_COLOUR,
    TIGHT_SCALE,
    WHERE_TOOLTIP,
    Rows,
    chart_of,
    height_of_rows,
    kind_colour,
    kind_shape,
)
from shallowdraft.reporting.figures import BOUNDS, PROMPT_INTERVALS, UNFINISHED, Figure, Gap, Table, interval, percent
from shallowdraft.reporting.run import Entry, RunView

PREDICTED, MEASURED = "predicted", "measured"
NOTHING_LIVE = "No speed-up was measured; run the study again with --live 3."


def speed_ups(run: RunView) -> Figure | Gap:
    """Chart the speed-up of every proposer at its best size, with intervals."""
    if not run.predicted:
        return Gap("speed-ups", UNFINISHED)
    rows = [row for entry in run.predicted for row in _speed_up_rows(entry)]
    order = [entry.label for entry in run.predicted]
    chart = speed_up_chart(rows, order, (PREDICTED, MEASURED), "predicted or measured")
    columns = ("proposer", "size", "predicted speed-up", *BOUNDS, "measured speed-up", *BOUNDS, "tokens/s")
    table = Table(columns, [_table_row(entry, run) for entry in run.predicted])
    note = (
        f"{PROMPT_INTERVALS} The dashed line is plain decoding; what lies left of it does not pay. "
        "Only the best few run live; their predictions are for the machine's speed during the live runs."
    )
    return Figure("speed-up", _fastest(run), chart, table, note, height_of_rows(len(order)))


def speed_up_chart(rows: Rows, order: Sequence[str], kinds: Sequence[str], kind_title: str) -> alt.TopLevelMixin:
    """Return a chart with labels down and, at each label, a speed-up with its interval for each kind."""
    base = chart_of(rows).encode(
        y=alt.Y("label:N", sort=list(order), title=None),
        yOffset=alt.YOffset("kind:N", sort=list(kinds)),
        color=kind_colour(kinds),
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=alt.X("speed_up:Q", title="speed-up over plain decoding", scale=TIGHT_SCALE),
        shape=kind_shape(kinds),
        tooltip=[
            PROPOSER_TOOLTIP,
            alt.Tooltip("kind:N", title=kind_title),
            WHERE_TOOLTIP,
            alt.Tooltip("speed_up:Q", title="speed-up", format=".3f"),
            alt.Tooltip("low:Q", title="95 % from", format=".3f"),
            alt.Tooltip("high:Q", title="95 % to", format=".3f"),
        ],
    )
    intervals = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=TIGHT_SCALE), x2="high:Q")
    plain = chart_of([{"plain": 1}]).mark_rule(strokeDash=REFERENCE_DASH, color=TEXT_COLOUR).encode(x="plain:Q")
    return alt.layer(plain, intervals, points)


def _speed_up_rows(entry: Entry) -> list[dict[str, object]]:
    about = {"label": entry.label, "name": entry.name, "where": entry.best.where}
    low, high = entry.predicted_interval
    rows = [about | {"kind": PREDICTED, "speed_up": entry.best.speed_up, "low": low, "high": high}]
    if entry.live:
        low, high = entry.live.interval
        rows.append(about | {"kind": MEASURED, "speed_up": entry.live.speed_up, "low": low, "high": high})
    return rows


def _table_row(entry: Entry, run: RunView) -> tuple[Cell, ...]:
    predicted = (entry.best.speed_up, *entry.predicted_interval)
    measured = (entry.live.speed_up, *entry.live.interval) if entry.live else (None, None, None)
    return (entry.name, entry.best.where, *predicted, *measured, run.tokens_per_s(entry))


def _fastest(run: RunView) -> str:
    """Return a sentence on the first proposer, on those that lose, and on one that may be faster but was not run."""
    first = run.predicted[0]
    sentence = (
        f"{first.label} {first.best.where} is fastest: {first.speed_up:.2f} times plain decoding, {first.basis} "
        f"({interval(first.bounds)})"
    )
    slower = sum(entry.speed_up < 1 for entry in run.predicted)
    if slower:
        verb = "is" if slower == 1 else "are"
        sentence += f"; {slower} of {len(run.predicted)} {verb} slower than plain decoding"
    highest = max(run.predicted, key=lambda entry: entry.speed_up)
    if highest.speed_up > first.speed_up:
        why = "disturbed when it was measured" if highest.disturbed else "not run live"
        sentence += f"; {highest.label}, {why}, may be faster: {highest.speed_up:.2f} times, predicted"
    return f"{sentence}."


def predicted_against_measured(run: RunView) -> Figure | Gap:
    """Chart predicted speed-ups against measured ones, like the paper's Figure 12."""
    if not run.measured:
        return Gap("predicted against measured", NOTHING_LIVE if run.verdict else UNFINISHED)
    rows = [_both_speed_ups(entry) for entry in run.measured]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    least = min(min(row["low"], row["live_low"]) for row in rows)
    most = max(max(row["high"], row["live_high"]) for row in rows)
    base = chart_of(rows)
    x = alt.X("measured:Q", title="measured speed-up", scale=TIGHT_SCALE)
    y = alt.Y("predicted:Q", title="predicted speed-up", scale=TIGHT_SCALE)
    points = base.mark_point(filled=True, size=80, opacity=1, color=COLOURS[0]).encode(
        x=x,
        y=y,
        tooltip=[
            PROPOSER_TOOLTIP,
            alt.Tooltip("measured:Q", title="measured speed-up", format=".3f"),
            alt.Tooltip("predicted:Q", title="predicted speed-up", format=".3f"),
        ],
    )
    bars = base.mark_rule(color=COLOURS[0])
    across = bars.encode(x=alt.X("live_low:Q", scale=TIGHT_SCALE), x2="live_high:Q", y=y)
    up = bars.encode(x=x, y=alt.Y("low:Q", scale=TIGHT_SCALE), y2="high:Q")
    diagonal = (
        chart_of([{"both": least}, {"both": most}])
        .mark_line(strokeDash=REFERENCE_DASH, color=TEXT_COLOUR)
        .encode(x=alt.X("both:Q", scale=TIGHT_SCALE), y=alt.Y("both:Q", scale=TIGHT_SCALE))
    )
    over_all = f" in the median over {len(rows)} proposers, {percent(max(errors))} at most" if len(rows) > 1 else ""
    finding = f"Predictions were {percent(median(errors))} off{over_all}."
    columns = ("proposer", "measured speed-up", "predicted speed-up", "error %")
    table_rows = [
        (row["name"], row["measured"], row["predicted"], 100 * error) for row, error in zip(rows, errors, strict=True)
    ]
    note = f"On the dashed line both are the same. {PROMPT_INTERVALS}"
    return Figure("prediction", finding, alt.layer(diagonal, across, up, points), Table(columns, table_rows), note)


def _both_speed_ups(entry: Entry) -> dict[str, Any]:
    assert entry.live
    (low, high), (live_low, live_high) = entry.predicted_interval, entry.live.interval
    speed_ups = {"name": entry.name, "measured": entry.live.speed_up, "predicted": entry.best.speed_up}
    return speed_ups | {"low": low, "high": high, "live_low": live_low, "live_high": live_high}
