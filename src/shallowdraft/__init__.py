"""Find, build and prove the fastest draft model for your LLM.

import shallowdraft as sd
target, draft = sd.load("target-folder"), sd.load_draft("draft-folder")
out = sd.generate(target, "Once upon a time", draft=draft, lookahead=5)
result = sd.study("target-folder", ["draft-folder"], prompts="arena", out="run")
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shallowdraft.api.building import distill, pretrain, prune, train_heads
    from shallowdraft.api.designing import design, search
    from shallowdraft.api.measuring import import_trace, predict, profile, record, replay, study
    from shallowdraft.api.showing import accuracy, bench, export, open_run, report
    from shallowdraft.decoding.generate import Stream, generate, stream
    from shallowdraft.decoding.results import Generation, Piece
    from shallowdraft.decoding.statistics import Statistics, total
    from shallowdraft.errors import ShallowdraftError
    from shallowdraft.models.heads import load_heads
    from shallowdraft.models.model import Model, check_vocabulary, load, load_draft
    from shallowdraft.shapes.shape import ModelShape

__version__ = "0.1.0"

_MODULES = {
    "api.building": ("distill", "pretrain", "prune", "train_heads"),
    "api.designing": ("design", "search"),
    "api.measuring": ("import_trace", "predict", "profile", "record", "replay", "study"),
    "api.showing": ("accuracy", "bench", "export", "open_run", "report"),
    "decoding.generate": ("Stream", "generate", "stream"),
    "decoding.results": ("Generation", "Piece"),
    "decoding.statistics": ("Statistics", "total"),
    "errors": ("ShallowdraftError",),
    "models.heads": ("load_heads",),
    "models.model": ("Model", "check_vocabulary", "load", "load_draft"),
    "shapes.shape": ("ModelShape",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Generation",
    "Model",
    "ModelShape",
    "Piece",
    "ShallowdraftError",
    "Statistics",
    "Stream",
    "accuracy",
    "bench",
    "check_vocabulary",
    "design",
    "distill",
    "export",
    "generate",
    "import_trace",
    "load",
    "load_draft",
    "load_heads",
    "open_run",
    "predict",
    "pretrain",
    "profile",
    "prune",
    "record",
    "replay",
    "report",
    "search",
    "stream",
    "study",
    "total",
    "train_heads",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: torch is not needed to print a help text."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
