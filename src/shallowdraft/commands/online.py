"""shallowdraft online: decode prompts while the draft learns from the target's corrections."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import (
    Json,
    Limit,
    Lookahead,
    MaxNewTokens,
    ModelCommand,
    Prompts,
    Rate,
    RequiredDraft,
    Target,
)

if TYPE_CHECKING:
    from shallowdraft.building.online import OnlineResult


@dataclass(frozen=True, kw_only=True)
class OnlineCommand(ModelCommand):
    """Decode prompts one after the other; between them the draft learns where the target corrected it.

    The output is the target's whatever the draft has learned; it is in OUT/outputs.jsonl. OUT/draft, there once it
    has learned, is always a whole draft, the newest; stopped and started again, the same command goes on from it.
    Example: shallowdraft online --target DIR --draft DIR --prompts questions.jsonl --out learning
    """

    target: Target
    draft: RequiredDraft
    prompts: Prompts
    out: str
    """Folder for the draft and the outputs."""
    lookahead: Lookahead = 4
    max_new_tokens: MaxNewTokens = 64
    every: int = 8
    """Prompts between two updates of the draft."""
    budget: int = 4096
    """Tokens that the draft trains on in an update; 0: do not learn."""
    learning_rate: Rate = None
    """Peak of the learning rate. Default: 0.001."""
    limit: Limit = None
    json_output: Json = False
    """Print one JSON object with the acceptance over ten stretches of the prompts, and nothing else on stdout."""

    def run(self) -> int:
        from shallowdraft.api.inputs import gather_prompts
        from shallowdraft.building.online import learn_online
        from shallowdraft.display.progress import follow

        self.set_threads()
        result = learn_online(
            target=self.target,
            draft=self.draft,
            prompts=gather_prompts(self.prompts, self.limit),
            out=self.out,
            lookahead=self.lookahead,
            max_new_tokens=self.max_new_tokens,
            every=self.every,
            budget=self.budget,
            learning_rate=self.learning_rate or 1e-3,
            dtype=self.dtype,
            device=self.device,
            follow=follow,
        )
        if self.json_output:
            stretches = [asdict(stretch) for stretch in result.stretches]
            print(json.dumps({"out": self.out, "stretches": stretches}))
        else:
            self._show(result)
        return 0

    def _show(self, result: "OnlineResult") -> None:
        from shallowdraft.display.tables import new_table, table_console

        table = new_table("prompts", "TAR", "accepted", title=f"{self.draft} for {self.target}, as it learned")
        for stretch in result.stretches:
            table.add_row(f"{stretch.prompts:,}", f"{stretch.tar:.2f}", f"{stretch.acceptance:.0%}")
        console = table_console()
        console.print(table)
        draft = f"the draft is in {self.out}/draft" if result.draft else "the draft has learned nothing"
        console.print(f"{draft}; what was written is in {self.out}/outputs.jsonl", style="dim", soft_wrap=True)
