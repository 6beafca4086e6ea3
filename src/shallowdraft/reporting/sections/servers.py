"""In production: what servers were measured to do, beside what the study says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from shallowdraft.cost import Prediction
from shallowdraft.reporting.figures import NEAR, Figure, Gap, Table, chosen, data, marked, percent, rows_high, whole
from shallowdraft.reporting.run import BenchedServer, Requested, RunView
from shallowdraft.reporting.sections.speed_up import MEASURED, PREDICTED, speed_up_chart

INTERVALS = "Bars are 95 % intervals over prompts."


def gains(run: RunView) -> Figure | Gap:
    """Speed-ups over the same server without a draft."""
    found = [one for one in run.servers if one.speed_up]
    if not found:
        same = "Bench it with and without a draft, on the same prompts"
        what = same if run.servers else "No server was measured; bench one"
        command = f"shallowdraft bench --url URL --model NAME --prompts SET --out {run.folder}/server.jsonl"
        return Gap("speed-ups of a server", f"{what} (--draft and --lookahead say with which);", command)
    known = [(one, _prediction(one, run)) for one in found]
    rows = [row for one, its in known for row in _bars(one, its)]
    order = list(dict.fromkeys(str(row["label"]) for row in rows))
    chart = speed_up_chart(rows, order, (PREDICTED, MEASURED), "how known")
    columns = (
        "server", "at once", "draft", "lookahead", "measured speed-up", "from", "to", "predicted speed-up",
        "measured TAR", "replayed TAR",
    )  # fmt: skip
    table = Table(columns, [_row(one, its) for one, its in known])
    note = (
        "Measured: against the same server without a draft. Predicted: from replayed tokens an iteration, which are a "
        "matter of the models, and from times of this package's own engine, for one request at a time: other engines "
        f"have other times. {INTERVALS}{_unpaired(run)}"
    )
    return Figure("gains", _agreement(known), chart, table, note, rows_high(len(order)))


def _unpaired(run: RunView) -> str:
    """Servers that nothing without a draft is like."""
    found = [f"{one.name}, {one.at_once}" for one in run.servers if one.draft and not one.speed_up]
    listed = "; ".join(found)
    return f" Left out, as no server without a draft answered the same requests: {listed}." if found else ""


def speeds(run: RunView) -> list[Figure]:
    """Tokens a second by how many requests are under way, of servers that were asked alike."""
    if not run.servers:
        return []
    asked = _usual(run.servers)
    alike = [one for one in run.servers if one.requested == asked]
    names = list(dict.fromkeys(one.name for one in alike))
    rows: list[dict[str, Any]] = [
        {"kind": one.name, "many": one.level.concurrency, "tokens_per_s": one.level.tokens_per_s}
        | dict(zip(("low", "high"), one.level.tokens_per_s_interval, strict=True))
        for one in alike
    ]
    base = alt.Chart(data(rows)).encode(
        x=alt.X("many:Q", title="requests at once", axis=whole(row["many"] for row in rows), scale=NEAR),
        color=chosen(names),
    )
    tooltip = [alt.Tooltip("kind:N", title="server"), alt.Tooltip("tokens_per_s:Q", title="tokens/s", format=".1f")]
    y = alt.Y("tokens_per_s:Q", title="tokens a second, all requests together", scale=NEAR)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(y=y, shape=marked(names), tooltip=tooltip)
    intervals = base.mark_rule().encode(y=alt.Y("low:Q", scale=NEAR), y2="high:Q")
    best = max(alike, key=lambda one: one.level.tokens_per_s)
    finding = f"{best.name} gives most: {best.level.tokens_per_s:,.0f} tokens a second, {best.at_once}."
    columns = ("server", "at once", "tokens/s", "from", "to", "first token ms", "between tokens ms")
    table = Table(
        columns,
        [
            (one.name, its.concurrency, its.tokens_per_s, *its.tokens_per_s_interval, 1e3 * its.ttft_s, between_ms)
            for one in alike
            for its in [one.level]
            for between_ms in [its.between_s and 1e3 * its.between_s]
        ],
    )
    note = " ".join(filter(None, (INTERVALS, _left_out(run.servers, asked), _strangers(run))))
    return [Figure("servers", finding, alt.layer(base.mark_line().encode(y=y), intervals, points), table, note)]


def _usual(servers: Sequence[BenchedServer]) -> Requested:
    """What most were asked; of several the first."""
    by_name = {one.name: one.requested for one in servers}
    return Counter(by_name.values()).most_common(1)[0][0]


def _left_out(servers: Sequence[BenchedServer], asked: Requested) -> str:
    """Which were asked otherwise, and how."""
    found = {one.name: one.requested.differences(asked) for one in servers if one.requested != asked}
    listed = "; ".join(f"{name} ({how})" for name, how in found.items())
    return f"Left out, as they were asked otherwise: {listed}." if found else ""


def _strangers(run: RunView) -> str:
    """Servers whose draft the study does not know."""
    strangers = [one for one in run.servers if one.draft and not any(map(one.drafts_with, run.entries))]
    found = {one.name: one.draft for one in strangers}
    listed = "; ".join(f"{name} ({draft})" for name, draft in found.items())
    return f"Not predicted, as the study has no such draft: {listed}." if found else ""


def _prediction(one: BenchedServer, run: RunView) -> Prediction | None:
    """The study's, which is greedy, with the replayed TAR of the very prompt sets that the server was asked.

    On the machine as it was while profiling, at every lookahead; without curves, as the live runs met it.
    """
    entry = next((its for its in run.predicted if one.drafts_with(its)), None)
    if entry is None or one.lookahead is None or not one.greedy:
        return None
    curve = {its.lookahead: its for its in entry.curve or [entry.best]}
    asked = one.level.set_tokens
    tars = {name: entry.sets[name].tar.get(one.lookahead) for name in asked if name in entry.sets}
    iterations = [tokens / tar for name, tokens in asked.items() if (tar := tars.get(name))]
    if one.lookahead not in curve or len(iterations) < len(asked):
        return None
    return replace(curve[one.lookahead], tar=sum(asked.values()) / sum(iterations))


def _bars(one: BenchedServer, predicted: Prediction | None) -> list[dict[str, object]]:
    assert one.speed_up
    about = {"label": f"{one.name}, {one.at_once}", "name": one.draft, "where": f"at lookahead {one.lookahead}"}
    low, high = one.interval
    found = [about | {"kind": MEASURED, "speed_up": one.speed_up, "low": low, "high": high}]
    if predicted and one.level.concurrency == 1:
        its = predicted.speed_up
        found.append(about | {"kind": PREDICTED, "speed_up": its, "low": its, "high": its})
    return found


def _row(one: BenchedServer, predicted: Prediction | None) -> tuple[str | int | float | None, ...]:
    assert one.speed_up
    tar = predicted.tar if predicted else None
    gain = predicted.speed_up if predicted and one.level.concurrency == 1 else None
    measured = one.speed_up, *one.interval
    return one.name, one.level.concurrency, one.draft, one.lookahead, *measured, gain, one.level.tar, tar


def _agreement(known: list[tuple[BenchedServer, Prediction | None]]) -> str:
    """What is most surely gained, and whether tokens an iteration are as replayed."""
    best = max((one for one, _ in known), key=lambda one: one.interval[0] if one.speed_up else 0)
    assert best.speed_up
    low, high = best.interval
    gain = f"{best.speed_up:.2f} times as fast as without a draft (95 %: {low:.2f} to {high:.2f})"
    off = [abs(one.level.tar / its.tar - 1) for one, its in known if its and one.level.tar]
    tars = f"; tokens an iteration are at most {percent(max(off))} off the replayed ones" if off else ""
    return f"{best.name}, {best.at_once}, is {gain}{tars}."
