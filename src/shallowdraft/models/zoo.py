"""The models that ship with the package: `zoo:target` and drafts of it."""

import json
from pathlib import Path
from typing import Any

from shallowdraft.errors import CheckpointError

PREFIX = "zoo:"
FOLDER = Path(__file__).parent.parent / "zoo"


def names() -> list[str]:
    """Return the names of the models: the target first, then its drafts."""
    folders = sorted(card.parent.name for card in FOLDER.glob("*/card.json"))
    return sorted(folders, key=lambda name: name != "target")


def folder(name: str) -> Path:
    """Return the folder of `zoo:name`."""
    plain = name.removeprefix(PREFIX)
    if plain not in names():
        present = ", ".join(PREFIX + model for model in names()) or "none: build it with `make zoo CORPUS=…`"
        raise CheckpointError(f"{name}: no such model in the zoo; there are {present}")
    return FOLDER / plain


def card(name: str) -> dict[str, Any]:
    """Return a model's card: shape, recipe, training tokens and time, held-out figures, the data and its licences."""
    content: dict[str, Any] = json.loads((folder(name) / "card.json").read_text(encoding="utf-8"))
    return {"name": name.removeprefix(PREFIX)} | content
