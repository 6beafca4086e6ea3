"""The table of drafters, and the function that creates one."""

from collections.abc import Callable

from shallowdraft.decoding.drafters import medusa, model, ngram, several, skip, tree
from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.options import Settings
from shallowdraft.models.model import Model
from shallowdraft.runs.candidate import DrafterName

CREATE: dict[DrafterName, Callable[[Model, Settings], Drafter]] = {
    "model": model.create,
    "tree": tree.create,
    "several": several.create,
    "skip": skip.create,
    "ngram": ngram.create,
    "medusa": medusa.create,
}
"""A new drafter needs its file, an entry here, and its name in `options.py`."""


def new_drafter(target: Model, settings: Settings) -> Drafter:
    """Create the drafter that the settings name, after checking that it fits the target."""
    return CREATE[settings.drafter](target, settings)
