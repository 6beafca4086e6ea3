"""shallowdraft replay: what a target would accept of each draft, at every lookahead, from one pass."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import ClusterCommand, Name, Number
from shallowdraft.errors import OptionError, ShallowdraftError
from shallowdraft.records import write_whole

if TYPE_CHECKING:
    from shallowdraft.records import Record
    from shallowdraft.replay.acceptance import Acceptance
    from shallowdraft.replay.traces import Trace

SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # lookaheads in the table; JSON has all


@dataclass(frozen=True, kw_only=True)
class Replay(ClusterCommand):
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
        from shallowdraft.models.tree import MOST_NODES
        from shallowdraft.replay.traces import read_trace

        if not self.draft:
            raise OptionError("give --draft with one or more checkpoints")
        if self.nodes is not None and not 1 <= self.nodes <= MOST_NODES:
            raise OptionError(f"--nodes is {self.nodes}; a tree has 1 to {MOST_NODES}")
        if self.tree is not None and (self.nodes is None or len(self.draft) > 1):
            raise OptionError("--tree goes with --nodes and one --draft")
        self.set_threads()
        trace = read_trace(Path(self.trace))
        results = dict(self.executor().map(partial(self._replay, trace), self.draft))
        found, failed = [], 0
        trees: "dict[str, Record]" = {}
        for number, name in enumerate(self.draft):
            result = results[number]
            if isinstance(result, ShallowdraftError):
                if len(self.draft) == 1:
                    raise result
                failed += 1
                print(f"error: {result}", file=sys.stderr)
                continue
            found.append(result[0])
            if result[1]:
                trees[name] = result[1]
        if self.tree is not None:
            write_whole(Path(self.tree), json.dumps(trees[self.draft[0]]) + "\n")
        if self.json_output:
            more = {name: {"tree": one} for name, one in trees.items()}
            print(json.dumps({"drafts": [one.to_json() | more.get(one.draft, {}) for one in found]}))
        elif found:
            _show(found)
            for name, one in trees.items():
                print(f"{name}: a tree of {self.nodes} nodes, {one['depth']} deep, has TAR {one['tar']:.2f}")
        return 2 if failed else 0

    def _replay(self, trace: "Trace", name: str) -> "tuple[Acceptance, Record | None] | ShallowdraftError":
        """Of one draft: acceptance and, if it is wanted, a tree; or why there is none."""
        from shallowdraft.replay.acceptance import replay
        from shallowdraft.replay.ranks import replay_ranks

        best = None
        try:
            draft = self.load_draft(name)
            if self.nodes is not None:
                ranks = replay_ranks(draft, trace)
                tree = ranks.tree(self.nodes)
                best = {"parents": tree.parents, "depth": tree.depth, "tar": ranks.tar(tree)}
            return replay(draft, trace), best
        except ShallowdraftError as error:
            return error


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
