"""Which draft: throughput against TAR, TAR by prompt set, accuracy against TAR."""

import shlex
from collections.abc import Sequence
from typing import Any

import altair as alt

from shallowdraft.reporting.figures import (
    NEAR,
    NO_REPLAYS,
    UNFINISHED,
    Figure,
    Gap,
    Table,
    Values,
    chosen,
    coloured,
    data,
    faded,
    rows_high,
    series_of,
    shaped,
    shown,
)
from shallowdraft.reporting.run import Entry, RunView

TAR = "TAR is the tokens gained an iteration: accepted draft tokens and one of the target's."
UPRIGHT = 3  # names of sets that fit beside each other
MANY = 6  # sets whose numbers fit beside each other on a phone
LIMIT = 190  # pixels of a label
HALF_LINE = 7  # pixels of a label
DARK = 0.7  # of the range of colours: from there on numbers are white


def throughput_against_tar(run: RunView) -> Figure | Gap:
    """The paper's Figure 2."""
    found = run.predicted
    if not found:
        return Gap("throughput against TAR", UNFINISHED)
    series = series_of(found)
    rows = [_point(one, run) | {"series": series[one.label]} for one in found]
    chart = (
        alt.Chart(data(rows[::-1]))
        .mark_point(filled=True, size=110)
        .encode(
            opacity=faded(),
            x=alt.X("tar:Q", title="TAR: tokens an iteration", scale=NEAR),
            y=alt.Y("tokens_per_s:Q", title="tokens a second", scale=NEAR),
            color=coloured(series),
            shape=shaped(series),
            tooltip=[
                alt.Tooltip("name:N", title="proposer"),
                alt.Tooltip("where:N", title="size"),
                alt.Tooltip("tar:Q", title="TAR", format=".2f"),
                alt.Tooltip("tokens_per_s:Q", title="tokens a second", format=".1f"),
                alt.Tooltip("layers:Q"),
                alt.Tooltip("parameters:Q", format=","),
            ],
        )
    )
    columns = ("proposer", "size", "TAR", "tokens/s", "shape", "layers", "parameters")
    table = Table(columns, [tuple(_point(one, run).values()) for one in found])
    note = (
        "Each proposer at its best size, measured where it was run live, else predicted; with the same plain decoding."
    )
    return Figure("throughput", _ranking(run), chart, table, note)


def _point(one: Entry, run: RunView) -> dict[str, Any]:
    return {
        "name": one.name,
        "where": one.best.where,
        "tar": one.best.tar,
        "tokens_per_s": run.tokens_per_s(one),
        "shape": one.shape,
        "layers": one.layers,
        "parameters": one.parameters,
    }


def _ranking(run: RunView) -> str:
    fastest, keenest = run.predicted[0], max(run.predicted, key=lambda one: one.best.tar)

    def gives(one: Entry) -> str:
        return f"{one.label} has {one.best.tar:.2f} and gives {shown(run.tokens_per_s(one))} tokens a second"

    if len(run.predicted) == 1:
        return f"{gives(fastest)}; plain decoding gives {shown(run.plain_tokens_per_s)}."
    if fastest is keenest:
        return f"The highest TAR is the fastest: {gives(fastest)}."
    if keenest.speed_up > fastest.speed_up:
        return f"The highest TAR may be the fastest: {gives(keenest)}, predicted; {gives(fastest)}, measured."
    return f"The highest TAR is not the fastest: {gives(keenest)}, {gives(fastest)}."


def tar_by_set(run: RunView) -> Figure | Gap:
    """As the paper's Table 3."""
    found = [one for one in run.entries if one.sets]
    if not found:
        return Gap("TAR by prompt set", NO_REPLAYS)
    rows = [
        tar_cell(one, name, one.best.size if one.prediction else 0)
        for one in found
        for name in run.sets
        if name in one.sets
    ]
    columns = ("proposer", "prompt set", "size", "TAR", "from", "to")
    table = Table(columns, [(r["name"], r["set"], r["size"], r["tar"], r["low"], r["high"]) for r in rows])
    return Figure("sets", _easiest(rows, run.sets), tar_chart(rows, run.sets), table, TAR, rows_high(len(found)))


def tar_chart(rows: Values, sets: Sequence[str], lines: int = 1) -> alt.TopLevelMixin:
    """Labels of so many lines down, prompt sets across; each cell has its TAR."""
    low, high = min(row["tar"] for row in rows), max(row["tar"] for row in rows)
    angle = -30 if len(sets) > UPRIGHT else 0
    order = list(dict.fromkeys(row["label"] for row in rows))
    labels = alt.Axis(labelExpr="split(datum.label, '\\n')", labelOffset=-HALF_LINE * (lines - 1), labelLimit=LIMIT)
    base = alt.Chart(data(rows)).encode(
        x=alt.X("set:N", sort=list(sets), title="prompt set", axis=alt.Axis(labelAngle=angle, labelLimit=100)),
        y=alt.Y("label:N", sort=order, title=None, axis=labels),
    )
    cells = base.mark_rect().encode(
        color=alt.Color("tar:Q", title="TAR", scale=alt.Scale(scheme="blues"), legend=None),
        tooltip=[
            alt.Tooltip("name:N", title="proposer"),
            alt.Tooltip("set:N", title="prompt set"),
            alt.Tooltip("size:Q", title="size"),
            alt.Tooltip("tar:Q", title="TAR", format=".2f"),
            alt.Tooltip("low:Q", title="95 % from", format=".2f"),
            alt.Tooltip("high:Q", title="95 % to", format=".2f"),
        ],
    )
    dark = low + DARK * (high - low)
    numbers = base.mark_text(fontSize=12 if len(sets) <= MANY else 10).encode(
        text=alt.Text("tar:Q", format=".2f"),
        color=alt.condition(f"datum.tar > {dark}", alt.value("white"), alt.value("black")),
    )
    return alt.layer(cells, numbers)


def tar_cell(one: Entry, name: str, size: int) -> dict[str, Any]:
    """On a prompt set, at a size; where that is not known, or was not replayed, at the largest."""
    tars = one.sets[name]
    at = size if size in tars.tar else max(tars.tar)
    low, high = tars.bounds(at)
    about = {"label": one.label, "name": one.name, "set": name, "size": at}
    return about | {"tar": tars.tar[at], "low": low, "high": high}


def _easiest(rows: list[dict[str, Any]], sets: list[str]) -> str:
    of_best = [row for row in rows if row["label"] == rows[0]["label"]]
    most, least = (pick(of_best, key=lambda row: row["tar"]) for pick in (max, min))
    if len(sets) == 1:
        return f"On {sets[0]}, {most['label']} gives {most['tar']:.2f} tokens an iteration."
    return (
        f"{most['label']} gives most on {most['set']}, {most['tar']:.2f} tokens an iteration, "
        f"and least on {least['set']}, {least['tar']:.2f}."
    )


def accuracy_against_tar(run: RunView) -> Figure | Gap:
    """The paper's Figure 5."""
    rows: list[dict[str, Any]] = [
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
    if run.accuracy is None or not rows:
        names = [entry.draft for entry in run.entries if entry.drafter == "model"] or ["DRAFT"]
        options = ("--draft", *names, "--trace", f"{run.folder}/trace.jsonl", "--out", str(run.folder))
        return Gap(
            "accuracy against TAR", "No accuracy was measured; run", shlex.join(("shallowdraft", "accuracy", *options))
        )
    base = alt.Chart(data(rows)).encode(
        x=alt.X("tar:Q", title="TAR: tokens an iteration", scale=NEAR),
        color=chosen(list(dict.fromkeys(row["kind"] for row in rows))),
    )
    tooltip = [alt.Tooltip("name:N", title="draft"), alt.Tooltip("kind:N", title="task"), alt.Tooltip("accuracy:Q")]
    axis = alt.Axis(format="%", title="task accuracy")
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        y=alt.Y("accuracy:Q", axis=axis, scale=NEAR), tooltip=tooltip
    )
    bars = base.mark_rule().encode(y=alt.Y("low:Q", axis=axis, scale=NEAR), y2="high:Q")
    columns = ("draft", "task", "TAR", "accuracy", "from", "to", "loss")
    table = Table(columns, [tuple(row.values()) for row in rows])
    claims = " ".join(f"{task}: {claim.statement}." for task, claim in run.accuracy.claims.items())
    note = f"Of drafts alone, by the likelihood of choices. Bars are 95 % intervals over questions. {claims}"
    return Figure(
        "accuracy",
        _foretold({task: claim.of_accuracy for task, claim in run.accuracy.claims.items()}),
        alt.layer(bars, points),
        table,
        note,
    )


def _foretold(ranks: dict[str, float | None]) -> str:
    known = [f"{rank:+.2f} on {name}" for name, rank in ranks.items() if rank is not None]
    if not known:
        return "Accuracy says nothing of TAR here: that of every draft may be chance, or there are too few drafts."
    return (
        f"The rank correlation of accuracy with TAR is {', '.join(known)}; at 1 the best model would be accepted most."
    )
