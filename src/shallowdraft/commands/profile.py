"""shallowdraft profile: how long an iteration takes on this machine."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.options import DraftCommand
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.profiling.latency import Profile as Measured


@dataclass(frozen=True, kw_only=True)
class Profile(DraftCommand):
    """Time a target and drafts on this machine: iterations by draft, lookahead, context and batch size.

    Each sample stands beside one of plain decoding, so that a machine that others use too does not blur the ratio.
    Stopped half-way, the same command goes on; with another --draft it adds to the file.
    Example: shallowdraft profile --target DIR --draft DIR1 DIR2 --out profile.jsonl
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    draft: tuple[str, ...]
    """Drafts, named likewise."""
    out: str
    """The profile: a file of JSON lines with every sample."""
    lookaheads: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    """Draft tokens an iteration; others lie between on a straight line."""
    contexts: tuple[int, ...] = (64, 256)
    """Tokens before the first new one."""
    batches: tuple[int, ...] = (1,)
    """Prompts at a time."""
    rounds: int = 5
    """Samples of each, in rounds over all of them."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.commands.progress import follow
        from shallowdraft.profiling.latency import measure, points, read_profile

        if not self.draft or min((*self.lookaheads, *self.contexts, *self.batches, self.rounds), default=0) < 1:
            raise OptionError("--draft, --lookaheads, --contexts, --batches and --rounds: at least one each, from 1 up")
        self.set_threads()
        target = sd.load(self.target, self.dtype, self.device)
        drafts = {name: self.load_draft(name) for name in self.draft}
        wanted = points(self.draft, self.lookaheads, self.contexts, self.batches)
        follow("profiling", measure(target, drafts, wanted, Path(self.out), self.rounds), self.rounds * len(wanted))
        _show(read_profile(Path(self.out)), self.contexts, self.batches)
        return 0


def _show(profile: "Measured", contexts: tuple[int, ...], batches: tuple[int, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from shallowdraft.commands.tables import table_console

    console = table_console()
    for batch, context in product(batches, contexts):
        plain_ms = 1e3 * profile.plain_s(context, batch)
        title = f"ms an iteration (of them drafting); context {context}, batch {batch}; plain decoding {plain_ms:.2f}"
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title)
        table.add_column("draft", no_wrap=True)
        lookaheads = profile.lookaheads(profile.drafts[0])
        for lookahead in lookaheads:
            table.add_column(str(lookahead), justify="right", no_wrap=True)
        for draft in profile.drafts:
            found = (profile.iteration(draft, lookahead, context, batch) for lookahead in lookaheads)
            table.add_row(draft, *(f"{1e3 * one.total_s:.2f} ({1e3 * one.draft_s:.2f})" for one in found))
        console.print(table)
