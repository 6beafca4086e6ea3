"""Options that commands share: each has one name, one type and one meaning everywhere."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, Literal

from tyro.conf import arg

from shallowdraft.errors import OptionError

Name = Annotated[str | None, arg(metavar="NAME")]
Number = Annotated[int | None, arg(metavar="N")]
Rate = Annotated[float | None, arg(metavar="R")]

Target = Annotated[str, arg(help="Target: checkpoint folder, hub id or zoo name.")]
Draft = Annotated[str | None, arg(metavar="NAME", help="Draft: checkpoint folder, hub id or zoo name.")]
RequiredDraft = Annotated[str, arg(help="Draft: checkpoint folder, hub id or zoo name.")]
Drafts = Annotated[tuple[str, ...], arg(help="Drafts: checkpoint folders, hub ids or zoo names.")]
Trace = Annotated[str, arg(help="Trace of the target, a file that `record` wrote.")]
OptionalTrace = Annotated[str | None, arg(metavar="NAME", help="Trace of the target, a file that `record` wrote.")]
Prompts = Annotated[
    tuple[str, ...],
    arg(
        help="Prompts: sets that ship with the package (mmlu, hellaswag, arena, spec-bench, humaneval, gsm8k, "
        'mt-bench, zoo), and files of {"prompt": …} or {"ids": […]} lines.'
    ),
]
Limit = Annotated[int | None, arg(metavar="N", help="At most this many prompts or questions of each set.")]
MaxNewTokens = Annotated[int, arg(help="Tokens to write after each prompt, at most.")]
Temperature = Annotated[float, arg(help="Temperature; 0 takes the most likely token each time, above 0 draws.")]
TopK = Annotated[int | None, arg(metavar="K", help="Draw from the K most likely tokens only.")]
TopP = Annotated[
    float | None, arg(metavar="P", help="Draw from the most likely tokens that together reach probability P.")
]
Chat = Annotated[bool, arg(help="Put each prompt through the chat template as the user's turn.")]
Lookaheads = Annotated[str, arg(help="Lookaheads to consider: from:to, or several numbers like 1,2,4; from 1 to 32.")]
Lookahead = Annotated[int, arg(help="Lookahead: draft tokens an iteration, 1 to 32.")]
OptionalLookahead = Annotated[int | None, arg(metavar="N", help="Lookahead: draft tokens an iteration, 1 to 32.")]
Nodes = Annotated[int | None, arg(metavar="N", help="Number of tokens in a proposed tree, 1 to 63.")]
Heads = Annotated[
    str | None,
    arg(
        metavar="NAME",
        help="Medusa heads: what `heads` wrote. Default: the folder `heads` beside the target's weights.",
    ),
]
Skips = Annotated[
    str | None,
    arg(metavar="NAME", help="Skipped parts: what `skip-search` wrote. Default: the second half of the layers."),
]
Rounds = Annotated[int, arg(help="Rounds of timing: samples of each point.")]
Seed = Annotated[int, arg(help="Seed of all random choices.")]
Dtype = Annotated[
    Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "int8"] | None, arg(metavar="DTYPE")
]
Json = Annotated[bool, arg(name="json")]


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """Options of every command."""

    debug: bool = False
    """Show the whole traceback of an error instead of one line."""

    @abstractmethod
    def run(self) -> int:
        """Run the command and return its exit code."""

    def arguments(self, function: Callable[..., object]) -> dict[str, Any]:
        """Return the options that a function of the API takes, by the names of its parameters."""
        return {name: getattr(self, name) for name in signature(function).parameters if hasattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """Options of every command that loads a model."""

    dtype: Dtype = None
    """Precision: float32, bfloat16, float16 or int8. Default: float32 on a CPU, bfloat16 on CUDA."""
    device: Name = None
    """cpu, cuda or cuda:N. Default: CUDA where there is one."""
    threads: Number = None
    """CPU threads. Default: one a core."""

    def set_threads(self) -> None:
        """Use as many CPU threads as were asked for."""
        import torch

        cores = os.cpu_count() or 1
        if self.threads is not None:
            if not 1 <= self.threads <= cores:
                raise OptionError(f"--threads is {self.threads}; it must be 1 to {cores}, the number of cores here")
            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class DraftCommand(ModelCommand):
    """Options of every command that loads a draft."""

    draft_dtype: Dtype = None
    """Precision of drafts, which changes their speed, never the output. Default: int8 on a CPU with gcc, or --dtype."""


@dataclass(frozen=True, kw_only=True)
class ClusterCommand(DraftCommand):
    """Options of every command whose work can be spread over machines."""

    cluster: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Address of a Ray cluster, like 10.0.0.1:6379: replays and builds run there; times are still taken here."""
