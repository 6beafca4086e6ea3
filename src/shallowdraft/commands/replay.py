"""shallowdraft replay: what a target would accept of each draft, at every lookahead, from one pass."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import DraftCommand, Name, Number
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.records import Record
    from shallowdraft.replay.acceptance import Acceptance

SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # lookaheads in the table; JSON has all


@dataclass(frozen=True, kw_only=True)
class Replay(DraftCommand):
    """Run each draft once over a trace: tokens an iteration (TAR) at every lookahead from 1 to 32, with 95 % intervals.

    Under greedy decoding these are the live engine's counts, token for token; under sampling their expectation.
    Example: shallowdraft replay --trace trace.jsonl --draft DIR1 DIR2
    """

    trace: str
    """What `record` wrote."""
    draft: tuple[str, ...]
    """Checkpoint folders, hub ids or zoo names."""
    nodes: Number = None
    """Also find the token tree of so many nodes that keeps most of each draft's choices, for --drafter tree."""
    tree: Name = None
    """With --nodes and one draft: file for the tree, for generate --tree."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"drafts": [{"name", "tar", "tar_interval", "acceptance_by_position", "sets", "prompts"}, …]}; with --nodes
    each has a "tree" {"parents", "tar"}."""

    def run(self) -> int:
        from shallowdraft.errors import ShallowdraftError
        from shallowdraft.models.tree import MOST_NODES
        from shallowdraft.replay.acceptance import replay
        from shallowdraft.replay.ranks import replay_ranks
        from shallowdraft.replay.traces import read_trace

        if not self.draft:
            raise OptionError("give --draft with one or more checkpoints")
        if self.nodes is not None and not 1 <= self.nodes <= MOST_NODES:
            raise OptionError(f"--nodes is {self.nodes}; a tree has 1 to {MOST_NODES}")
        if self.tree is not None and (self.nodes is None or len(self.draft) > 1):
            raise OptionError("--tree goes with --nodes and one --draft")
        self.set_threads()
        trace = read_trace(Path(self.trace))
        found, failed = [], 0
        trees: "dict[str, Record]" = {}
        for name in self.draft:
            try:
                draft = self.load_draft(name)
                if self.nodes is not None:
                    ranks = replay_ranks(draft, trace)
                    tree = ranks.tree(self.nodes)
                    trees[name] = {"parents": tree.parents, "depth": tree.depth, "tar": ranks.tar(tree)}
                found.append(replay(draft, trace))
            except ShallowdraftError as error:
                if len(self.draft) == 1:
                    raise
                failed += 1
                print(f"error: {error}", file=sys.stderr)
        if self.tree is not None:
            Path(self.tree).write_text(json.dumps(trees[self.draft[0]]) + "\n", encoding="utf-8")
        if self.json_output:
            more = {name: {"tree": one} for name, one in trees.items()}
            print(json.dumps({"drafts": [one.to_json() | more.get(one.draft, {}) for one in found]}))
        elif found:
            _show(found)
            for name, one in trees.items():
                print(f"{name}: a tree of {self.nodes} nodes, {one['depth']} deep, has TAR {one['tar']:.2f}")
        return 2 if failed else 0


def _show(found: "list[Acceptance]") -> None:
    from shallowdraft.commands.tables import new_table, table_console

    trace = found[0].trace
    law = "greedy" if trace.sampling.greedy else f"temperature {trace.sampling.temperature:g}"
    title = f"TAR on {len(trace.outputs)} outputs of {trace.target}, {law}"
    table = new_table("draft", *(f"d={lookahead}" for lookahead in SHOWN), "95 % at 5", title=title)
    for one in sorted(found, key=lambda one: -one.tar()[5]):
        low, high = one.tar_interval()[5]
        table.add_row(one.draft, *(f"{one.tar()[d]:.2f}" for d in SHOWN), f"{low:.2f}–{high:.2f}")
    table_console().print(table)
