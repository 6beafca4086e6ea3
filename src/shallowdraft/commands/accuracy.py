"""shallowdraft accuracy: how good drafts are at tasks, and whether that says anything about their speed."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import DraftCommand, Drafts, Json, Limit, Lookahead, Name, OptionalTrace

if TYPE_CHECKING:
    from shallowdraft.runs.accuracy import AccuracyResult


@dataclass(frozen=True, kw_only=True)
class AccuracyCommand(DraftCommand):
    """MMLU and HellaSwag accuracy by the likelihood of choices, with 95 % intervals; with --trace also against TAR.

    Where no draft is above chance, the loss on the right answers stands in for it.
    Example: shallowdraft accuracy --drafts DIR1 DIR2 DIR3 --trace run/trace.jsonl --out run
    """

    drafts: Drafts
    sets: tuple[str, ...] = ("mmlu", "hellaswag")
    """Samples that ship with the package, or files of {"prompt", "choices", "answer"} lines."""
    trace: OptionalTrace = None
    lookahead: Lookahead = 5
    limit: Limit = None
    out: Name = None
    """Folder of a run: the result is written to OUT/accuracy.json, which `report` shows."""
    json_output: Json = False
    """Print {"drafts": [{"name", "tar", "sets": {…}}, …], "claims": {set: {…}}, …}."""

    def run(self) -> int:
        from shallowdraft.api.showing import accuracy

        self.set_threads()
        result = accuracy(**self.arguments(accuracy))
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result)
        return 0


def show(result: "AccuracyResult") -> None:
    """Print a table for each task, and what follows about TAR."""
    from shallowdraft.display.tables import new_table, table_console

    console = table_console()
    for task in result.drafts[0].sets:
        chance = result.drafts[0].sets[task].accuracy.chance
        with_tar = [f"TAR at {result.lookahead}"] if result.claims else []
        columns = ("draft", "accuracy", "by the character", "loss", *with_tar)
        table = new_table(*columns, title=f"{task}; chance {chance:.0%}")
        for draft in result.drafts:
            score = draft.sets[task]
            shares = [share for share in (score.accuracy, score.normalised) if share]
            cells = [f"{x.value:.1%} ({x.interval[0]:.1%}–{x.interval[1]:.1%})" for x in shares]
            table.add_row(draft.name, *cells, f"{score.loss:.3f}", *([f"{draft.tar:.2f}"] if draft.tar else []))
        console.print(table)
        if task in result.claims:
            console.print(f"{task}: {result.claims[task].statement}", soft_wrap=True)
