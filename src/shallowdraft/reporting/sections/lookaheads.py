"""Which lookahead: the speed-up at each, and how many draft tokens are accepted."""

from typing import Any

import altair as alt

from shallowdraft.reporting.charts import (
    PROPOSER_TOOLTIP,
    REFERENCE_DASH,
    SIZE_TITLE,
    TEXT_COLOUR,
    TIGHT_SCALE,
    chart_of,
    integer_axis,
    series_colour,
    series_dash,
    series_of,
    series_opacity,
)
from shallowdraft.reporting.figures import (
    BOUNDS,
    NO_CURVES,
    NO_REPLAYS,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    ordinal,
    percent,
)
from shallowdraft.reporting.run import Entry, RunView

CLOSE = 0.05  # of the best speed-up


def speed_by_lookahead(run: RunView) -> Figure | Gap:
    """Chart the predicted speed-up at every size, with each proposer's optimum marked."""
    entries = [entry for entry in run.predicted if entry.curve]
    if not entries:
        return Gap("speed-up at every lookahead", NO_CURVES if run.verdict else UNFINISHED)
    series = series_of(entries)
    rows = [row | {"series": series[entry.label]} for entry in entries for row in _curve_rows(entry)]
    y = alt.Y("speed_up:Q", title="predicted speed-up", scale=TIGHT_SCALE)
    base = chart_of(rows[::-1]).encode(
        x=alt.X("size:Q", title=SIZE_TITLE, axis=integer_axis(row["size"] for row in rows)),
        y=y,
        color=series_colour(series, lines=True),
        opacity=series_opacity(),
        detail="label:N",
    )
    tooltip = [
        PROPOSER_TOOLTIP,
        alt.Tooltip("size:Q", title="size"),
        alt.Tooltip("speed_up:Q", title="predicted speed-up", format=".3f"),
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
    ]
    lines = base.mark_line().encode(strokeDash=series_dash(series))
    hover_areas = base.mark_point(size=200).encode(opacity=alt.value(0), tooltip=tooltip)
    optima = base.transform_filter("datum.best").mark_point(filled=True, size=90).encode(tooltip=tooltip)
    plain = chart_of([{"plain": 1}]).mark_rule(strokeDash=REFERENCE_DASH, color=TEXT_COLOUR).encode(y="plain:Q")
    names = ("name", "size", "tar", "low", "high", "draft_ms", "verify_ms", "other_ms", "speed_up")
    columns = ("proposer", "size", "TAR", *BOUNDS, "draft ms", "verify ms", "rest ms", "predicted speed-up")
    table = Table(columns, [tuple(row[name] for name in names) for row in rows])
    note = (
        "A point marks each proposer's optimum. The dashed line is plain decoding. "
        "Times are for the machine's speed while profiling."
    )
    chart = alt.layer(plain, lines, hover_areas, optima)
    return Figure("lookahead", _plateau(entries[0]), chart, table, note, 320)


def _curve_rows(entry: Entry) -> list[dict[str, Any]]:
    best = max(entry.curve, key=lambda prediction: prediction.tokens_per_s)
    return [
        {
            "label": entry.label,
            "name": entry.name,
            "size": prediction.size,
            "tar": prediction.tar,
            "low": entry.tars.bounds(prediction.size)[0],
            "high": entry.tars.bounds(prediction.size)[1],
            "draft_ms": 1e3 * prediction.iteration.draft_s,
            "verify_ms": 1e3 * prediction.iteration.verify_s,
            "other_ms": 1e3 * prediction.iteration.other_s,
            "speed_up": prediction.speed_up,
            "best": prediction is best,
        }
        for prediction in entry.curve
    ]


def _plateau(entry: Entry) -> str:
    """Return a sentence on the best size and on the sizes that are nearly as fast."""
    best = max(entry.curve, key=lambda prediction: prediction.tokens_per_s)
    close = [prediction.size for prediction in entry.curve if prediction.speed_up >= (1 - CLOSE) * best.speed_up]
    sentence = f"{entry.label} is fastest {best.where}"
    if min(close) == max(close):
        return f"{sentence}, and no other is within {percent(CLOSE)} of it."
    return f"{sentence}; from {min(close)} to {max(close)} it stays within {percent(CLOSE)} of that speed."


def acceptance_by_position(run: RunView) -> Figure | Gap:
    """Chart the share of proposals in which the draft token at each position is accepted."""
    entries = [entry for entry in run.entries if entry.acceptance_by_position]
    if not entries:
        return Gap("acceptance by position", NO_REPLAYS)
    series = series_of(entries)
    rows: list[dict[str, Any]] = [
        {
            "label": entry.label,
            "name": entry.name,
            "series": series[entry.label],
            "position": position,
            "accepted": share,
        }
        for entry in entries
        for position, share in enumerate(entry.acceptance_by_position, 1)
    ]
    base = chart_of(rows[::-1]).encode(
        x=alt.X("position:Q", title="position in the proposal", axis=integer_axis(row["position"] for row in rows)),
        y=alt.Y("accepted:Q", title="proposals accepted this far", axis=alt.Axis(format="%")),
        color=series_colour(series, lines=True),
        opacity=series_opacity(),
        detail="label:N",
    )
    tooltip = [
        PROPOSER_TOOLTIP,
        alt.Tooltip("position:Q", title="position"),
        alt.Tooltip("accepted:Q", format=".1%"),
    ]
    chart = alt.layer(
        base.mark_line().encode(strokeDash=series_dash(series)),
        base.mark_point(filled=True, size=30).encode(tooltip=tooltip),
    )
    columns = ("proposer", "position", "accepted, 0 to 1")
    table = Table(columns, [(row["name"], row["position"], row["accepted"]) for row in rows])
    note = (
        "At the longest lookahead of the study, over the proposals that reach the position. "
        "A draft token is accepted only if all before it are."
    )
    return Figure("position", _decay(entries[0]), chart, table, note)


def _decay(entry: Entry) -> str:
    shares = entry.acceptance_by_position
    sentence = f"The first draft token of {entry.label} is accepted in {percent(shares[0])} of proposals"
    if len(shares) == 1:
        return f"{sentence}."
    last = min(4, len(shares))
    return f"{sentence}, the {ordinal(last)} in {percent(shares[last - 1])}."
