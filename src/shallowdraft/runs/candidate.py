"""Candidates, which a study compares: proposers at a lookahead or with a tree."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

DrafterName = Literal["model", "tree", "several", "skip", "ngram", "medusa"]
"""Kinds of drafting: a draft model proposes a chain; it proposes a tree; it draws several chains; the target without
some of its parts proposes; an earlier occurrence in the text proposes its continuation; Medusa heads propose."""

ProposerKey = tuple[DrafterName, str]
"""A kind of drafting and the name of the draft."""


class DraftModel(Protocol):
    """A loaded draft model, as far as records describe it."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def precision(self) -> str: ...


@dataclass(frozen=True, order=True)
class Candidate:
    """A proposer at a lookahead or with a tree. Two are equal if content and settings are, whatever their names."""

    draft: str = field(compare=False)
    """The draft's name as the user typed it; for other proposers a name that tells them apart."""
    lookahead: int
    drafter: DrafterName = "model"
    tree: tuple[int, ...] = ()
    """The parent of each node of a proposed tree; empty for chains."""
    digest: str = ""
    """Content of the draft model or heads; `draft` where there are no weights."""
    dtype: str = ""
    """Precision of the draft model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or self.draft)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Candidate":
        """Read a candidate from the fields of a record; early records have draft models only, without digests."""
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
        cls, draft: DraftModel, lookahead: int, drafter: DrafterName = "model", tree: tuple[int, ...] = ()
    ) -> "Candidate":
        """Return the candidate of a loaded draft model."""
        return cls(draft.name, lookahead, drafter, tree, draft.digest, draft.precision)

    @property
    def proposer(self) -> ProposerKey:
        """The key of its proposer."""
        return self.drafter, self.draft
