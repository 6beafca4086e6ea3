"""shallowdraft export: a draft and its target for the engine that will serve them."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from shallowdraft.api.defaults import ServingEngine
from shallowdraft.commands.options import Command, Dtype, Json, Name, OptionalLookahead, Target

if TYPE_CHECKING:
    from shallowdraft.exporting.advice import Advice


@dataclass(frozen=True, kw_only=True)
class ExportCommand(Command):
    """Write a draft for another engine, with the lookahead that a study found best and the command that starts it.

    The draft gets the target's tokenizer and number of token ids. The target is left where it is, unless the engine
    cannot read it there: GGUF for llama.cpp, and models of the zoo.
    Example: shallowdraft export zoo:4x128 --target zoo:target --engine vllm --study run --out served
    """

    draft: Annotated[Positional[str], tyro.conf.arg(metavar="DRAFT")]
    """Draft: checkpoint folder, hub id or zoo name."""
    target: Target
    engine: ServingEngine
    """Who will serve them."""
    out: str
    """Folder to make."""
    study: Name = None
    """Folder of a study of this target and this draft: its best lookahead is set, by batch size where the engine takes
    that and the study's profile.jsonl has batches (profile --batches … --out RUN/profile.jsonl)."""
    lookahead: OptionalLookahead = None
    dtype: Dtype = None
    """Precision: float32, bfloat16, float16 or int8. The last is refused. Default: the checkpoint's."""
    json_output: Json = False
    """Print {"folder", "command", "files", "advice"} and nothing else."""

    def run(self) -> int:
        from shallowdraft.api.showing import export
        from shallowdraft.exporting.engines import supported_lookaheads
        from shallowdraft.exporting.export import START

        exported = export(**self.arguments(export))
        advice = exported.advice
        if self.json_output:
            print(json.dumps(exported.to_json()))
            return 0
        print(f"{self.out}: {self.draft} for {self.engine}, vocabulary {exported.vocabulary}")
        print(f"lookahead {advice.lookahead}{_known(advice)}")
        if by_batch := supported_lookaheads(self.engine, advice.by_batch):
            print("by batch size: " + ", ".join(f"{batch}: {lookahead}" for batch, lookahead in by_batch.items()))
        print(f"start it: {shlex.quote(str(Path(self.out) / START))}")
        print(f"which runs there: {exported.command}")
        program = exported.setup.command[0]
        print(f"{exported.setup.variable}=/path/to/{program} names another {program}")
        return 0


def _known(advice: "Advice") -> str:
    """How fast it is, by the study."""
    if advice.speed_up is None:
        return ""
    bounds = " ({:.2f}–{:.2f})".format(*advice.interval) if advice.interval else ""
    return f": {advice.speed_up:.2f}x{bounds} as fast here, {advice.how}"
