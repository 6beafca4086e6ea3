"""The lengths of a batch's rows as the host knows them, so that no iteration has to ask the device for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shallowdraft.decoding.emitted import Emitted


@dataclass
class RowLengths:
    """Committed tokens of each row, and the limit at which the row ends."""

    committed: list[int]
    limits: list[int]
    draft_limit: int | None = None
    """Longest text behind which a whole proposal fits into the draft's context; None: any."""

    def __post_init__(self) -> None:
        self._prompts = list(self.committed)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple["RowLengths", int]]) -> "RowLengths":
        """Combine rows of other batches, each named by its batch and index."""
        committed = [lengths.committed[index] for lengths, index in rows]
        limits = [lengths.limits[index] for lengths, index in rows]
        return cls(committed, limits, rows[0][0].draft_limit)

    def replace_row(self, row: int, lengths: "RowLengths", index: int) -> None:
        """Take over row `index` of another batch as row `row`."""
        self.committed[row], self.limits[row] = lengths.committed[index], lengths.limits[index]

    def idle_row(self, row: int) -> None:
        """Shorten a row that has left the batch to one token, without room for more."""
        self.committed[row] = self.limits[row] = 1

    def advance(self, emitted: Emitted) -> None:
        """Add what an iteration emitted."""
        rows = zip(self.committed, emitted, self.limits, strict=True)
        self.committed = [min(length + row[0] + 1, limit) for length, row, limit in rows]

    def bound(self, unread: int = 0) -> int:
        """Return a bound on every row's length, if results of up to `unread` tokens a row have not been read yet."""
        return min(max(self.committed) + unread, max(self.limits))

    def rewind(self) -> None:
        """Go back to the end of the prompts and each row's first token."""
        self.committed = [length + 1 for length in self._prompts]

    @property
    def within_draft_context(self) -> bool:
        """Whether at least one row is short enough for the draft.

        Proposals for longer rows are wasted, but do no harm.
        """
        return self.draft_limit is None or min(self.committed) <= self.draft_limit
