"""Options of `generate` for a candidate: those of its proposer, with its lookahead and tree."""

from collections.abc import Mapping

from shallowdraft.decoding.options import Options
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree
from shallowdraft.runs.candidate import Candidate, ProposerKey


def options_of(candidate: Candidate, proposers: Mapping[ProposerKey, Options]) -> Options:
    """Return the options to generate with a candidate, given those of all proposers."""
    options = proposers[candidate.proposer].copy()
    options["lookahead"] = candidate.lookahead
    if candidate.tree:
        options["tree"] = Tree(candidate.tree)
    return options


def draft_options(drafts: Mapping[str, Model]) -> dict[ProposerKey, Options]:
    """Return the options of draft models, given by name."""
    return {("model", name): Options(draft=draft) for name, draft in drafts.items()}
