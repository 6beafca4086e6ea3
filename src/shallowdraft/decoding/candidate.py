"""Candidates, which a study compares: what proposes, and how many tokens an iteration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shallowdraft.decoding.options import DrafterName, Options
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree

ProposerKey = tuple[DrafterName, str]
"""A kind of drafter, and the name that tells proposers of this kind apart."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A proposer at a lookahead, or with a tree."""

    draft: str = field(compare=False)
    """Name of the proposer: a draft model's as the user wrote it, or what tells proposers of a kind apart."""
    lookahead: int
    drafter: DrafterName = "model"
    tree: tuple[int, ...] = ()
    """Parents of the nodes, if proposals branch."""
    digest: str = ""
    """Digest of the draft model's or heads' content; the name if there is no content."""
    dtype: str = ""
    """Precision of the draft model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or self.draft)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Candidate":
        """Read a candidate from a record; early records have only draft models, and only their names."""
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
        """Create a candidate whose proposer is a draft model."""
        return cls(draft.name, lookahead, drafter, tree.parents if tree else (), draft.digest, draft.precision)

    def options(self, proposers: Mapping[ProposerKey, Options]) -> Options:
        """Return the options with which `generate` proposes like this candidate."""
        options = proposers[self.drafter, self.draft].copy()
        options["lookahead"] = self.lookahead
        if self.tree:
            options["tree"] = Tree(self.tree)
        return options


def drafting(drafts: Mapping[str, Model]) -> dict[ProposerKey, Options]:
    """Return draft models, given by name, as proposers."""
    return {("model", name): Options(draft=draft) for name, draft in drafts.items()}
