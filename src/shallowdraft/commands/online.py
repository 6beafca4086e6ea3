"""shallowdraft online: decode prompts while the draft learns from the target's corrections."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import tyro

from shallowdraft.commands.options import ModelCommand, Number, require_decoder_only
from shallowdraft.errors import OptionError
from shallowdraft.files import Count

if TYPE_CHECKING:
    from shallowdraft.records import Record

KIND = "online outputs"
COUNTS = ("emitted", "iterations", "drafted", "accepted")
STRETCHES = 10


class Output(TypedDict):
    """What a line of outputs must have."""

    set: str
    id: str
    emitted: Count
    iterations: Count
    drafted: Count
    accepted: Count


@dataclass(frozen=True, kw_only=True)
class OnlineCommand(ModelCommand):
    """Decode prompts one after the other; between them the draft learns where the target corrected it.

    The output is the target's whatever the draft has learned; it is in OUT/outputs.jsonl. OUT/draft, there once it
    has learned, is always a whole draft, the newest; stopped and started again, the same command goes on from it.
    Example: shallowdraft online --target DIR --draft DIR --prompts questions.jsonl --out learning
    """

    target: str
    """Checkpoint folder, hub id or zoo name of the model whose output you want."""
    draft: str
    """A smaller model with the same vocabulary, named likewise: what it starts from."""
    prompts: tuple[str, ...]
    """Sets that ship with the package, and files of {"prompt": …} or {"ids": […]} lines."""
    out: str
    """Folder for what the draft becomes."""
    lookahead: int = 4
    """Draft tokens an iteration."""
    max_new_tokens: int = 64
    """Tokens to write after each prompt."""
    every: int = 8
    """Learn after so many prompts."""
    budget: int = 4096
    """Tokens that it may read then; 0: do not learn."""
    learning_rate: float = 1e-3
    """Of every step."""
    limit: Number = None
    """At most so many prompts of each set."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object with the acceptance over ten stretches of the prompts, and nothing else on stdout."""

    def run(self) -> int:
        from rich.progress import Progress

        import shallowdraft as sd
        from shallowdraft.building.online import CURRENT, Habits, OnlineDraft
        from shallowdraft.commands.console import Console
        from shallowdraft.commands.record import gather
        from shallowdraft.decoding.options import Options
        from shallowdraft.records import Records
        from shallowdraft.replay.recording import fitted

        if self.every < 1 or self.budget < 0:
            raise OptionError("--every is at least 1, --budget at least 0")
        habits = Habits(learning_rate=self.learning_rate)
        prompts = gather(self.prompts, self.limit)
        self.set_threads()
        require_decoder_only(self.target, self.draft)
        begun = Path(self.out) / CURRENT
        target = sd.load(self.target, self.dtype, self.device)
        draft = sd.load(str(begun) if begun.exists() else self.draft, "float32", self.device, trainable=True)
        online = OnlineDraft(target, draft, Path(self.out), habits)
        setting = {name: getattr(self, name) for name in ("target", "draft", "lookahead", "max_new_tokens")}
        file = Records.open(Path(self.out) / "outputs.jsonl", KIND, setting, Output)
        done = {(row["set"], row["id"]) for row in file}
        left = [(name, prompt) for name, prompt in prompts if (name, prompt.id) not in done]
        with Progress(console=Console(stderr=True)) as progress:
            turns = enumerate(progress.track(left, description="decoding and learning"), len(done) + 1)
            for number, (name, prompt) in turns:
                ids, cut = fitted(target, prompt, self.max_new_tokens)
                options = Options(draft=online.draft, lookahead=self.lookahead, max_new_tokens=self.max_new_tokens)
                made = sd.generate(target, ids, **options)
                online.see(ids, made, self.lookahead)
                counts = {count: getattr(made.stats, count) for count in COUNTS}
                file.append({"set": name, "id": prompt.id, "cut": cut, "text": made.text} | counts)
                if self.budget and (number % self.every == 0 or number == len(done) + len(left)):
                    online.learn(self.budget)
        self._say(list(file))
        return 0

    def _say(self, rows: "list[Record]") -> None:
        """Acceptance over ten stretches of the prompts, the first to the last."""
        size = max(1, -(-len(rows) // STRETCHES))
        found = []
        for start in range(0, len(rows), size):
            sums = {name: sum(row[name] for row in rows[start : start + size]) for name in COUNTS}
            tar, share = sums["emitted"] / max(1, sums["iterations"]), sums["accepted"] / max(1, sums["drafted"])
            found.append({"prompts": min(start + size, len(rows)), "tar": tar, "acceptance": share})
        if self.json_output:
            print(json.dumps({"out": self.out, "stretches": found}))
            return
        from shallowdraft.commands.tables import new_table, table_console

        table = new_table("prompts", "TAR", "accepted", title=f"{self.draft} for {self.target}, as it learned")
        for one in found:
            table.add_row(f"{one['prompts']:,}", f"{one['tar']:.2f}", f"{one['acceptance']:.0%}")
        console = table_console()
        console.print(table)
        there = (Path(self.out) / "draft").exists()
        draft = f"the draft is in {self.out}/draft" if there else "the draft has learned nothing"
        console.print(f"{draft}; what was written is in {self.out}/outputs.jsonl", style="dim", soft_wrap=True)
