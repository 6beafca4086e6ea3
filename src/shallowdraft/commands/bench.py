"""shallowdraft bench: how fast a server is, and what it accepts."""

import json
import os
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import Command, Name, Number
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.benchmarking.levels import Level

ENOUGH = 0.8  # of the requests that are to be under way


@dataclass(frozen=True, kw_only=True)
class BenchCommand(Command):
    """Measure any server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp, TensorRT-LLM or our own.

    Streamed requests, so many at a time: time to the first token, time between tokens, tokens a second, and tokens an
    iteration where the server counts them (its /metrics). Stopped half-way, the same command goes on.
    Example: shallowdraft bench --url http://localhost:8000 --model NAME --prompts zoo --out server.jsonl
    """

    url: str
    """Where the server is, like http://localhost:8000."""
    model: str
    """The model's name there."""
    prompts: tuple[str, ...]
    """Sets that ship with the package, and files of {"prompt": …} or {"ids": […]} lines."""
    out: str
    """File for the records: a line a request."""
    limit: Number = None
    """At most so many prompts of each set."""
    concurrency: tuple[int, ...] = (1,)
    """How many requests are under way at once; several numbers are measured in turn: 1 2 4."""
    max_new_tokens: int = 128
    """Tokens to ask for."""
    temperature: float = 0.0
    """0 takes the most likely token each time; above 0 draws."""
    rounds: int = 1
    """How often each prompt is asked."""
    chat: bool = False
    """Ask /v1/chat/completions with each prompt as the user's turn, instead of /v1/completions."""
    draft: Name = None
    """What the server speculates with, by the name it has in a study, with --lookahead; nothing: no draft. `report`
    then shows the study's prediction beside what was measured, if --out is in the study's folder."""
    lookahead: Number = None
    """Draft tokens an iteration of the server."""
    api_key: Name = None
    """The server's key; it is not written to the records. Default: the environment's OPENAI_API_KEY."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"levels": [{"concurrency", "tokens_per_s", "ttft_s", "between_s", "tar", …}, …]} and nothing else."""

    def run(self) -> int:
        from shallowdraft.benchmarking.endpoint import Endpoint
        from shallowdraft.benchmarking.levels import summarise
        from shallowdraft.benchmarking.load import Load, run_load
        from shallowdraft.commands.record import gather
        from shallowdraft.display.progress import follow

        if min((*self.concurrency, self.max_new_tokens, self.rounds)) < 1 or not self.concurrency:
            raise OptionError("--concurrency, --max-new-tokens and --rounds must be at least 1")
        if (self.draft is None) != (self.lookahead is None):
            raise OptionError("--draft and --lookahead go together: what the server speculates with, and how far")
        if self.lookahead is not None and self.lookahead < 1:
            raise OptionError(f"--lookahead is {self.lookahead}; it must be at least 1")
        prompts = gather(self.prompts, self.limit)
        many = list(dict.fromkeys(self.concurrency))
        load = Load(
            prompts,
            many,
            self.max_new_tokens,
            rounds=self.rounds,
            temperature=self.temperature,
            chat=self.chat,
            draft=self.draft,
            lookahead=self.lookahead,
        )
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        with closing(Endpoint(self.url, self.model, key)) as endpoint:
            endpoint.check()
            steps = run_load(endpoint, load, Path(self.out))
            follow("asking the server", steps, len(prompts) * self.rounds * len(many))
        found = summarise(Path(self.out))
        if self.json_output:
            print(json.dumps({"levels": [asdict(level) for level in found]}))
        else:
            _show(found, f"{self.model} at {endpoint.url}")
        silent = [str(one) for one in many if one not in {level.concurrency for level in found}]
        if silent:
            print(f"error: nothing was answered at {', '.join(silent)} at once; {self.out} says why", file=sys.stderr)
        return 2 if silent or any(level.failed for level in found) else 0


def _show(found: "list[Level]", title: str) -> None:
    from shallowdraft.display.tables import new_table, table_console

    columns = ("at once", "requests", "failed", "tokens/s", "first token ms", "p95", "between ms", "TAR", "accepted")
    table = new_table(*columns, title=title)
    for one in found:
        table.add_row(
            str(one.concurrency),
            str(one.requests),
            str(one.failed),
            _bounded(one.tokens_per_s, one.tokens_per_s_interval),
            _bounded(one.ttft_s, one.ttft_s_interval, 1e3),
            f"{1e3 * one.ttft_s_p95:.0f}",
            "" if one.between_s is None else _bounded(one.between_s, one.between_s_interval, 1e3),
            "" if one.tar is None else f"{one.tar:.2f}",
            "" if one.acceptance_rate is None else f"{one.acceptance_rate:.0%}",
        )
    console = table_console()
    console.print(table)
    for one in found:
        if one.under_way < ENOUGH * one.concurrency:
            said = f"of {one.concurrency} at once only {one.under_way:.1f} were under way on average"
            console.print(f"{said}: ask more with --limit or --rounds", style="dim", soft_wrap=True)


def _bounded(figure: float, interval: tuple[float, float] | None, scale: float = 1) -> str:
    low, high = interval or (figure, figure)
    return f"{scale * figure:.1f} ({scale * low:.1f}–{scale * high:.1f})"
