"""shallowdraft design: which shape a draft should have on this machine, and building it."""

import json
from collections import Counter
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING

from shallowdraft.api.defaults import ALL_LOOKAHEADS
from shallowdraft.commands.options import ClusterCommand, Json, Lookaheads, Name, Number, OptionalTrace, Target
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.results import DesignResult, DraftPrediction, SearchResult
    from shallowdraft.studying.design import Requirement


@dataclass(frozen=True, kw_only=True)
class DesignCommand(ClusterCommand):
    """Shapes that a parent can be pruned to: how long each would draft here, and what TAR it needs to be worth it.

    Times come from a profile with `--shapes auto`. With --trace, the drafts in that profile are replayed, and the TAR
    that beats the best of them is shown too. With --search the best are built: successive halving over shapes, each
    distilled on text that the target writes, until the fastest is left. Interrupted, the same command goes on. A
    candidate that fails is passed over; OUT/search.jsonl says why, and without that line it is tried again.
    Example: shallowdraft design --target DIR --profile profile.jsonl --trace trace.jsonl --search --out best
    """

    target: Target
    profile: str
    """Profile of this machine, a file that `profile --shapes auto` wrote."""
    parents: tuple[str, ...] = ()
    """Models that a draft would be pruned from; several with --search, drafts at hand among them. Default: the target.
    """
    trace: OptionalTrace = None
    max_parameters: Number = None
    """Leave out shapes with more parameters."""
    lookaheads: Lookaheads = ALL_LOOKAHEADS
    mean_context: int = 128
    """Tokens before a new one, on average, without --trace."""
    search: bool = False
    """Build drafts and find the fastest; needs --trace and --out."""
    out: Name = None
    """Folder for what --search builds: OUT/draft is the winner."""
    candidates: int = 6
    """Shapes to begin with; a third of them goes on from each rung to the next."""
    tokens: int = 500_000
    """Tokens to train on, over all candidates."""
    generated: int = 200_000
    """Tokens that the target writes itself, to learn from."""
    corpus: Name = None
    """Folder of text to begin the target's from, and to learn from beside it. Default: the target begins by itself."""
    json_output: Json = False
    """Print {"best", "latency_model", "shapes": [{"shape", "parameters", "step_s", "break_even", "to_win", …}, …]};
    with --search {"best", "found", "draft", "failed"}."""

    def run(self) -> int:
        from shallowdraft.api.designing import design, search

        if self.search and not (self.trace and self.out):
            raise OptionError("--search needs --trace, to replay what it builds on, and --out")
        if not self.search and len(self.parents) > 1:
            raise OptionError("several parents are for --search; name one")
        if self.cluster is not None and not self.search:
            raise OptionError("--cluster is for --search, all else is quick; leave one out or give both")
        self.set_threads()
        if self.search:
            drafts = search(**self.arguments(search))
            if self.json_output:
                print(json.dumps(drafts.to_json()))
            else:
                show_search(drafts)
            return 0
        parent = self.parents[0] if self.parents else None
        shapes = design(**self.arguments(design) | {"parent": parent})
        if self.json_output:
            print(json.dumps(shapes.to_json()))
        else:
            show(shapes)
        return 0


def show_search(result: "SearchResult") -> None:
    """Print what was judged, and the winner."""
    from shallowdraft.display.tables import new_table, table_console

    table = new_table("candidate", "rung", "tokens", "d", "TAR", "predicted")
    for name, rung, tokens, lookahead, tar, speed_up in result.cells:
        table.add_row(str(name), str(rung), f"{tokens:,}", str(lookahead), f"{tar:.2f}", f"{speed_up:.2f}x")
    console = table_console()
    console.print(table)
    console.print(result.caption, style="bold", soft_wrap=True)
    draft = result.draft
    console.print(f"the draft is in {draft}; study --drafts {draft} … runs it live", style="dim", soft_wrap=True)


def show(result: "DesignResult") -> None:
    """Print, of the shapes of each latency, the one with the most weights in its layers, and what it must bring."""
    from shallowdraft.display.tables import new_table, table_console

    goal = [f"to beat {result.best.draft}"] if result.best else []
    table = new_table(
        "shape", "parameters", "as fast", "ms a step", "breaks even at", *goal,
        title="the most weights in layers for their latency",
    )  # fmt: skip
    sets = Counter(design.latency_set for design in result.shapes)
    largest = {design.latency_set: design for design in result.shapes if design.on_front}
    for design in largest.values():
        others, step_ms = str(sets[design.latency_set] - 1), f"{1e3 * design.step_s:.3f}"
        cells = str(design.shape), f"{design.shape.parameters:,}", others, step_ms, _needed(design.break_even)
        table.add_row(*cells, *([_needed(design.to_win)] if goal else []))
    console = table_console()
    console.print(table)
    accuracy = f"typically {result.model.typical_error:.0%} off, {result.model.worst_error:.0%} at worst"
    console.print(
        f"as fast: other shapes of about the same latency (--json has them); times are the latency model's, {accuracy}",
        style="dim",
        soft_wrap=True,
    )
    if result.best:
        _show_best(result.best)


def _show_best(best: "DraftPrediction") -> None:
    from shallowdraft.display.tables import table_console

    console, prediction = table_console(), best.prediction
    console.print(
        f"at hand: {best.draft} at lookahead {prediction.lookahead}, {prediction.tokens_per_s:.0f} tokens/s, "
        f"{prediction.speed_up:.2f}x",
        soft_wrap=True,
    )
    if prediction.silence:
        console.print(f"{best.draft} is {prediction.silence}", soft_wrap=True)


def _needed(needed: "Requirement") -> str:
    if isinf(needed.acceptance_rate):
        return "never"
    return f"TAR {needed.tar:.2f} at d={needed.lookahead} ({needed.acceptance_rate:.0%})"
