"""What would be better: the TAR, or else the time of drafting, at which a proposer would be as fast as the winner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from shallowdraft import cost
from shallowdraft.cost import Iteration
from shallowdraft.reporting.figures import INK, UNFINISHED, Figure, Gap, Table, chosen, data, marked, rows_high, stacked
from shallowdraft.reporting.run import Entry, RunView

HAS, EXTRA, BEYOND = "TAR it has", "extra TAR", "extra, out of reach"
NOW, PARITY, NEVER = "drafting now", "at parity", "not even at 0 ms"
ALONE = "There is one proposer, so that none has to catch up with another; name more --drafts in the study."


@dataclass(frozen=True)
class Lag:
    """How far a proposer is behind the winner, on the machine as it met it."""

    one: Entry
    extra_tar: float
    """Below 0: by the model it is the faster one."""
    parity_s: float
    """Of drafting an iteration; below 0 no draft of its TAR could be as fast."""

    @property
    def draft_s(self) -> float:
        return self.one.best.iteration.draft_s

    @property
    def needed_tar(self) -> float:
        return self.one.best.tar + self.extra_tar

    @property
    def most_tar(self) -> float:
        return self.one.best.most_tar

    @property
    def reduction(self) -> float | None:
        """Of the time of drafting, in percent of it; None where that takes none."""
        return 100 * (1 - self.parity_s / self.draft_s) if self.draft_s else None

    @property
    def about(self) -> dict[str, str]:
        return {"label": self.one.label, "name": self.one.name, "where": self.one.best.where}


def lags(entries: Sequence[Entry]) -> list[Lag]:
    """Of all, the winner first."""
    winner = entries[0].best
    found = [Lag(entries[0], 0.0, winner.iteration.draft_s)]
    for one in entries[1:]:
        pace = one.best.plain_s / winner.plain_s
        paced = Iteration(*(pace * seconds for seconds in vars(winner.iteration).values()))
        pair = (one.best.tar, one.best.iteration, winner.tar, paced)
        found.append(Lag(one, cost.extra_tar(*pair), cost.parity_latency(*pair)))
    return found


def extra_tar(run: RunView) -> Figure | Gap:
    """The paper's Figure 7."""
    if len(run.predicted) < 2:
        return Gap("extra TAR", ALONE if run.predicted else UNFINISHED)
    found = lags(run.predicted)
    rows = [row for lag in found for row in _stretches(lag)]
    tooltip = [
        alt.Tooltip("name:N", title="proposer"),
        alt.Tooltip("where:N", title="size"),
        alt.Tooltip("kind:N", title="part"),
        alt.Tooltip("tar:Q", title="TAR", format=".2f"),
    ]
    x = alt.X("tar:Q", title="TAR: tokens an iteration", stack="zero")
    chart = stacked(rows, x, _kinds(rows, (HAS, EXTRA, BEYOND)), tooltip)
    columns = ("proposer", "size", "TAR", "extra TAR", "TAR with it", "highest TAR there can be")
    table = Table(
        columns,
        [
            (lag.one.name, lag.one.best.where, lag.one.best.tar, lag.extra_tar, lag.needed_tar, lag.most_tar)
            for lag in found
        ],
    )
    note = (
        "Extra TAR is what a proposer lacks to be as fast as the winner, by the throughput model. An iteration gives "
        "its lookahead and one token at most, and one where its draft is silent: what lies beyond is out of reach."
    )
    return Figure("extra", _lacks(found), chart, table, note, rows_high(len(found)))


def _stretches(lag: Lag) -> list[dict[str, Any]]:
    """What it has, what it lacks, what of that no proposal of its length can bring."""
    has, needed = lag.one.best.tar, max(lag.one.best.tar, lag.needed_tar)
    lengths = {HAS: has, EXTRA: min(needed, lag.most_tar) - has, BEYOND: needed - lag.most_tar}
    return [
        lag.about | {"kind": kind, "order": order, "tar": length}
        for order, (kind, length) in enumerate(lengths.items())
        if length > 0
    ]


def _kinds(rows: Iterable[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    """Those that there are."""
    there = {row["kind"] for row in rows}
    return [kind for kind in kinds if kind in there]


def _lacks(found: Sequence[Lag]) -> str:
    first, second = found[0].one.label, found[1]
    name = second.one.label
    said = f"To be as fast as {first}, {name} needs {second.extra_tar:.2f} tokens an iteration more"
    if second.needed_tar > second.most_tar:
        said = (
            f"To be as fast as {first}, {name} needs TAR {second.needed_tar:.2f}; it gets {second.most_tar:.3g} at most"
        )
    if second.extra_tar <= 0:
        said = f"By the model {name} has the TAR to be as fast as {first}"
    return said + _hopeless([lag.needed_tar > lag.most_tar for lag in found[1:]], "whatever their TAR")


def _hopeless(others: Sequence[bool], whatever: str) -> str:
    """How many there are, if the first alone does not say it."""
    return f"; {sum(others)} of {len(others)} others cannot be, {whatever}." if any(others[1:]) else "."


def parity(run: RunView) -> Figure | Gap:
    """The paper's Table 5."""
    if len(run.predicted) < 2:
        return Gap("parity latency", ALONE if run.predicted else UNFINISHED)
    found = lags(run.predicted)
    rows = [_now(found[0]), *(row for lag in found[1:] for row in (_now(lag), _at_parity(lag)))]
    base = alt.Chart(data(rows)).encode(
        x=alt.X("ms:Q", title="ms of drafting an iteration"),
        y=alt.Y("label:N", sort=[lag.one.label for lag in found], title=None),
    )
    kinds = _kinds(rows, (NOW, PARITY, NEVER))
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        color=chosen(kinds),
        shape=marked(kinds),
        tooltip=[
            alt.Tooltip("name:N", title="proposer"),
            alt.Tooltip("where:N", title="size"),
            alt.Tooltip("kind:N", title="time"),
            alt.Tooltip("ms:Q", format=".3f"),
        ],
    )
    columns = ("proposer", "size", "draft ms", "parity draft ms", "reduction %")
    table = Table(
        columns,
        [(lag.one.name, lag.one.best.where, 1e3 * lag.draft_s, 1e3 * lag.parity_s, lag.reduction) for lag in found],
    )
    note = (
        "Parity latency: the time of drafting at which a proposer, its TAR unchanged, would be as fast as the winner. "
        "Below 0 ms there is none: a draft of that TAR cannot be as fast."
    )
    chart = alt.layer(base.mark_line(strokeWidth=1.5, color=INK).encode(detail="label:N"), points)
    return Figure("parity", _must_take(found), chart, table, note, rows_high(len(found)))


def _now(lag: Lag) -> dict[str, Any]:
    return lag.about | {"kind": NOW, "ms": 1e3 * lag.draft_s}


def _at_parity(lag: Lag) -> dict[str, Any]:
    return lag.about | {"kind": PARITY if lag.parity_s >= 0 else NEVER, "ms": max(0.0, 1e3 * lag.parity_s)}


def _must_take(found: Sequence[Lag]) -> str:
    second = found[1]
    name, ms = second.one.label, f"{1e3 * second.parity_s:.2f} ms instead of {1e3 * second.draft_s:.2f}"
    said = f"To be as fast as {found[0].one.label}, {name} must draft an iteration in {ms}"
    if second.parity_s >= second.draft_s:
        said = f"{name} may take {ms} to draft an iteration and be as fast as {found[0].one.label}"
    if second.parity_s < 0:
        said = f"No time of drafting makes {name} as fast as {found[0].one.label}"
    return said + _hopeless([lag.parity_s < 0 for lag in found[1:]], "even if drafting took no time")
