"""Ways of speculating: what proposes, and how much of it in an iteration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shallowdraft.decoding.generation import DrafterName, Options
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree

Whose = tuple[DrafterName, str]
"""A kind of drafter, and which one of that kind."""


@dataclass(frozen=True, order=True)
class Way:
    """A proposer at a lookahead, or with a tree."""

    draft: str
    """The draft model, or what else tells proposers of a kind apart."""
    lookahead: int
    drafter: DrafterName = "model"
    tree: tuple[int, ...] = ()
    """Of proposals that branch: the parents of their nodes."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Way":
        """As a record has it; earlier ones know draft models alone."""
        drafter, tree = record.get("drafter", "model"), record.get("tree", ())
        return cls(record["draft"], record["lookahead"], drafter, tuple(tree))

    def options(self, proposers: Mapping[Whose, Options]) -> Options:
        """To generate in this way, with the proposer that is its."""
        found = proposers[self.drafter, self.draft].copy()
        found["lookahead"] = self.lookahead
        if self.tree:
            found["tree"] = Tree(self.tree)
        return found


def drafting(drafts: Mapping[str, Model]) -> dict[Whose, Options]:
    """Draft models by name as proposers."""
    return {("model", name): Options(draft=draft) for name, draft in drafts.items()}
