"""How fast servers are: what `bench` measured, beside the study's predictions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from shallowdraft.cost import Prediction
from shallowdraft.display.tabular import Cell
from shallowdraft.reporting.charts import TIGHT_SCALE, chart_of, height_of_rows, integer_axis, kind_colour, kind_shape
from shallowdraft.reporting.figures import BOUNDS, PROMPT_INTERVALS, Figure, Gap, Table, interval, percent
from shallowdraft.reporting.run import BenchedServer, Requested, RunView
from shallowdraft.reporting.sections.speed_up import MEASURED, PREDICTED, speed_up_chart


def server_speed_ups(run: RunView) -> Figure | Gap:
    """Chart speed-ups over the same server without a draft."""
    servers = [server for server in run.servers if server.speed_up]
    if not servers:
        lacking = "No server was measured"
        if run.servers:
            lacking += " both with and without a draft on the same prompts"
        sentence = f"{lacking}. Bench one with a draft and without; --draft and --lookahead say with which:"
        command = f"shallowdraft bench --url URL --model NAME --prompts SET --out {run.folder}/server.jsonl"
        return Gap("speed-ups of a server", sentence, command)
    predictions = [(server, _prediction(server, run)) for server in servers]
    rows = [row for server, prediction in predictions for row in _speed_up_rows(server, prediction)]
    order = list(dict.fromkeys(str(row["label"]) for row in rows))
    chart = speed_up_chart(rows, order, (PREDICTED, MEASURED), "predicted or measured")
    columns = (
        "server", "concurrency", "draft", "lookahead", "measured speed-up", *BOUNDS, "predicted speed-up",
        "measured TAR", "replayed TAR",
    )  # fmt: skip
    table = Table(columns, [_table_row(server, prediction) for server, prediction in predictions])
    note = (
        "Measured: against the same server without a draft. Predicted: from the replayed TAR, which depends on the "
        "models only, and from the times of this package's engine for one request at a time; other engines take other "
        f"times. In parentheses: the concurrency. {PROMPT_INTERVALS}{_without_plain(run)}"
    )
    return Figure("gains", _highest_gain(predictions), chart, table, note, height_of_rows(len(order)))


def _without_plain(run: RunView) -> str:
    """Return a sentence that names the servers to which no server without a draft compares."""
    names = [f"{server.name} {server.where}" for server in run.servers if server.draft and not server.speed_up]
    if not names:
        return ""
    return f" Left out, as no server without a draft answered the same requests: {'; '.join(names)}."


def server_throughput(run: RunView) -> list[Figure]:
    """Chart tokens per second against concurrency, of the servers that were sent the same requests."""
    if not run.servers:
        return []
    requested = _most_common_requests(run.servers)
    servers = [server for server in run.servers if server.requested == requested]
    names = list(dict.fromkeys(server.name for server in servers))
    rows = [_throughput_row(server) for server in servers]
    base = chart_of(rows).encode(
        x=alt.X(
            "concurrency:Q",
            title="concurrency: requests under way",
            axis=integer_axis(row["concurrency"] for row in rows),
            scale=TIGHT_SCALE,
        ),
        color=kind_colour(names),
    )
    tooltip = [alt.Tooltip("kind:N", title="server"), alt.Tooltip("tokens_per_s:Q", title="tokens/s", format=".1f")]
    y = alt.Y("tokens_per_s:Q", title="tokens per second, all requests", scale=TIGHT_SCALE)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(y=y, shape=kind_shape(names), tooltip=tooltip)
    intervals = base.mark_rule().encode(y=alt.Y("low:Q", scale=TIGHT_SCALE), y2="high:Q")
    best = max(servers, key=lambda server: server.level.tokens_per_s)
    finding = f"{best.name} is fastest: {best.level.tokens_per_s:,.0f} tokens per second {best.where}."
    columns = ("server", "concurrency", "tokens/s", *BOUNDS, "time to first token ms", "time between tokens ms")
    table = Table(columns, [tuple(row.values()) for row in rows])
    note = " ".join(
        filter(None, (PROMPT_INTERVALS, _with_other_requests(run.servers, requested), _with_other_drafts(run)))
    )
    return [Figure("servers", finding, alt.layer(base.mark_line().encode(y=y), intervals, points), table, note)]


def _throughput_row(server: BenchedServer) -> dict[str, Any]:
    level = server.level
    low, high = level.tokens_per_s_interval
    return {
        "kind": server.name,
        "concurrency": level.concurrency,
        "tokens_per_s": level.tokens_per_s,
        "low": low,
        "high": high,
        "ttft_ms": 1e3 * level.ttft_s,
        "between_ms": level.between_s and 1e3 * level.between_s,
    }


def _most_common_requests(servers: Sequence[BenchedServer]) -> Requested:
    """Return the requests that most servers were sent; of several, those of the first server."""
    by_name = {server.name: server.requested for server in servers}
    return Counter(by_name.values()).most_common(1)[0][0]


def _with_other_requests(servers: Sequence[BenchedServer], requested: Requested) -> str:
    """Return a sentence that names the servers that were sent other requests, and how those differ."""
    differences = {
        server.name: server.requested.differences(requested) for server in servers if server.requested != requested
    }
    if not differences:
        return ""
    return f"Left out, as they were sent other requests: {_listed(differences)}."


def _with_other_drafts(run: RunView) -> str:
    """Return a sentence that names the servers whose draft the study does not have."""
    drafts = {
        server.name: server.draft
        for server in run.servers
        if server.draft and not any(map(server.drafts_with, run.entries))
    }
    return f"Not predicted, as the study has no such draft: {_listed(drafts)}." if drafts else ""


def _listed(remarks: dict[str, Any]) -> str:
    return "; ".join(f"{name} ({remark})" for name, remark in remarks.items())


def _prediction(server: BenchedServer, run: RunView) -> Prediction | None:
    """Return the study's prediction, with the replayed TAR of the prompt sets that the server was sent.

    The study's replays are greedy, so there is none for a server that samples. Predictions at every lookahead are for
    the machine's speed while profiling; a study without them has one per proposer, for the speed during its live runs.
    """
    entry = next((entry for entry in run.predicted if server.drafts_with(entry)), None)
    if entry is None or server.lookahead is None or not server.greedy:
        return None
    curve = {prediction.lookahead: prediction for prediction in entry.curve or [entry.best]}
    if server.lookahead not in curve:
        return None
    iterations = 0.0
    for name, tokens in server.level.set_tokens.items():
        tar = entry.sets[name].tar.get(server.lookahead) if name in entry.sets else None
        if not tar:
            return None
        iterations += tokens / tar
    return replace(curve[server.lookahead], tar=sum(server.level.set_tokens.values()) / iterations)


def _speed_up_rows(server: BenchedServer, prediction: Prediction | None) -> list[dict[str, object]]:
    assert server.speed_up
    label = f"{server.name} ({server.level.concurrency})"
    about = {"label": label, "name": server.draft, "where": f"at lookahead {server.lookahead}"}
    low, high = server.interval
    rows = [about | {"kind": MEASURED, "speed_up": server.speed_up, "low": low, "high": high}]
    if prediction and server.level.concurrency == 1:
        speed_up = prediction.speed_up
        rows.append(about | {"kind": PREDICTED, "speed_up": speed_up, "low": speed_up, "high": speed_up})
    return rows


def _table_row(server: BenchedServer, prediction: Prediction | None) -> tuple[Cell, ...]:
    assert server.speed_up
    replayed_tar = prediction.tar if prediction else None
    predicted = prediction.speed_up if prediction and server.level.concurrency == 1 else None
    settings = server.name, server.level.concurrency, server.draft, server.lookahead
    return *settings, server.speed_up, *server.interval, predicted, server.level.tar, replayed_tar


def _highest_gain(predictions: Sequence[tuple[BenchedServer, Prediction | None]]) -> str:
    """Return a sentence on the speed-up with the highest lower bound, and on how far TAR is from the replayed one."""
    best = max((server for server, _ in predictions), key=lambda server: server.interval[0])
    assert best.speed_up
    times = f"{best.speed_up:.2f} times as fast as without a draft ({interval(best.interval)})"
    sentence = f"{best.name} {best.where} is {times}"
    errors = [
        abs(server.level.tar / prediction.tar - 1)
        for server, prediction in predictions
        if prediction and server.level.tar
    ]
    if errors:
        sentence += f"; TAR on servers is at most {percent(max(errors))} off the replayed TAR"
    return f"{sentence}."
