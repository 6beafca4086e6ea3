"""The models that ship with the package: `zoo:target` and drafts of it."""

import json
from pathlib import Path
from typing import Any

from shallowdraft.errors import CheckpointError

PREFIX = "zoo:"
FOLDER = Path(__file__).parent.parent / "zoo"


def names() -> list[str]:
    """The target first, then its drafts."""
    found = sorted(card.parent.name for card in FOLDER.glob("*/card.json"))
    return sorted(found, key=lambda name: name != "target")


def folder(name: str) -> Path:
    """Where `zoo:name` lies."""
    plain = name.removeprefix(PREFIX)
    if plain not in names():
        known = ", ".join(PREFIX + one for one in names()) or "none: build it with `make zoo CORPUS=…`"
        raise CheckpointError(f"{name}: no such model in the zoo; there are {known}")
    return FOLDER / plain


def card(name: str) -> dict[str, Any]:
    """What is known about a model: shape, recipe, tokens, time, held-out figures, the data and its licences."""
    content: dict[str, Any] = json.loads((folder(name) / "card.json").read_text(encoding="utf-8"))
    return {"name": name.removeprefix(PREFIX)} | content
