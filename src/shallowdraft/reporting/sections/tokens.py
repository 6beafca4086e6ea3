"""Which tokens came from the draft: outputs token by token, where the fastest proposer does best and worst."""

from dataclasses import dataclass

from shallowdraft.reporting.figures import Gap
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.runs.candidate import DrafterName
from shallowdraft.runs.tokens import TokenSources

SOURCE_MEANINGS = {
    "accepted": "a draft token that the target accepted",
    "correction": "the target's token in the place of a rejected draft token",
    "bonus": "the target's token after a proposal that was accepted whole",
    "own": "the target's token where nothing was proposed",
}
NO_TEXT = "·"  # a token without text of its own
NEW_LINE, RETURN_SIGN = "\n", "↵"


@dataclass(frozen=True)
class ShownToken:
    """A piece of text and its source."""

    text: str
    source: str
    tip: str | None
    """The rejected proposal, if it is known."""


@dataclass(frozen=True)
class ShownOutput:
    """An output as one proposer made it."""

    label: str
    where: str
    tar: float
    tokens: list[ShownToken]


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt and its output, first by the fastest proposer, then by the others."""

    title: str
    text: str
    """The end of the prompt."""
    outputs: list[ShownOutput]


def shown_prompts(run: RunView) -> list[ShownPrompt] | Gap:
    """Return the prompts on which the fastest proposer has the highest TAR, and those on which it has the lowest."""
    entries = {(*entry.proposer, entry.best.lookahead): entry for entry in run.predicted}
    texts = [text for text in run.texts if _candidate(text) in entries]
    if not texts:
        sentence = "The run has none. Run the same study command again; it reuses the records that exist."
        return Gap("outputs token by token", sentence)
    fastest = min((_candidate(text) for text in texts), key=list(entries).index)
    ranked = sorted((text for text in texts if _candidate(text) == fastest), key=lambda text: -text.tar)
    middle = (len(ranked) + 1) // 2  # a study keeps as many prompts of high TAR as of low
    halves = [("Highest TAR", ranked[:middle]), ("Lowest TAR", ranked[middle:][::-1])]
    prompts = []
    for rank, half in halves:
        for first in half:
            same_prompt = [first, *(text for text in texts if _same_prompt(text, first))]
            outputs = [_shown_output(entries[_candidate(text)], text) for text in same_prompt]
            prompts.append(ShownPrompt(f"{rank}: prompt {first.id} of {first.set}", first.prompt, outputs))
    return prompts


def _candidate(text: TokenSources) -> tuple[DrafterName, str, int]:
    return text.drafter, text.draft, text.lookahead


def _same_prompt(text: TokenSources, first: TokenSources) -> bool:
    """Return whether another proposer made the text after the same prompt."""
    return text is not first and (text.set, text.id, text.sample) == (first.set, first.id, first.sample)


def _shown_output(entry: Entry, text: TokenSources) -> ShownOutput:
    return ShownOutput(entry.label, entry.best.where, text.tar, [_shown_token(*token) for token in text.tokens])


def _shown_token(text: str, source: str, replaced: str | None) -> ShownToken:
    tip = None if replaced is None else f"instead of “{replaced.replace(NEW_LINE, RETURN_SIGN)}”"
    return ShownToken(text.replace(NEW_LINE, RETURN_SIGN + NEW_LINE) or NO_TEXT, source, tip)
