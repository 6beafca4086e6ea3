"""Look inside: texts token by token, where the winner does best and where it does worst."""

from dataclasses import dataclass

from shallowdraft.reporting.figures import Gap
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.runs.tokens import TokenSources

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


def generations(run: RunView) -> list[Generation] | Gap:
    """Prompts of most and of least tokens an iteration."""
    candidates = {(one.drafter, one.draft, one.best.lookahead): one for one in run.predicted}
    known = [text for text in run.texts if _candidate(text) in candidates]
    if not known:
        return Gap("texts token by token", "None was kept; run the same study command again, it reuses the rest.")
    winner = min((_candidate(text) for text in known), key=list(candidates).index)
    ordered = sorted((text for text in known if _candidate(text) == winner), key=lambda text: -text.tar)
    middle = (len(ordered) + 1) // 2  # a study keeps both ends
    best, worst = ordered[:middle], ordered[middle:][::-1]
    return [
        Generation(
            kind,
            first.set,
            first.id,
            first.prompt,
            [
                _reading(candidates[_candidate(text)], text)
                for text in [first, *(text for text in known if _beside(text, first))]
            ],
        )
        for kind, texts in (("best", best), ("worst", worst))
        for first in texts
    ]


def _candidate(text: TokenSources) -> tuple[str, str, int]:
    return text.drafter, text.draft, text.lookahead


def _beside(text: TokenSources, first: TokenSources) -> bool:
    """Whether it is another proposer on the same prompt."""
    return text is not first and (text.set, text.id, text.sample) == (first.set, first.id, first.sample)


def _reading(entry: Entry, text: TokenSources) -> Reading:
    return Reading(entry.label, entry.best.where, text.tar, [_token(*one) for one in text.tokens])


def _token(text: str, source: str, replaced: str | None) -> Token:
    tip = None if replaced is None else f"instead of “{replaced.replace(NEW_LINE, RETURN)}”"
    return Token(text.replace(NEW_LINE, RETURN + NEW_LINE) or HELD_BACK, source, tip)
