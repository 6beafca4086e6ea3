"""shallowdraft study: which draft or other proposer, at which lookahead, how fast, and whether it pays."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.api.defaults import ALL_LOOKAHEADS, StudyDrafter
from shallowdraft.commands.options import (
    ClusterCommand,
    Drafts,
    Heads,
    Json,
    Limit,
    Lookaheads,
    MaxNewTokens,
    Prompts,
    Rounds,
    Skips,
    Target,
)

if TYPE_CHECKING:
    from shallowdraft.runs.study import StudyResult, StudyRow

NARROW = 100  # columns of a terminal below which the times are left out


@dataclass(frozen=True, kw_only=True)
class StudyCommand(ClusterCommand):
    """Find the fastest draft and lookahead for a target on this machine: record, replay, profile, predict, verify live.

    All raw records are kept in the run's folder. Interrupted, the same command goes on; with another draft it reuses
    the rest. Greedy decoding at batch 1. With --drafters other ways to propose are compared too.
    Example: shallowdraft study --target DIR --drafts DIR1 DIR2 --prompts arena hellaswag --out run
    """

    target: Target
    drafts: Drafts = ()
    drafters: tuple[StudyDrafter, ...] = ("model",)
    """Kinds of drafting: each draft (model); each draft, branching into a tree; the text, where it repeats (ngram); the
    target without some of its parts (skip); heads on the target (medusa)."""
    node_counts: tuple[int, ...] = ()
    """Sizes of trees to consider, of drafts and of heads. Default: 4 8 16."""
    heads: Heads = None
    skips: Skips = None
    prompts: Prompts
    out: str
    """Folder of the run."""
    lookaheads: Lookaheads = ALL_LOOKAHEADS
    max_new_tokens: MaxNewTokens = 64
    limit: Limit = None
    rounds: Rounds = 3
    live: int = 3
    """Number of candidates to run live in the end, each at its predicted best; 0: none."""
    json_output: Json = False
    """Print the result, as study.json has it, and nothing else on stdout."""

    def run(self) -> int:
        from shallowdraft.api.measuring import study

        self.set_threads()
        result = study(**self.arguments(study))
        for name, why in result.failed.items():
            print(f"error: {name} was left out: {why}", file=sys.stderr)
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result, self.target, self.out)
        return 2 if result.failed else 0


def show(result: "StudyResult", target: str, out: str) -> None:
    """Print the table, the verdict, and what was left out."""
    from shallowdraft.display.tables import new_table, table_console

    console = table_console()
    title = f"{target}, greedy, batch 1: {result.plain_tokens_per_s:.0f} tokens/s without a draft"
    narrow = console.width < NARROW
    columns = ("draft", "d", "TAR", "needs", "draft ms", "verify ms", "predicted", "measured")
    table = new_table(*(column for column in columns if not (narrow and column.endswith("ms"))), title=title)
    for row in result.rows:
        table.add_row(*_cells(row, narrow=narrow))
    console.print(table)
    legend = "d: lookahead, or nodes of a tree; TAR: tokens an iteration; needs: the TAR at which it breaks even"
    console.print(legend, style="dim")
    for row in result.rows:
        if row.prediction.silence:
            console.print(f"{row.name} is {row.prediction.silence}", soft_wrap=True)
    console.print(result.verdict, style="bold", soft_wrap=True)
    fall = result.rows[0].prediction.waterfall
    console.print(f"of its TAR {fall.ideal:.2f}, {fall.losses_text}: {fall.actual:.2f}x is left", soft_wrap=True)
    if result.lossless is not None:
        same, differ = "outputs with every draft are those without", "outputs differ, see live.jsonl"
        console.print(same if result.lossless else differ, style=None if result.lossless else "red")
    left_out = [f"{row.name}: {row.disturbed}" for row in result.rows if row.disturbed]
    if result.stalled:
        left_out.append(f"the machine stalled on {', '.join(result.stalled)}: left out of what was measured")
    for reason in left_out:
        again = f"to measure again, remove {out}/live.jsonl and run this again"
        console.print(f"{reason}; {again}", soft_wrap=True)
    console.print(f"records and study.json are in {out}; look at them: shallowdraft report {out}", soft_wrap=True)


def _cells(row: "StudyRow", *, narrow: bool) -> tuple[str, ...]:
    prediction = row.prediction
    low, high = row.predicted_interval
    live = f"{row.live.speed_up:.2f}x ({row.live.interval[0]:.2f}–{row.live.interval[1]:.2f})" if row.live else ""
    times = prediction.iteration
    milliseconds = () if narrow else (f"{times.draft_s * 1e3:.2f}", f"{times.verify_s * 1e3:.2f}")
    return (
        row.name,
        f"{prediction.nodes} nodes" if prediction.nodes else str(prediction.lookahead),
        f"{prediction.tar:.2f}",
        f"{prediction.break_even_tar:.2f}",
        *milliseconds,
        f"{prediction.speed_up:.2f}x ({low:.2f}–{high:.2f})",
        "disturbed" if row.disturbed else live,
    )
