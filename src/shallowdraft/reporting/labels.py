"""Short names of proposers and runs, for charts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

LONGEST_LABEL = 22  # characters


def short_labels(proposers: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return short names of proposers, given drafter, draft and name: of a path the end that tells drafts apart."""
    prefixes = {"model": "", "tree": "tree "}
    short_drafts = path_ends([draft for drafter, draft, _ in proposers if drafter in prefixes])
    labels = [
        shorten(prefixes[drafter] + short_drafts[draft] if drafter in prefixes else name)
        for drafter, draft, name in proposers
    ]
    return number_if_equal(labels)


def number_if_equal(names: list[str]) -> list[str]:
    """Return the names, with numbers before them if any are equal."""
    if len(set(names)) == len(names):
        return names
    return [f"{number} {name}" for number, name in enumerate(names, 1)]


def path_ends(paths: Iterable[str]) -> dict[str, str]:
    """Return the shortest ends of paths, of the same number of parts, that all differ."""
    parts = {path: Path(path).parts for path in paths}
    longest = max(map(len, parts.values()), default=0)
    for count in range(1, longest + 1):
        short = {path: "/".join(components[-count:]) for path, components in parts.items()}
        if len(set(short.values())) == len(parts):
            return short
    return {path: path for path in parts}


def shorten(text: str) -> str:
    """Return the end of a text that fits into a label."""
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]
