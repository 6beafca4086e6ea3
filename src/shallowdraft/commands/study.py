"""shallowdraft study: which draft or other proposer, at which lookahead, how fast, and whether it pays."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shallowdraft.commands.options import ClusterCommand, Name, Number, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.models.model import Model
    from shallowdraft.runs.study import StudyResult, StudyRow
    from shallowdraft.studying.proposers import Proposer

NARROW = 100  # a narrower terminal does without the times

Drafter = Literal["model", "tree", "ngram", "skip", "medusa"]


@dataclass(frozen=True, kw_only=True)
class StudyCommand(ClusterCommand):
    """Find the fastest draft and lookahead for a target on this machine: record, replay, profile, predict, verify live.

    All raw records are kept in the run's folder. Stopped half-way, the same command goes on; with another draft it
    reuses the rest. Greedy decoding at batch 1. With --drafters other ways to propose are compared too.
    Example: shallowdraft study --target DIR --drafts DIR1 DIR2 --prompts arena hellaswag --out run
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    drafts: tuple[str, ...] = ()
    """Drafts, named likewise, for the drafters model and tree."""
    drafters: tuple[Drafter, ...] = ("model",)
    """What proposes: each draft; each draft, branching into a tree; the text, where it repeats (ngram); the target
    itself, parts of it skipped; heads on the target (medusa)."""
    nodes: tuple[int, ...] = ()
    """Sizes of trees to consider, of drafts and of heads. Default: 4 8 16."""
    heads: Name = None
    """Of the drafter medusa: what shallowdraft heads wrote. Default: the folder `heads` beside the target's weights."""
    skips: Name = None
    """Of the drafter skip: what skip-search wrote. Default: the second half of the layers."""
    prompts: tuple[str, ...]
    """Sets that ship with the package (mmlu, hellaswag, arena, spec-bench, humaneval, gsm8k, mt-bench, zoo), and files
    of {"prompt": …} or {"ids": […]} lines."""
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
    """How many of them to run live in the end, each at its predicted best; 0: none."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the result as one JSON object and nothing else on stdout."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.commands.record import gather
        from shallowdraft.display.progress import follow
        from shallowdraft.studying.study import NODES, Plan, study

        if self.rounds < 1 or self.live < 0 or self.max_new_tokens < 2:
            raise OptionError("--rounds is at least 1, --live at least 0, --max-new-tokens at least 2")
        self._check_drafters()
        plan = Plan(
            gather(self.prompts, self.limit),
            parse_lookaheads(self.lookaheads),
            self.max_new_tokens,
            rounds=self.rounds,
            live=self.live,
            nodes=sorted(set(self.nodes)) or NODES,
        )
        skips = self._skips()
        executor = self.executor()
        self.set_threads()
        require_decoder_only(self.target)
        target = sd.load(self.target, self.dtype, self.device)
        proposers, failed = self._proposers(target, skips)
        found = study(target, proposers, plan, Path(self.out), follow, failed, executor)
        for name, why in found.failed.items():
            print(f"error: {name} was left out: {why}", file=sys.stderr)
        if self.json_output:
            print(json.dumps(found.to_json()))
        else:
            show(found, self.target, self.out)
        return 2 if found.failed else 0

    def _check_drafters(self) -> None:
        """Whether each has what it needs, and nothing is given in vain."""
        from shallowdraft.limits import MOST_NODES
        from shallowdraft.replaying.tree import DEEPEST

        chosen = set(self.drafters)
        if not chosen:
            raise OptionError("--drafters is empty; name model, tree, ngram, skip or medusa")
        for option, given, takers in (
            ("--drafts", bool(self.drafts), {"model", "tree"}),
            ("--nodes", bool(self.nodes), {"tree", "medusa"}),
            ("--heads", self.heads is not None, {"medusa"}),
            ("--skips", self.skips is not None, {"skip"}),
        ):
            if given and not chosen & takers:
                raise OptionError(f"{option} is for --drafters {' or '.join(sorted(takers))}")
        if chosen & {"model", "tree"} and not self.drafts:
            raise OptionError("give --drafts; the drafters model and tree need them, ngram, skip and medusa do not")
        if not all(1 <= count <= MOST_NODES for count in self.nodes):
            raise OptionError(f"--nodes is {' '.join(map(str, self.nodes))}; a tree has 1 to {MOST_NODES}")
        if "tree" in chosen and self.max_new_tokens <= DEEPEST:
            raise OptionError(f"the drafter tree chooses trees by outputs of more than {DEEPEST} --max-new-tokens")

    def _skips(self) -> tuple[int, ...] | None:
        if self.skips is None:
            return None
        from shallowdraft.studying.skip_search import read_trials

        return read_trials(Path(self.skips))[0].skips

    def _proposers(self, target: "Model", skips: tuple[int, ...] | None) -> "tuple[list[Proposer], dict[str, str]]":
        """In the order of --drafters; and drafts that cannot be loaded, with the reason."""
        import shallowdraft as sd
        from shallowdraft.studying import proposers

        def heads() -> "Proposer":
            return proposers.medusa_proposer(target, sd.load_heads(target, self.heads), self.heads or "heads")

        alone = {
            "ngram": lambda: proposers.ngram_proposer(target),
            "skip": lambda: proposers.skip_proposer(target, skips),
            "medusa": heads,
        }
        of_draft = {"model": proposers.model_proposer, "tree": proposers.tree_proposer}
        found = {name: [make()] for name, make in alone.items() if name in self.drafters}
        drafts, failed = proposers.load_drafts(target, self.load_draft, list(dict.fromkeys(self.drafts)))
        found |= {name: [make(draft) for draft in drafts] for name, make in of_draft.items() if name in self.drafters}
        return [one for name in dict.fromkeys(self.drafters) for one in found[name]], failed


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


def show(found: "StudyResult", target: str, out: str) -> None:
    from shallowdraft.display.tables import new_table, table_console

    console = table_console()
    title = f"{target}, greedy, batch 1: {found.plain_tokens_per_s:.0f} tokens/s without a draft"
    narrow = console.width < NARROW
    columns = ("draft", "d", "TAR", "needs", "draft ms", "verify ms", "predicted", "measured")
    table = new_table(*(column for column in columns if not (narrow and column.endswith("ms"))), title=title)
    for row in found.rows:
        table.add_row(*_cells(row, narrow=narrow))
    console.print(table)
    console.print(
        "d: lookahead, or nodes of a tree; TAR: tokens an iteration; needs: the TAR at which it breaks even",
        style="dim",
    )
    for row in found.rows:
        if row.prediction.silence:
            console.print(f"{row.name} is {row.prediction.silence}", soft_wrap=True)
    console.print(found.verdict, style="bold", soft_wrap=True)
    fall = found.rows[0].prediction.waterfall
    console.print(f"of its TAR {fall.ideal:.2f}, {fall.losses_text}: {fall.actual:.2f}x is left", soft_wrap=True)
    if found.lossless is not None:
        same, differ = "outputs with every draft are those without", "outputs differ, see live.jsonl"
        console.print(same if found.lossless else differ, style=None if found.lossless else "red")
    left_out = [f"{row.name}: {row.disturbed}" for row in found.rows if row.disturbed]
    if found.stalled:
        left_out.append(f"the machine stalled on {', '.join(found.stalled)}: left out of what was measured")
    for said in left_out:
        again = f"to measure again, remove {out}/live.jsonl and run this again"
        console.print(f"{said}; {again}", soft_wrap=True)
    console.print(f"records and study.json are in {out}; look at them: shallowdraft report {out}", soft_wrap=True)


def _cells(row: "StudyRow", *, narrow: bool) -> tuple[str, ...]:
    one = row.prediction
    low, high = row.predicted_interval
    live = f"{row.live.speed_up:.2f}x ({row.live.interval[0]:.2f}–{row.live.interval[1]:.2f})" if row.live else ""
    times = () if narrow else (f"{one.iteration.draft_s * 1e3:.2f}", f"{one.iteration.verify_s * 1e3:.2f}")
    return (
        row.name,
        f"{one.nodes} nodes" if one.nodes else str(one.lookahead),
        f"{one.tar:.2f}",
        f"{one.break_even_tar:.2f}",
        *times,
        f"{one.speed_up:.2f}x ({low:.2f}–{high:.2f})",
        "disturbed" if row.disturbed else live,
    )
