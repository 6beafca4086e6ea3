"""Which draft: throughput against TAR, TAR by prompt set, task accuracy against TAR."""

import shlex
from collections.abc import Sequence
from typing import Any

import altair as alt

from shallowdraft.display.tabular import format_cell
from shallowdraft.reporting.charts import (
    PROPOSER_TOOLTIP,
    TAR_TITLE,
    TIGHT_SCALE,
    TOKENS_PER_S_TITLE,
    WHERE_TOOLTIP,
    Rows,
    chart_of,
    height_of_rows,
    kind_colour,
    series_colour,
    series_of,
    series_opacity,
    series_shape,
)
from shallowdraft.reporting.figures import BOUNDS, NO_REPLAYS, UNFINISHED, Figure, Gap, Table
from shallowdraft.reporting.run import Entry, RunView

TAR_MEANING = "TAR is the number of tokens per iteration: the accepted draft tokens and one of the target's."
UPRIGHT_SETS = 3  # prompt sets whose names fit beside each other
LARGE_NUMBER_SETS = 6  # prompt sets whose numbers fit beside each other on a phone
LABEL_LIMIT = 190  # pixels
HALF_LINE = 7  # pixels of a label
DARK = 0.7  # of the range of TAR: above it the cells are so dark that their numbers are white


def throughput_against_tar(run: RunView) -> Figure | Gap:
    """Chart tokens per second against TAR, like the paper's Figure 2."""
    entries = run.predicted
    if not entries:
        return Gap("throughput against TAR", UNFINISHED)
    series = series_of(entries)
    rows = [_throughput_row(entry, run) | {"series": series[entry.label]} for entry in entries]
    chart = (
        chart_of(rows[::-1])
        .mark_point(filled=True, size=110)
        .encode(
            opacity=series_opacity(),
            x=alt.X("tar:Q", title=TAR_TITLE, scale=TIGHT_SCALE),
            y=alt.Y("tokens_per_s:Q", title=TOKENS_PER_S_TITLE, scale=TIGHT_SCALE),
            color=series_colour(series),
            shape=series_shape(series),
            tooltip=[
                PROPOSER_TOOLTIP,
                WHERE_TOOLTIP,
                alt.Tooltip("tar:Q", title="TAR", format=".2f"),
                alt.Tooltip("tokens_per_s:Q", title=TOKENS_PER_S_TITLE, format=".1f"),
                alt.Tooltip("layers:Q"),
                alt.Tooltip("parameters:Q", format=","),
            ],
        )
    )
    columns = ("proposer", "size", "TAR", "tokens/s", "shape", "layers", "parameters")
    table = Table(columns, [tuple(_throughput_row(entry, run).values()) for entry in entries])
    note = (
        "Each proposer at its best size: its speed-up, measured if it ran live and else predicted, times the tokens "
        "per second of plain decoding."
    )
    return Figure("throughput", _highest_tar(run), chart, table, note)


def _throughput_row(entry: Entry, run: RunView) -> dict[str, Any]:
    return {
        "name": entry.name,
        "where": entry.best.where,
        "tar": entry.best.tar,
        "tokens_per_s": run.tokens_per_s(entry),
        "shape": entry.shape,
        "layers": entry.layers,
        "parameters": entry.parameters,
    }


def _highest_tar(run: RunView) -> str:
    """Return a sentence on whether the proposer with the highest TAR is the fastest."""
    fastest, highest = run.predicted[0], max(run.predicted, key=lambda entry: entry.best.tar)

    def figures(entry: Entry) -> str:
        speed = f"{format_cell(run.tokens_per_s(entry))} tokens per second"
        return f"{entry.label} has TAR {entry.best.tar:.2f} and {speed}"

    if len(run.predicted) == 1:
        return f"{figures(fastest)}; plain decoding has {format_cell(run.plain_tokens_per_s)}."
    if fastest is highest:
        return f"The proposer with the highest TAR is the fastest: {figures(fastest)}."
    if highest.speed_up > fastest.speed_up:
        return (
            f"The proposer with the highest TAR may be the fastest: {figures(highest)}, predicted; "
            f"{figures(fastest)}, measured."
        )
    return f"The proposer with the highest TAR is not the fastest: {figures(highest)}; {figures(fastest)}."


def tar_by_set(run: RunView) -> Figure | Gap:
    """Chart the TAR of every proposer on every prompt set, like the paper's Table 3."""
    entries = [entry for entry in run.entries if entry.sets]
    if not entries:
        return Gap("TAR by prompt set", NO_REPLAYS)
    rows = [
        tar_cell(entry, name, entry.best.size if entry.prediction else 0)
        for entry in entries
        for name in run.sets
        if name in entry.sets
    ]
    names = ("name", "set", "size", "tar", "low", "high")
    table = Table(
        ("proposer", "prompt set", "size", "TAR", *BOUNDS), [tuple(row[name] for name in names) for row in rows]
    )
    chart = tar_chart(rows, run.sets)
    return Figure("sets", _extreme_sets(rows, run.sets), chart, table, TAR_MEANING, height_of_rows(len(entries)))


def tar_chart(rows: Rows, sets: Sequence[str], lines: int = 1) -> alt.TopLevelMixin:
    """Return a table of coloured TARs: labels, which have this number of lines, down and prompt sets across."""
    least, most = min(row["tar"] for row in rows), max(row["tar"] for row in rows)
    order = list(dict.fromkeys(row["label"] for row in rows))
    label_axis = alt.Axis(
        labelExpr="split(datum.label, '\\n')", labelOffset=-HALF_LINE * (lines - 1), labelLimit=LABEL_LIMIT
    )
    set_axis = alt.Axis(labelAngle=-30 if len(sets) > UPRIGHT_SETS else 0, labelLimit=100)
    base = chart_of(rows).encode(
        x=alt.X("set:N", sort=list(sets), title="prompt set", axis=set_axis),
        y=alt.Y("label:N", sort=order, title=None, axis=label_axis),
    )
    cells = base.mark_rect().encode(
        color=alt.Color("tar:Q", title="TAR", scale=alt.Scale(scheme="blues"), legend=None),
        tooltip=[
            PROPOSER_TOOLTIP,
            alt.Tooltip("set:N", title="prompt set"),
            alt.Tooltip("size:Q", title="size"),
            alt.Tooltip("tar:Q", title="TAR", format=".2f"),
            alt.Tooltip("low:Q", title="95 % from", format=".2f"),
            alt.Tooltip("high:Q", title="95 % to", format=".2f"),
        ],
    )
    dark = least + DARK * (most - least)
    numbers = base.mark_text(fontSize=12 if len(sets) <= LARGE_NUMBER_SETS else 10).encode(
        text=alt.Text("tar:Q", format=".2f"),
        color=alt.condition(f"datum.tar > {dark}", alt.value("white"), alt.value("black")),
    )
    return alt.layer(cells, numbers)


def tar_cell(entry: Entry, set_name: str, size: int) -> dict[str, Any]:
    """Return the TAR on a prompt set at a size, or at the largest size if that one was not replayed."""
    tars = entry.sets[set_name]
    replayed = size if size in tars.tar else max(tars.tar)
    low, high = tars.bounds(replayed)
    about = {"label": entry.label, "name": entry.name, "set": set_name, "size": replayed}
    return about | {"tar": tars.tar[replayed], "low": low, "high": high}


def _extreme_sets(rows: list[dict[str, Any]], sets: list[str]) -> str:
    """Return a sentence on the sets with the highest and the lowest TAR of the first proposer."""
    of_first = [row for row in rows if row["label"] == rows[0]["label"]]
    most, least = (choose(of_first, key=lambda row: row["tar"]) for choose in (max, min))
    if len(sets) == 1:
        return f"On {sets[0]}, {most['label']} has TAR {most['tar']:.2f}."
    return (
        f"The TAR of {most['label']} is highest on {most['set']}, {most['tar']:.2f}, "
        f"and lowest on {least['set']}, {least['tar']:.2f}."
    )


def accuracy_against_tar(run: RunView) -> Figure | Gap:
    """Chart the drafts' accuracy on tasks against their TAR, like the paper's Figure 5."""
    rows = _accuracy_rows(run)
    if run.accuracy is None or not rows:
        drafts = [entry.draft for entry in run.entries if entry.drafter == "model"] or ["DRAFT"]
        options = ("--drafts", *drafts, "--trace", f"{run.folder}/trace.jsonl", "--out", str(run.folder))
        command = shlex.join(("shallowdraft", "accuracy", *options))
        return Gap("accuracy against TAR", "No accuracy was measured; run", command)
    base = chart_of(rows).encode(
        x=alt.X("tar:Q", title=TAR_TITLE, scale=TIGHT_SCALE),
        color=kind_colour(list(dict.fromkeys(row["kind"] for row in rows))),
    )
    tooltip = [
        alt.Tooltip("name:N", title="draft"),
        alt.Tooltip("kind:N", title="task"),
        alt.Tooltip("accuracy:Q", format=".1%"),
    ]
    axis = alt.Axis(format="%", title="task accuracy")
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        y=alt.Y("accuracy:Q", axis=axis, scale=TIGHT_SCALE), tooltip=tooltip
    )
    bars = base.mark_rule().encode(y=alt.Y("low:Q", axis=axis, scale=TIGHT_SCALE), y2="high:Q")
    columns = ("draft", "task", "TAR", "accuracy, 0 to 1", *BOUNDS, "loss, nats/token")
    table = Table(columns, [tuple(row.values()) for row in rows])
    claims = run.accuracy.claims
    statements = " ".join(f"{task}: {claim.statement}." for task, claim in claims.items())
    note = (
        "Each draft answers alone; its answer is the choice that it finds most likely. "
        f"Bars are 95\N{NO-BREAK SPACE}% intervals over questions. {statements}"
    )
    finding = _rank_correlations({task: claim.of_accuracy for task, claim in claims.items()})
    return Figure("accuracy", finding, alt.layer(bars, points), table, note)


def _accuracy_rows(run: RunView) -> list[dict[str, Any]]:
    return [
        {
            "name": draft.name,
            "kind": task,
            "tar": draft.tar,
            "accuracy": score.accuracy.value,
            "low": score.accuracy.interval[0],
            "high": score.accuracy.interval[1],
            "loss": score.loss,
        }
        for draft in (run.accuracy.drafts if run.accuracy else ())
        for task, score in draft.sets.items()
        if draft.tar
    ]


def _rank_correlations(correlations: dict[str, float | None]) -> str:
    by_task = [f"{value:+.2f} on {task}" for task, value in correlations.items() if value is not None]
    if not by_task:
        return "Accuracy does not predict TAR: no draft is clearly better than chance, or there are too few drafts."
    return (
        f"The rank correlation of accuracy with TAR is {', '.join(by_task)}; "
        "1 would mean that the more accurate draft is always accepted more."
    )
