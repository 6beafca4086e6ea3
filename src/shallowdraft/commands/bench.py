"""shallowdraft bench: how fast a server is, and what it accepts."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.commands.options import (
    Chat,
    Command,
    Json,
    Limit,
    MaxNewTokens,
    Name,
    OptionalLookahead,
    Prompts,
    Temperature,
)

if TYPE_CHECKING:
    from shallowdraft.results import BenchResult

ENOUGH = 0.8  # of the wanted number of concurrent requests; below it the table says so


@dataclass(frozen=True, kw_only=True)
class BenchCommand(Command):
    """Measure any server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp, TensorRT-LLM or our own.

    Streamed requests, several at a time: time to the first token, time between tokens, tokens a second, and tokens an
    iteration where the server counts them (its /metrics). Interrupted, the same command goes on.
    Example: shallowdraft bench --url http://localhost:8000 --model NAME --prompts zoo --out server.jsonl
    """

    url: str
    """Address of the server, like http://localhost:8000."""
    model: str
    """Name of the model there."""
    prompts: Prompts
    out: str
    """File for the records, a line for each request."""
    limit: Limit = None
    concurrency: tuple[int, ...] = (1,)
    """Requests at a time; several numbers are measured in turn: 1 2 4."""
    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    repeats: int = 1
    """Number of times that each prompt is asked."""
    chat: Chat = False
    draft: Name = None
    """Draft that the server speculates with, by the name it has in a study, together with --lookahead; without it, no
    speculation. `report` then shows the study's prediction beside what was measured, if --out is in the study's
    folder."""
    lookahead: OptionalLookahead = None
    api_key: Name = None
    """Key of the server; it is not written to the records. Default: the environment's OPENAI_API_KEY."""
    json_output: Json = False
    """Print {"levels": [{"concurrency", "tokens_per_s", "ttft_s", "between_s", "tar", …}, …]} and nothing else."""

    def run(self) -> int:
        from shallowdraft.api.showing import bench

        result = bench(**self.arguments(bench))
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result)
        if result.unanswered:
            numbers = ", ".join(map(str, result.unanswered))
            print(f"error: nothing was answered at {numbers} at once; {self.out} says why", file=sys.stderr)
        return 2 if result.unanswered or any(level.failed for level in result.levels) else 0


def show(result: "BenchResult") -> None:
    """Print the figures at each concurrency."""
    from shallowdraft.display.tables import new_table, table_console

    columns = ("at once", "requests", "failed", "tokens/s", "first token ms", "p95", "between ms", "TAR", "accepted")
    table = new_table(*columns, title=result.caption)
    for level in result.levels:
        table.add_row(
            str(level.concurrency),
            str(level.requests),
            str(level.failed),
            _bounded(level.tokens_per_s, level.tokens_per_s_interval),
            _bounded(level.ttft_s, level.ttft_s_interval, 1e3),
            f"{1e3 * level.ttft_s_p95:.0f}",
            "" if level.between_s is None else _bounded(level.between_s, level.between_s_interval, 1e3),
            "" if level.tar is None else f"{level.tar:.2f}",
            "" if level.acceptance_rate is None else f"{level.acceptance_rate:.0%}",
        )
    console = table_console()
    console.print(table)
    for level in result.levels:
        if level.under_way < ENOUGH * level.concurrency:
            few = f"of {level.concurrency} at once only {level.under_way:.1f} were under way on average"
            console.print(f"{few}: ask more with --limit or --repeats", style="dim", soft_wrap=True)


def _bounded(figure: float, interval: tuple[float, float] | None, scale: float = 1) -> str:
    low, high = interval or (figure, figure)
    return f"{scale * figure:.1f} ({scale * low:.1f}–{scale * high:.1f})"
