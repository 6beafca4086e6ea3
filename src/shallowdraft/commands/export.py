"""shallowdraft export: a draft and its target for the engine that will serve them."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from shallowdraft.commands.options import Command, Name, Number, require_decoder_only
from shallowdraft.errors import OptionError

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
    """Checkpoint folder, hub id or zoo name."""
    target: str
    """The model that it drafts for, named likewise."""
    engine: Literal["vllm", "sglang", "trtllm", "llama.cpp", "transformers"]
    """Who will serve them."""
    out: str
    """Folder to make."""
    study: Name = None
    """Folder of a study of this target and this draft: its best lookahead is set, by batch size where the engine takes
    that and the study's profile.jsonl has batches (profile --batches … --out RUN/profile.jsonl)."""
    lookahead: Number = None
    """Draft tokens an iteration instead of the study's, 1 to 32."""
    dtype: Name = None
    """float32, bfloat16 or float16. Default: what the checkpoint's config says."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"folder", "command", "files", "advice"} and nothing else."""

    def run(self) -> int:
        from shallowdraft.display.progress import notes
        from shallowdraft.exporting.engines import supported_lookaheads
        from shallowdraft.exporting.export import START, export

        if self.dtype == "int8":
            raise OptionError("no other engine reads our int8; use float32, bfloat16 or float16")
        require_decoder_only(self.target, self.draft)
        advice = self._advice()
        notes(advice.notes)
        made = export(self.draft, self.target, self.engine, advice, Path(self.out), self.dtype)
        if self.json_output:
            found = {"folder": self.out, "command": made.setup.command, "files": made.setup.files}
            print(json.dumps(found | {"advice": vars(advice)}))
            return 0
        print(f"{self.out}: {self.draft} for {self.engine}, vocabulary {made.vocabulary}")
        print(f"lookahead {advice.lookahead}{_known(advice)}")
        if by_batch := supported_lookaheads(self.engine, advice.by_batch):
            print("by batch size: " + ", ".join(f"{batch}: {d}" for batch, d in by_batch.items()))
        print(f"start it: {shlex.quote(str(Path(self.out) / START))}")
        print(f"which runs there: {made.command}")
        print(f"{made.setup.variable}=/path/to/{made.setup.command[0]} names another {made.setup.command[0]}")
        return 0

    def _advice(self) -> "Advice":
        from shallowdraft.exporting.advice import Advice, advise
        from shallowdraft.limits import MAX_LOOKAHEAD

        if self.lookahead is not None:
            if self.study is not None:
                raise OptionError("--study says how far to look ahead; leave out --lookahead, or the study")
            if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
                raise OptionError(f"--lookahead is {self.lookahead}; it must be 1 to {MAX_LOOKAHEAD}")
            return Advice(self.lookahead)
        if self.study is None:
            raise OptionError("give --study with the folder of a study, or --lookahead with a number")
        return advise(Path(self.study), self.target, self.draft)


def _known(advice: "Advice") -> str:
    """How fast it is, by the study."""
    if advice.speed_up is None:
        return ""
    bounds = " ({:.2f}–{:.2f})".format(*advice.interval) if advice.interval else ""
    return f": {advice.speed_up:.2f}x{bounds} as fast here, {advice.how}"
