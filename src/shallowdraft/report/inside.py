"""Look inside: texts token by token, where the winner does best and where it does worst."""

from dataclasses import dataclass

from shallowdraft.records import Record
from shallowdraft.report.figures import Gap
from shallowdraft.report.run import Entry, Run

SOURCES = {
    "accepted": "accepted draft token",
    "correction": "the target's correction",
    "bonus": "bonus: the target's token behind a proposal that was accepted whole",
    "own": "the target's own token, nothing was proposed",
}
HELD_BACK = "·"  # a token without text of its own
NEW_LINE, RETURN = "\n", "↵"


@dataclass(frozen=True)
class Token:
    """A piece of text and where it came from."""

    text: str
    source: str
    tip: str | None
    """What was rejected, if that is known."""


@dataclass(frozen=True)
class Reading:
    """A text as one proposer made it."""

    label: str
    where: str
    tar: float
    tokens: list[Token]


@dataclass(frozen=True)
class Generation:
    """A prompt and its text, by the winner first."""

    kind: str
    set: str
    id: str
    prompt: str
    readings: list[Reading]


def generations(run: Run) -> list[Generation] | Gap:
    """Prompts of most and of least tokens an iteration."""
    ways = {(one.drafter, one.draft, one.best.lookahead): one for one in run.predicted}
    known = [row for row in run.inside if (row["drafter"], row["draft"], row["lookahead"]) in ways]
    if not known:
        return Gap("inside", "No generation can be looked into; run the same study command again, it reuses the rest.")

    def entry(row: Record) -> Entry:
        return ways[row["drafter"], row["draft"], row["lookahead"]]

    winner = min((entry(row) for row in known), key=run.entries.index)
    ordered = sorted((row for row in known if entry(row) is winner), key=lambda row: -row["tar"])
    middle = (len(ordered) + 1) // 2  # a study keeps both ends
    best, worst = ordered[:middle], ordered[middle:][::-1]
    return [
        Generation(
            kind,
            first["set"],
            first["id"],
            first["prompt"],
            [_reading(entry(row), row) for row in [first, *(row for row in known if _beside(row, first))]],
        )
        for kind, rows in (("best", best), ("worst", worst))
        for first in rows
    ]


def _beside(row: Record, first: Record) -> bool:
    """Whether it is another proposer on the same prompt."""
    return row is not first and all(row[name] == first[name] for name in ("set", "id", "sample"))


def _reading(entry: Entry, row: Record) -> Reading:
    return Reading(entry.label, entry.best.where, row["tar"], [_token(*one) for one in row["tokens"]])


def _token(text: str, source: str, replaced: str | None) -> Token:
    tip = None if replaced is None else f"instead of “{replaced.replace(NEW_LINE, RETURN)}”"
    return Token(text.replace(NEW_LINE, RETURN + NEW_LINE) or HELD_BACK, source, tip)
