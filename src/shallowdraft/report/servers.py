"""In production: what servers were measured to do, beside what the study says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from shallowdraft.cost import Prediction
from shallowdraft.report.figures import NEAR, Figure, Gap, Table, chosen, data, marked, percent, rows_high, whole
from shallowdraft.report.pays import MEASURED, PREDICTED, speed_up_chart
from shallowdraft.report.run import Run, Server

NAMES = (
    "server", "at once", "draft", "lookahead", "TAR, measured", "TAR, replayed", "speed-up, measured", "from", "to",
    "speed-up, predicted", "tokens/s", "from", "to", "first token ms", "between tokens ms",
)  # fmt: skip


def gains(run: Run) -> Figure | Gap:
    """Speed-ups over the same server without a draft."""
    found = [one for one in run.servers if one.speed_up]
    if not found:
        what = "Bench it with and without a draft" if run.servers else "No server was measured; bench one"
        command = f"shallowdraft bench --url URL --model NAME --prompts SET --out {run.folder}/server.jsonl"
        return Gap("speed-ups of a server", f"{what} (--draft and --lookahead say with which);", command)
    rows = [row for one in found for row in _bars(one, run)]
    order = list(dict.fromkeys(str(row["label"]) for row in rows))
    chart = speed_up_chart(rows, order, (PREDICTED, MEASURED), "how known")
    note = (
        "Measured: against the same server without a draft. Predicted: from replayed tokens an iteration, which are a "
        "matter of the models, and from times of this package's own engine, one request at a time: other engines have "
        "other times."
    )
    return Figure("gains", _agreement(found, run), chart, _table(run), note, rows_high(len(order)))


def speeds(run: Run) -> list[Figure]:
    """Tokens a second by how many requests are under way."""
    if not run.servers:
        return []
    names = list(dict.fromkeys(one.name for one in run.servers))
    rows: list[dict[str, Any]] = [
        {"kind": one.name, "many": one.level.concurrency, "tokens_per_s": one.level.tokens_per_s}
        | dict(zip(("low", "high"), one.level.tokens_per_s_interval, strict=True))
        for one in run.servers
    ]
    base = alt.Chart(data(rows)).encode(
        x=alt.X("many:Q", title="requests at once", axis=whole(row["many"] for row in rows), scale=NEAR),
        color=chosen(names),
    )
    tooltip = [alt.Tooltip("kind:N", title="server"), alt.Tooltip("tokens_per_s:Q", title="tokens/s", format=".1f")]
    y = alt.Y("tokens_per_s:Q", title="tokens a second, all requests together", scale=NEAR)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(y=y, shape=marked(names), tooltip=tooltip)
    intervals = base.mark_rule().encode(y=alt.Y("low:Q", scale=NEAR), y2="high:Q")
    best = max(run.servers, key=lambda one: one.level.tokens_per_s)
    finding = f"{best.name} gives most: {best.level.tokens_per_s:,.0f} tokens a second, {best.at_once}."
    note = "Bars are 95 % intervals over prompts."
    return [Figure("servers", finding, alt.layer(base.mark_line().encode(y=y), intervals, points), _table(run), note)]


def prediction_of(one: Server, run: Run) -> Prediction | None:
    """The study's, with the replayed TAR of the very prompt sets that the server was asked, where it knows them."""
    entry = next((its for its in run.predicted if its.drafter == "model" and its.draft == one.draft), None)
    if entry is None:
        return None
    curve = {its.lookahead: its for its in (*entry.curve, entry.best)}
    tars = [entry.sets[name].value.get(one.lookahead or 0) for name in one.level.set_tokens if name in entry.sets]
    if one.lookahead not in curve or len(tars) < len(one.level.set_tokens):
        return None
    tokens = one.level.set_tokens.values()
    iterations = sum(count / tar for count, tar in zip(tokens, tars, strict=True) if tar)
    return replace(curve[one.lookahead], tar=sum(tokens) / iterations) if iterations else None


def _bars(one: Server, run: Run) -> list[dict[str, object]]:
    assert one.speed_up
    where = f"at lookahead {one.lookahead}"
    about = {"label": f"{one.name}, {one.at_once}", "name": one.draft, "where": where}
    low, high = one.speed_up.interval
    found = [about | {"kind": MEASURED, "speed_up": one.speed_up.speed_up, "low": low, "high": high}]
    if predicted := prediction_of(one, run):
        its = predicted.speed_up
        found.append(about | {"kind": PREDICTED, "speed_up": its, "low": its, "high": its})
    return found


def _agreement(found: Sequence[Server], run: Run) -> str:
    best = max(found, key=lambda one: one.speed_up.speed_up if one.speed_up else 0)
    assert best.speed_up
    low, high = best.speed_up.interval
    gain = f"{best.speed_up.speed_up:.2f} times as fast as without a draft (95 %: {low:.2f} to {high:.2f})"
    both = [(one, its) for one in found if one.level.tar and (its := prediction_of(one, run))]
    off = max((abs(its.tar / one.level.tar - 1) for one, its in both if one.level.tar), default=None)
    tars = "" if off is None else f"; tokens an iteration are at most {percent(off)} off the replayed ones"
    return f"{best.name}, {best.at_once}, is {gain}{tars}."


def _table(run: Run) -> Table:
    rows = []
    for one in run.servers:
        its, gain, level = prediction_of(one, run), one.speed_up, one.level
        measured = (gain.speed_up, *gain.interval) if gain else (None, None, None)
        times = (level.tokens_per_s, *level.tokens_per_s_interval, 1e3 * level.ttft_s, 1e3 * level.between_s)
        speculation = (one.draft, one.lookahead, level.tar, its.tar if its else None)
        rows.append((one.name, level.concurrency, *speculation, *measured, its.speed_up if its else None, *times))
    return Table(NAMES, rows)
