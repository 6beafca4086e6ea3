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
    from shallowdraft.replaying.model import ModelReplay
    from shallowdraft.runs.trace import Trace

TOLD = 5  # the lookahead of which more is said
SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # lookaheads in the table; JSON has all


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(ClusterCommand):
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
    min_confidence: Annotated[tuple[float, ...], tyro.conf.arg(metavar="P")] = ()
    """Also find what generate --min-confidence P would keep, for each of these P: the draft drafts at every place."""
    lookahead: int = 5
    """With --min-confidence: the most tokens of a proposal."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"drafts": [{"name", "tar", "tar_interval", "acceptance_by_position", "silence", "sets", "prompts"}, …]};
    with --nodes each has a "tree" {"parents", "tar"}, with --min-confidence a "confidence" [{"min_confidence",
    "acceptance_rate", "drafted", "tar", …}, …]."""

    def run(self) -> int:
        from shallowdraft.limits import MAX_LOOKAHEAD, MOST_NODES
        from shallowdraft.runs.trace import read_trace

        if not self.draft:
            raise OptionError("give --draft with one or more checkpoints")
        if self.nodes is not None and not 1 <= self.nodes <= MOST_NODES:
            raise OptionError(f"--nodes is {self.nodes}; a tree has 1 to {MOST_NODES}")
        if wrong := [least for least in self.min_confidence if not 0 <= least <= 1]:
            raise OptionError(f"--min-confidence is {wrong[0]:g}; it is a probability, from 0 to 1")
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise OptionError(f"--lookahead is {self.lookahead}; it must be 1 to {MAX_LOOKAHEAD}")
        if self.tree is not None and (self.nodes is None or len(self.draft) > 1):
            raise OptionError("--tree goes with --nodes and one --draft")
        self.set_threads()
        trace = read_trace(Path(self.trace))
        results = dict(self.executor().map(partial(self._replay, trace), self.draft))
        acceptances, more, failed = [], {}, 0
        for number, name in enumerate(self.draft):
            result = results[number]
            if isinstance(result, ShallowdraftError):
                if len(self.draft) == 1:
                    raise result
                failed += 1
                print(f"error: {result}", file=sys.stderr)
                continue
            acceptances.append(result[0])
            more[name] = result[1]
        if self.tree is not None:
            write_whole(Path(self.tree), json.dumps(more[self.draft[0]]["tree"]) + "\n")
        if self.json_output:
            print(json.dumps({"drafts": [one.record("model").to_json() | more[one.draft] for one in acceptances]}))
        elif acceptances:
            _show(acceptances)
            for name, extra in more.items():
                if tree := extra.get("tree"):
                    print(f"{name}: a tree of {self.nodes} nodes, {tree['depth']} deep, has TAR {tree['tar']:.2f}")
                if "confidence" in extra:
                    _show_confidence(name, self.lookahead, extra["confidence"])
        return 2 if failed else 0

    def _replay(self, trace: "Trace", name: str) -> "tuple[ModelReplay, Record] | ShallowdraftError":
        """Return a draft's acceptance, with the tree and the confidences that are wanted; or why there is none."""
        from shallowdraft.replaying.confidence import replay_confidences
        from shallowdraft.replaying.model import replay_model
        from shallowdraft.replaying.tree import replay_ranks

        more: "Record" = {}
        try:
            draft = self.load_draft(name)
            if self.nodes is not None:
                ranks = replay_ranks(draft, trace)
                tree = ranks.tree(self.nodes)
                more["tree"] = {"parents": tree.parents, "depth": tree.depth, "tar": ranks.tar(tree)}
            if self.min_confidence:
                confident = replay_confidences(draft, trace, self.lookahead, self.min_confidence)
                more["confidence"] = [one.to_json() for one in confident]
            return replay_model(draft, trace), more
        except ShallowdraftError as error:
            return error


def _show(found: "list[ModelReplay]") -> None:
    from shallowdraft.display.tables import new_table, table_console

    trace = found[0].trace
    law = "greedy" if trace.sampling.greedy else f"temperature {trace.sampling.temperature:g}"
    title = f"TAR on {len(trace.outputs)} outputs of {trace.target}, {law}"
    table = new_table("draft", *(f"d={lookahead}" for lookahead in SHOWN), f"95 % at {TOLD}", title=title)
    for one in sorted(found, key=lambda one: -one.tar()[TOLD]):
        low, high = one.tar_interval()[TOLD]
        table.add_row(one.draft, *(f"{one.tar()[d]:.2f}" for d in SHOWN), f"{low:.2f}–{high:.2f}")
    console = table_console()
    console.print(table)
    for one in found:
        if silence := one.silence(TOLD):
            console.print(f"at lookahead {TOLD} {one.draft} is {silence}", soft_wrap=True)


def _show_confidence(draft: str, lookahead: int, rows: "list[Record]") -> None:
    from shallowdraft.display.tables import new_table, table_console

    title = f"{draft}, at most {lookahead} tokens, as long as each is this sure"
    table = new_table("min confidence", "drafted an iteration", "accepted", "TAR", title=title)
    for row in rows:
        figures = f"{row['drafted']:.2f}", f"{row['acceptance_rate']:.0%}", f"{row['tar']:.2f}"
        table.add_row(f"{row['min_confidence']:g}", *figures)
    table_console().print(table)
