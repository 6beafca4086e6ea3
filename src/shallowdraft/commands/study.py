"""shallowdraft study: which draft, at which lookahead, how fast, and whether it pays."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import DraftCommand, Number, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.study.study import Row
    from shallowdraft.study.study import Study as Found

NARROW = 100  # a narrower terminal does without the times


@dataclass(frozen=True, kw_only=True)
class Study(DraftCommand):
    """Find the fastest draft and lookahead for a target on this machine: record, replay, profile, predict, verify live.

    All raw records are kept in the run's folder. Stopped half-way, the same command goes on; with another draft it
    reuses the rest. Greedy decoding at batch 1.
    Example: shallowdraft study --target DIR --drafts DIR1 DIR2 --prompts arena hellaswag --out run
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    drafts: tuple[str, ...]
    """Drafts, named likewise."""
    prompts: tuple[str, ...]
    """Sets that ship with the package (mmlu, hellaswag, arena, spec-bench, humaneval, gsm8k, mt-bench, zoo), and files
    of {"prompt": …} lines."""
    out: str
    """Folder of the run."""
    lookaheads: str = "1:12"
    """Lookaheads to consider: from:to, or several numbers like 1,2,4."""
    max_new_tokens: int = 64
    """Tokens to write after each prompt."""
    limit: Number = None
    """At most so many prompts of each set."""
    rounds: int = 3
    """Samples of each timing."""
    live: int = 3
    """How many drafts to run live in the end, each at its predicted best lookahead; 0: none."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the result as one JSON object and nothing else on stdout."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.commands.progress import follow
        from shallowdraft.commands.record import gather
        from shallowdraft.study.study import Plan, study

        if not self.drafts or self.rounds < 1 or self.live < 0 or self.max_new_tokens < 2:
            raise OptionError("give --drafts; --rounds is at least 1, --live at least 0, --max-new-tokens at least 2")
        plan = Plan(
            gather(self.prompts, self.limit),
            parse_lookaheads(self.lookaheads),
            self.max_new_tokens,
            rounds=self.rounds,
            live=self.live,
        )
        self.set_threads()
        require_decoder_only(self.target)
        target = sd.load(self.target, self.dtype, self.device)
        found = study(target, self.load_draft, list(dict.fromkeys(self.drafts)), plan, Path(self.out), follow)
        for name, why in found.failed.items():
            print(f"error: {name} was left out: {why}", file=sys.stderr)
        if self.json_output:
            print(json.dumps(found.to_json()))
        else:
            show(found, self.target, self.out)
        return 2 if found.failed else 0


def parse_lookaheads(text: str) -> list[int]:
    """`1:12` or `1,2,4`."""
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        found = list(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        found = sorted({int(part) for part in text.split(",")})
    else:
        found = []
    if not found or not 1 <= min(found) <= max(found) <= 32:
        raise OptionError(f"--lookaheads is {text}; write from:to or a,b,c with numbers from 1 to 32")
    return found


def show(found: "Found", target: str, out: str) -> None:
    from shallowdraft.commands.tables import new_table, table_console

    console = table_console()
    title = f"{target}, greedy, batch 1: {found.plain_tokens_per_s:.0f} tokens/s without a draft"
    narrow = console.width < NARROW
    columns = ("draft", "d", "TAR", "needs", "draft ms", "verify ms", "predicted", "measured")
    table = new_table(*(column for column in columns if not (narrow and column.endswith("ms"))), title=title)
    for row in found.rows:
        table.add_row(*_cells(row, narrow=narrow))
    console.print(table)
    console.print("d: lookahead; TAR: tokens an iteration; needs: the TAR at which it breaks even", style="dim")
    console.print(f"[bold]{found.verdict}[/bold]", soft_wrap=True)
    fall = found.rows[0].prediction.waterfall
    console.print(
        f"of its TAR {fall.ideal:.2f}, drafting takes {fall.drafting:.2f}, longer verification {fall.verifying:.2f}, "
        f"the rest {fall.rest:.2f}",
        soft_wrap=True,
    )
    if any(row.live for row in found.rows):
        same = all(row.live.lossless for row in found.rows if row.live)
        console.print(
            "outputs with every draft are those without" if same else "[red]outputs differ, see live.jsonl[/red]"
        )
    console.print(f"records and study.json are in {out}", style="dim", soft_wrap=True)


def _cells(row: "Row", *, narrow: bool) -> tuple[str, ...]:
    one = row.prediction
    low, high = row.interval
    live = f"{row.live.speed_up:.2f}x ({row.live.interval[0]:.2f}–{row.live.interval[1]:.2f})" if row.live else ""
    times = () if narrow else (f"{one.iteration.draft_s * 1e3:.2f}", f"{one.iteration.target_s * 1e3:.2f}")
    return (
        row.draft,
        str(one.lookahead),
        f"{one.tar:.2f}",
        f"{one.break_even_tar:.2f}",
        *times,
        f"{one.speed_up:.2f}x ({low:.2f}–{high:.2f})",
        live,
    )
