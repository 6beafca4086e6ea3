"""shallowdraft accuracy: how good drafts are at tasks, and whether that says anything about their speed."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import DraftCommand, Name, Number, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.study.accuracy import Claim, Score


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
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"drafts": [{"name", "tar", "sets": {…}}, …], "claims": {set: {…}}}."""

    def run(self) -> int:
        from shallowdraft.commands.progress import follow
        from shallowdraft.replay.model import replay
        from shallowdraft.replay.trace import read_trace
        from shallowdraft.study.accuracy import Score, claim, load_questions, score

        if not self.draft or not 1 <= self.lookahead <= 32 or (self.limit is not None and self.limit < 1):
            raise OptionError("give --draft with one or more checkpoints, --lookahead from 1 to 32, --limit from 1 up")
        self.set_threads()
        require_decoder_only(*self.draft)
        trace = read_trace(Path(self.trace)) if self.trace else None
        questions = {name: load_questions(name, self.limit) for name in self.sets}
        scores: dict[str, dict[str, Score]] = {name: {} for name in self.sets}
        tars: dict[str, float] = {}

        def steps() -> Iterator[int]:
            done = 0
            for name in self.draft:
                draft = self.load_draft(name)
                if trace:
                    tars[name] = replay(draft, trace).tar()[self.lookahead]
                for of_set, asked in questions.items():
                    for one in score(draft, asked):
                        if isinstance(one, Score):
                            scores[of_set][name] = one
                        else:
                            yield done + one
                    done += len(asked)

        follow("asking", steps(), len(self.draft) * sum(map(len, questions.values())))
        claims = {name: claim(found, tars) for name, found in scores.items()} if tars else {}
        if self.json_output:
            print(json.dumps(as_json(scores, tars, claims)))
        else:
            show(scores, tars, claims, self.lookahead)
        return 0


def as_json(
    scores: "dict[str, dict[str, Score]]", tars: dict[str, float], claims: "dict[str, Claim]"
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for found in scores.values() for name in found))
    return {
        "drafts": [
            {
                "name": name,
                "tar": tars.get(name),
                "sets": {of_set: asdict(found[name]) for of_set, found in scores.items()},
            }
            for name in names
        ],
        "claims": {of_set: asdict(one) | {"statement": one.statement} for of_set, one in claims.items()},
    }


def show(
    scores: "dict[str, dict[str, Score]]", tars: dict[str, float], claims: "dict[str, Claim]", lookahead: int
) -> None:
    from shallowdraft.commands.tables import new_table, table_console

    console = table_console()
    for of_set, found in scores.items():
        chance = next(iter(found.values())).accuracy.chance
        columns = ("draft", "accuracy", "by the character", "loss", *([f"TAR at {lookahead}"] if tars else []))
        table = new_table(*columns, title=f"{of_set}; chance {chance:.0%}")
        for name, one in found.items():
            cells = [f"{x.value:.1%} ({x.interval[0]:.1%}–{x.interval[1]:.1%})" for x in (one.accuracy, one.normalised)]
            table.add_row(name, *cells, f"{one.loss:.3f}", *([f"{tars[name]:.2f}"] if tars else []))
        console.print(table)
        if of_set in claims:
            console.print(f"{of_set}: {claims[of_set].statement}", soft_wrap=True)
