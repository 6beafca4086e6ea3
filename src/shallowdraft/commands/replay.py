"""shallowdraft replay: what a target would accept of each draft, at every lookahead, from one pass."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import ClusterCommand, Drafts, Json, Lookahead, Name, Nodes, Trace
from shallowdraft.errors import OptionError
from shallowdraft.limits import MOST_NODES
from shallowdraft.records import write_whole

if TYPE_CHECKING:
    from shallowdraft.results import DraftReplay, Replays


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(ClusterCommand):
    """Run each draft once over a trace: tokens an iteration (TAR) at every lookahead from 1 to 32, with 95 % intervals.

    Under greedy decoding these are the live engine's counts, token for token; under sampling their expectation.
    Example: shallowdraft replay --trace trace.jsonl --drafts DIR1 DIR2
    """

    trace: Trace
    drafts: Drafts
    nodes: Nodes = None
    out: Name = None
    """With --nodes and one draft: file for the tree that keeps most of its choices, for generate --tree."""
    min_confidence: Annotated[tuple[float, ...], tyro.conf.arg(metavar="P")] = ()
    """Also find what generate --min-confidence P would keep, for each of these P, with --lookahead tokens at most."""
    lookahead: Lookahead = 5
    json_output: Json = False
    """Print {"drafts": [{"name", "tar", "tar_interval", "acceptance_by_position", "silence", "sets", "prompts"}, …]};
    with --nodes each has a "tree" {"parents", "tar"}, with --min-confidence a "confidence" [{"min_confidence",
    "acceptance_rate", "drafted", "tar", …}, …]."""

    def run(self) -> int:
        from shallowdraft.api.measuring import replay

        if self.nodes is not None and not 1 <= self.nodes <= MOST_NODES:
            raise OptionError(f"--nodes is {self.nodes}; a tree has 1 to {MOST_NODES}")
        if wrong := [least for least in self.min_confidence if not 0 <= least <= 1]:
            raise OptionError(f"--min-confidence is {wrong[0]:g}; it is a probability, from 0 to 1")
        if self.out is not None and (self.nodes is None or len(self.drafts) > 1):
            raise OptionError("--out goes with --nodes and one of --drafts")
        self.set_threads()
        result = replay(**self.arguments(replay))
        for why in result.failed.values():
            print(f"error: {why}", file=sys.stderr)
        if self.out is not None and (tree := result.drafts[0].tree):
            write_whole(Path(self.out), json.dumps(asdict(tree)) + "\n")
        if self.json_output:
            print(json.dumps(result.to_json()))
        elif result.drafts:
            show(result, self.lookahead)
        return 2 if result.failed else 0


def show(result: "Replays", lookahead: int) -> None:
    """Print TAR by lookahead, where drafts are silent, and trees and confidences if they were asked for."""
    from shallowdraft.display.tables import new_table, table_console
    from shallowdraft.results import TYPICAL

    table = new_table(*result.columns, title=result.caption)
    for name, *tars, interval in result.cells:
        table.add_row(str(name), *(f"{tar:.2f}" for tar in tars), str(interval))
    console = table_console()
    console.print(table)
    for draft in result.drafts:
        if silence := draft.record.silence.get(TYPICAL):
            console.print(f"at lookahead {TYPICAL} {draft.draft} is {silence}", soft_wrap=True)
    for draft in result.drafts:
        if tree := draft.tree:
            nodes = len(tree.parents)
            print(f"{draft.draft}: a tree of {nodes} nodes, {tree.depth} deep, has TAR {tree.tar:.2f}")
        if draft.confidence:
            _show_confidence(draft, lookahead)


def _show_confidence(draft: "DraftReplay", lookahead: int) -> None:
    from shallowdraft.display.tables import new_table, table_console

    title = f"{draft.draft}, at most {lookahead} tokens, as long as each is this sure"
    table = new_table("min confidence", "drafted an iteration", "accepted", "TAR", title=title)
    for figures in draft.confidence:
        row = figures.to_json()
        cells = f"{row['drafted']:.2f}", f"{row['acceptance_rate']:.0%}", f"{row['tar']:.2f}"
        table.add_row(f"{row['min_confidence']:g}", *cells)
    table_console().print(table)
