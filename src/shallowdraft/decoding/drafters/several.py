"""A draft model that draws several chains of tokens independently; they are verified as one tree."""

from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.drafters.tree import create_branching
from shallowdraft.decoding.options import Settings
from shallowdraft.models.model import Model


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter of independent chains, which share `settings.nodes` tokens evenly."""
    return create_branching(target, settings, independent=True)
