"""shallowdraft accuracy: how good drafts are at tasks, and whether that says anything about their speed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import DraftCommand, Name, Number, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.runs.accuracy import AccuracyResult


@dataclass(frozen=True, kw_only=True)
class AccuracyCommand(DraftCommand):
    """MMLU and HellaSwag accuracy by the likelihood of choices, with 95 % intervals; with --trace also against TAR.

    Where no draft is above chance, the loss on the right answers stands in for it.
    Example: shallowdraft accuracy --draft DIR1 DIR2 DIR3 --trace trace.jsonl
    """

    draft: tuple[str, ...]
    """Checkpoint folders, hub ids or zoo names."""
    sets: tuple[str, ...] = ("mmlu", "hellaswag")
    """Samples that ship with the package, or files of {"prompt", "choices", "answer"} lines."""
    trace: Name = None
    """What `record` wrote: drafts are replayed on it."""
    lookahead: int = 5
    """At which TAR is taken."""
    limit: Number = None
    """At most so many questions of each set."""
    out: Name = None
    """Folder of a run: the result is written to OUT/accuracy.json, which `report` shows."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"drafts": [{"name", "tar", "sets": {…}}, …], "claims": {set: {…}}}."""

    def run(self) -> int:
        from shallowdraft.display.progress import follow
        from shallowdraft.replaying.model import replay_model
        from shallowdraft.runs.accuracy import AccuracyResult, DraftScores, TaskScore, write_accuracy
        from shallowdraft.runs.folder import RunFolder
        from shallowdraft.runs.trace import read_trace
        from shallowdraft.studying.accuracy import claim, load_questions, score

        if not self.draft or not 1 <= self.lookahead <= 32 or (self.limit is not None and self.limit < 1):
            raise OptionError("give --draft with one or more checkpoints, --lookahead from 1 to 32, --limit from 1 up")
        self.set_threads()
        require_decoder_only(*self.draft)
        trace = read_trace(Path(self.trace)) if self.trace else None
        questions = {name: load_questions(name, self.limit) for name in self.sets}
        scores: list[DraftScores] = []

        def steps() -> Iterator[int]:
            done = 0
            for name in self.draft:
                draft = self.load_draft(name)
                tar = replay_model(draft, trace).tar()[self.lookahead] if trace else None
                tasks: dict[str, TaskScore] = {}
                for task, asked in questions.items():
                    for step in score(draft, asked):
                        if isinstance(step, TaskScore):
                            tasks[task] = step
                        else:
                            yield done + step
                    done += len(asked)
                scores.append(DraftScores(name, tar, tasks, draft.digest))

        follow("asking", steps(), len(self.draft) * sum(map(len, questions.values())))
        claims = {task: claim(task, scores) for task in questions} if trace else {}
        about = (trace.target, trace.target_digest) if trace else ("", None)
        result = AccuracyResult(tuple(scores), claims, self.lookahead, *about)
        if self.out is not None:
            write_accuracy(RunFolder(Path(self.out)).accuracy, result)
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result)
        return 0


def show(result: "AccuracyResult") -> None:
    from shallowdraft.display.tables import new_table, table_console

    console = table_console()
    for task in result.drafts[0].sets:
        chance = result.drafts[0].sets[task].accuracy.chance
        with_tar = [f"TAR at {result.lookahead}"] if result.claims else []
        table = new_table(
            "draft", "accuracy", "by the character", "loss", *with_tar, title=f"{task}; chance {chance:.0%}"
        )
        for draft in result.drafts:
            score = draft.sets[task]
            shares = [share for share in (score.accuracy, score.normalised) if share]
            cells = [f"{x.value:.1%} ({x.interval[0]:.1%}–{x.interval[1]:.1%})" for x in shares]
            table.add_row(draft.name, *cells, f"{score.loss:.3f}", *([f"{draft.tar:.2f}"] if draft.tar else []))
        console.print(table)
        if task in result.claims:
            console.print(f"{task}: {result.claims[task].statement}", soft_wrap=True)
