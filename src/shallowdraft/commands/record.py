"""shallowdraft record: what a target writes after each prompt, once."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shallowdraft.commands.options import (
    Chat,
    Json,
    Limit,
    MaxNewTokens,
    ModelCommand,
    Name,
    Prompts,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
)
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.runs.trace import Trace


@dataclass(frozen=True, kw_only=True)
class RecordCommand(ModelCommand):
    """Record what a target writes after each prompt; `replay` then knows the acceptance of any draft from one pass.

    Interrupted, the same command goes on. A prompt that leaves no room for the new tokens is cut from the left.
    Example: shallowdraft record --target DIR --prompts hellaswag arena --out trace.jsonl
    """

    target: Target
    out: str
    """File of the trace, in JSON lines."""
    prompts: Prompts = ()
    limit: Limit = None
    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    samples: int = 1
    """Continuations of each prompt, where they are drawn."""
    seed: Seed = 0
    batch: int = 8
    """Prompts at a time."""
    chat: Chat = False
    import_file: Annotated[Name, tyro.conf.arg(name="import")] = None
    """Take the outputs from this file instead of running the target, of which only config and tokenizer are read."""
    import_format: Literal["completions", "tensors"] = "completions"
    """completions: OpenAI-style responses with token ids, one a line. tensors: the paper authors' printed
    tensor([[…]]), one for each prompt of --prompts."""
    json_output: Json = False
    """Print {"out", "target", "outputs", "tokens", "cut"} and nothing else on stdout."""

    def run(self) -> int:
        trace = self._record() if self.import_file is None else self._import(self.import_file)
        tokens = sum(len(output.output) for output in trace.outputs)
        cut = sum(output.cut > 0 for output in trace.outputs)
        if self.json_output:
            result = {
                "out": self.out,
                "target": trace.target,
                "outputs": len(trace.outputs),
                "tokens": tokens,
                "cut": cut,
            }
            print(json.dumps(result))
        note = f"; {cut} prompts were too long and cut from the left" if cut else ""
        print(f"{self.out}: {len(trace.outputs)} outputs, {tokens:,} tokens{note}", file=sys.stderr)
        return 0

    def _record(self) -> "Trace":
        from shallowdraft.api.measuring import record

        self.set_threads()
        return record(**self.arguments(record))

    def _import(self, file: str) -> "Trace":
        from shallowdraft.api.measuring import import_trace

        prompts = self.prompts[0] if len(self.prompts) == 1 else None
        if self.import_format == "tensors" and prompts is None:
            raise OptionError("tensors need --prompts with the file that they belong to, and a target with a tokenizer")
        return import_trace(file, self.target, self.out, format=self.import_format, prompts=prompts)
