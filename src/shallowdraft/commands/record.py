"""shallowdraft record: what a target writes after each prompt, once."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import ModelCommand, Name, Number, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.prompts import Prompt
    from shallowdraft.runs.trace import Output

FORMATS = ("completions", "tensors")


@dataclass(frozen=True, kw_only=True)
class RecordCommand(ModelCommand):
    """Record what a target writes after each prompt; `replay` then knows the acceptance of any draft from one pass.

    Stopped half-way, the same command goes on. A prompt that leaves no room for the new tokens is cut from the left.
    Example: shallowdraft record --target DIR --prompts hellaswag arena --out trace.jsonl
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    out: str
    """The trace: a file of JSON lines."""
    prompts: tuple[str, ...] = ()
    """Sets that ship with the package (mmlu, hellaswag, arena, spec-bench, humaneval, gsm8k, mt-bench, zoo), and files
    of {"prompt": …} or {"ids": […]} lines."""
    limit: Number = None
    """At most so many prompts of each set."""
    max_new_tokens: int = 128
    """Tokens to write after each prompt."""
    temperature: float = 0.0
    """0 takes the most likely token each time; above 0 draws."""
    top_k: Number = None
    """Draw from the K most likely tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draw from the most likely tokens that together reach probability P."""
    samples: int = 1
    """Continuations of each prompt, where they are drawn."""
    seed: int = 0
    """Seed of the draws."""
    batch: int = 8
    """Prompts at a time."""
    chat: bool = False
    """Put each prompt through the target's chat template as the user's turn."""
    import_file: Annotated[Name, tyro.conf.arg(name="import")] = None
    """Take the outputs from this file instead of running the target, of which only config and tokenizer are read."""
    import_format: Annotated[str, tyro.conf.arg(metavar="{completions,tensors}")] = "completions"
    """completions: OpenAI-style responses with token ids, one a line. tensors: the paper authors' printed
    tensor([[…]]), one for each prompt of --prompts."""

    def run(self) -> int:
        require_decoder_only(self.target)
        if self.import_file is not None:
            return self._import(Path(self.import_file))
        import shallowdraft as sd
        from shallowdraft.display.progress import follow
        from shallowdraft.replaying.recording import record
        from shallowdraft.runs.sampling import Sampling
        from shallowdraft.runs.trace import read_trace

        if self.max_new_tokens < 1 or self.samples < 1 or self.batch < 1:
            raise OptionError("--max-new-tokens, --samples and --batch must be at least 1")
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        if sampling.greedy and self.samples > 1:
            raise OptionError("greedy samples are all the same; give --temperature above 0")
        prompts = gather(self.prompts, self.limit)
        self.set_threads()
        target = sd.load(self.target, self.dtype, self.device)
        steps = record(
            target,
            prompts,
            Path(self.out),
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            samples=self.samples,
            batch=self.batch,
            chat=self.chat,
        )
        follow("recording", steps, len(prompts) * self.samples)
        _say(read_trace(Path(self.out)).outputs, self.out)
        return 0

    def _import(self, file: Path) -> int:
        from shallowdraft.identity import folder_digest
        from shallowdraft.models.checkpoint import find_folder, read_shape
        from shallowdraft.models.vocabulary import load_tokenizer
        from shallowdraft.replaying.trace_import import import_completions, import_tensors, write_trace
        from shallowdraft.replaying.vocabulary import vocabulary

        if self.import_format not in FORMATS:
            raise OptionError(f"--import-format is {self.import_format}; it must be one of {', '.join(FORMATS)}")
        folder = find_folder(self.target, weights=False)
        tokenizer = load_tokenizer(folder)
        if self.import_format == "completions":
            law, outputs = import_completions(file)
        elif len(self.prompts) != 1 or tokenizer is None:
            raise OptionError("tensors need --prompts with the file that they belong to, and a target with a tokenizer")
        else:
            law, outputs = import_tensors(file, Path(self.prompts[0]), tokenizer)
        ids = vocabulary(tokenizer, read_shape(folder).vocab)
        write_trace(Path(self.out), self.target, ids, law, outputs, file, folder_digest(folder))
        _say(outputs, self.out)
        return 0


def gather(names: tuple[str, ...], limit: int | None) -> "list[tuple[str, Prompt]]":
    """Prompts with the name of their set."""
    from shallowdraft.prompts import load_prompts
    from shallowdraft.prompts import names as shipped

    if not names:
        raise OptionError(f"give --prompts: some of {', '.join(shipped())}, or files")
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}; it must be at least 1")
    found = [(Path(name).stem, prompt) for name in names for prompt in load_prompts(name)[:limit]]
    if len({(name, prompt.id) for name, prompt in found}) < len(found):
        raise OptionError("two prompts have the same set and id; give each set once, and each line another id")
    return found


def _say(outputs: "list[Output]", path: str) -> None:
    tokens, cut = sum(len(one.output) for one in outputs), sum(one.cut > 0 for one in outputs)
    note = f"; {cut} prompts were too long and cut from the left" if cut else ""
    print(f"{path}: {len(outputs)} outputs, {tokens:,} tokens{note}", file=sys.stderr)
