"""Find, build and prove the fastest draft model for your LLM.

import shallowdraft as sd
target, draft = sd.load("target-folder"), sd.load("draft-folder")
out = sd.generate(target, "Once upon a time", draft=draft, lookahead=5)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shallowdraft.decoding.generate import Stream, generate, stream
    from shallowdraft.decoding.results import Generation, Piece
    from shallowdraft.decoding.statistics import Statistics, total
    from shallowdraft.errors import ShallowdraftError
    from shallowdraft.models.heads import load_heads
    from shallowdraft.models.model import Model, check_vocabulary, load, load_draft
    from shallowdraft.shapes.shape import ModelShape

__version__ = "0.1.0"

_HOMES = {
    "Generation": "decoding.results",
    "Model": "models.model",
    "ModelShape": "shapes.shape",
    "Piece": "decoding.results",
    "ShallowdraftError": "errors",
    "Statistics": "decoding.statistics",
    "Stream": "decoding.generate",
    "check_vocabulary": "models.model",
    "generate": "decoding.generate",
    "load": "models.model",
    "load_draft": "models.model",
    "load_heads": "models.heads",
    "stream": "decoding.generate",
    "total": "decoding.statistics",
}

__all__ = [
    "Generation",
    "Model",
    "ModelShape",
    "Piece",
    "ShallowdraftError",
    "Statistics",
    "Stream",
    "check_vocabulary",
    "generate",
    "load",
    "load_draft",
    "load_heads",
    "stream",
    "total",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: torch is not needed to print a help text."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
