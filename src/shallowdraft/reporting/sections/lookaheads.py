"""Which lookahead: speed-up at every one, and how far proposals are accepted."""

from typing import Any

import altair as alt

from shallowdraft.reporting.figures import (
    INK,
    NEAR,
    NO_CURVES,
    NO_REPLAYS,
    SIZE,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    coloured,
    dashed,
    data,
    faded,
    ordinal,
    percent,
    series_of,
    whole,
)
from shallowdraft.reporting.run import Entry, RunView

CLOSE = 0.05  # of the best speed-up


def speed_by_lookahead(run: RunView) -> Figure | Gap:
    """Curves with the optimum marked."""
    found = [one for one in run.predicted if one.curve]
    if not found:
        return Gap("speed-up at every lookahead", NO_CURVES if run.verdict else UNFINISHED)
    series = series_of(found)
    rows: list[dict[str, Any]] = [row | {"series": series[one.label]} for one in found for row in _curve(one)]
    x = alt.X("size:Q", title=SIZE, axis=whole(row["size"] for row in rows))
    colour = coloured(series, lines=True)
    base = alt.Chart(data(rows[::-1])).encode(x=x, color=colour, opacity=faded(), detail="label:N")
    lines = base.mark_line().encode(
        y=alt.Y("speed_up:Q", title="predicted speed-up", scale=NEAR), strokeDash=dashed(series)
    )
    optimum = base.transform_filter("datum.best").mark_point(filled=True, size=90)
    spots = base.mark_point(size=200).encode(
        opacity=alt.value(0), y=alt.Y("speed_up:Q", scale=NEAR), tooltip=_tooltip()
    )
    marked = optimum.encode(y=alt.Y("speed_up:Q", scale=NEAR), tooltip=_tooltip())
    even = alt.Chart(data([{"even": 1}])).mark_rule(strokeDash=[4, 4], color=INK).encode(y="even:Q")
    names = ("name", "size", "tar", "low", "high", "draft_ms", "verify_ms", "rest_ms", "speed_up")
    columns = ("proposer", "size", "TAR", "from", "to", "draft ms", "verify ms", "rest ms", "predicted speed-up")
    table = Table(columns, [tuple(row[name] for name in names) for row in rows])
    note = (
        "A point marks each proposer's optimum. The dashed line is plain decoding. "
        "Times are those of the machine as it was while profiling."
    )
    return Figure("lookahead", _plateau(found[0]), alt.layer(even, lines, spots, marked), table, note, 320)


def _tooltip() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("size:Q", title="size"),
        alt.Tooltip("speed_up:Q", title="predicted speed-up", format=".3f"),
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
    ]


def _curve(one: Entry) -> list[dict[str, Any]]:
    best = max(one.curve, key=lambda point: point.tokens_per_s)
    return [
        {
            "label": one.label,
            "name": one.name,
            "size": point.size,
            "tar": point.tar,
            "low": one.tars.bounds(point.size)[0],
            "high": one.tars.bounds(point.size)[1],
            "draft_ms": 1e3 * point.iteration.draft_s,
            "verify_ms": 1e3 * point.iteration.verify_s,
            "rest_ms": 1e3 * point.iteration.other_s,
            "speed_up": point.speed_up,
            "best": point is best,
        }
        for point in one.curve
    ]


def _plateau(one: Entry) -> str:
    best = max(one.curve, key=lambda point: point.tokens_per_s)
    close = [point.size for point in one.curve if point.speed_up >= (1 - CLOSE) * best.speed_up]
    said = f"{one.label} is best {best.where}"
    if min(close) == max(close):
        return f"{said}, and no other is within {percent(CLOSE)} of it."
    return f"{said}; from {min(close)} to {max(close)} it stays within {percent(CLOSE)} of that."


def acceptance_by_position(run: RunView) -> Figure | Gap:
    """Share of iterations that keep at least so many draft tokens, among those that propose as many."""
    found = [one for one in run.entries if one.acceptance_by_position]
    if not found:
        return Gap("acceptance by position", NO_REPLAYS)
    series = series_of(found)
    rows: list[dict[str, Any]] = [
        {"label": one.label, "name": one.name, "series": series[one.label], "position": position, "share": share}
        for one in found
        for position, share in enumerate(one.acceptance_by_position, 1)
    ]
    base = alt.Chart(data(rows[::-1])).encode(
        x=alt.X("position:Q", title="place in the proposal", axis=whole(row["position"] for row in rows)),
        y=alt.Y("share:Q", title="proposals that keep it", axis=alt.Axis(format="%")),
        color=coloured(series, lines=True),
        opacity=faded(),
        detail="label:N",
    )
    tooltip = [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("position:Q", title="place"),
        alt.Tooltip("share:Q", title="kept", format=".1%"),
    ]
    chart = alt.layer(
        base.mark_line().encode(strokeDash=dashed(series)),
        base.mark_point(filled=True, size=30).encode(tooltip=tooltip),
    )
    table = Table(("proposer", "place", "share kept"), [(row["name"], row["position"], row["share"]) for row in rows])
    note = (
        "At the longest lookahead that was studied, among proposals that are as long. "
        "A token is kept only where all before it are."
    )
    return Figure("position", _decay(found[0]), chart, table, note)


def _decay(one: Entry) -> str:
    shares = one.acceptance_by_position
    said = f"The first draft token of {one.label} is kept in {percent(shares[0])} of proposals"
    if len(shares) == 1:
        return said + "."
    last = min(4, len(shares))
    return f"{said}, the {ordinal(last)} in {percent(shares[last - 1])}."
