"""Ways of speculating: what proposes, and how much of it in an iteration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shallowdraft.decoding.options import DrafterName, Options
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree

ProposerKey = tuple[DrafterName, str]
"""A kind of drafter, and which one of that kind."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A proposer at a lookahead, or with a tree."""

    draft: str = field(compare=False)
    """What the proposer is called: a draft model as somebody named it, or what tells proposers of a kind apart."""
    lookahead: int
    drafter: DrafterName = "model"
    tree: tuple[int, ...] = ()
    """Of proposals that branch: the parents of their nodes."""
    digest: str = ""
    """Content of the draft model or heads; the name where a name says all."""
    dtype: str = ""
    """Precision of the draft model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or self.draft)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Candidate":
        """Read it from a record; earlier records know draft models alone, and by name."""
        return cls(
            record["draft"],
            record["lookahead"],
            record.get("drafter", "model"),
            tuple(record.get("tree", ())),
            record.get("digest", ""),
            record.get("dtype", ""),
        )

    @classmethod
    def with_draft(
        cls, draft: Model, lookahead: int, drafter: DrafterName = "model", tree: Tree | None = None
    ) -> "Candidate":
        """A draft model's way of proposing."""
        return cls(draft.name, lookahead, drafter, tree.parents if tree else (), draft.digest, draft.precision)

    def options(self, proposers: Mapping[ProposerKey, Options]) -> Options:
        """To generate in this way, with the proposer that is its."""
        found = proposers[self.drafter, self.draft].copy()
        found["lookahead"] = self.lookahead
        if self.tree:
            found["tree"] = Tree(self.tree)
        return found


def drafting(drafts: Mapping[str, Model]) -> dict[ProposerKey, Options]:
    """Draft models by name as proposers."""
    return {("model", name): Options(draft=draft) for name, draft in drafts.items()}
