"""Options that commands share."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.models.model import Model
    from shallowdraft.studying.cluster import Executor

Name = Annotated[str | None, arg(metavar="NAME")]
Number = Annotated[int | None, arg(metavar="N")]
Rate = Annotated[float | None, arg(metavar="R")]


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """What every command takes."""

    debug: bool = False
    """Show the whole traceback of an error instead of one line."""

    @abstractmethod
    def run(self) -> int:
        """Do it; the exit code."""


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """What every command takes that loads a model."""

    dtype: Name = None
    """float32, bfloat16, float16 or int8. Default: float32 on a CPU, bfloat16 on CUDA."""
    device: Name = None
    """cpu, cuda or cuda:N. Default: CUDA where there is one."""
    threads: Number = None
    """CPU threads. Default: one a core."""

    def set_threads(self) -> None:
        import torch

        cores = os.cpu_count() or 1
        if self.threads is not None:
            if not 1 <= self.threads <= cores:
                raise OptionError(f"threads is {self.threads}; it must be 1 to {cores}, the number of cores here")
            torch.set_num_threads(self.threads)


def require_decoder_only(*names: str) -> None:
    """Refuse encoder–decoders; torch is imported only now."""
    from shallowdraft.models import checkpoint

    checkpoint.require_decoder_only(*names)


@dataclass(frozen=True, kw_only=True)
class DraftCommand(ModelCommand):
    """What every command takes that loads a draft."""

    draft_dtype: Name = None
    """Of drafts alone: it changes their speed, never the output. Default: int8 on a CPU with gcc, else as --dtype."""

    def load_draft(self, name: str) -> "Model":
        from shallowdraft.models.model import load_draft

        require_decoder_only(name)
        return load_draft(name, self.draft_dtype or self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class ClusterCommand(DraftCommand):
    """What every command takes whose work can be spread over machines."""

    cluster: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Of a Ray cluster, like 10.0.0.1:6379: replays and builds become its tasks; times are taken here all the same."""

    def executor(self) -> "Executor":
        from shallowdraft.models.model import resolve_device
        from shallowdraft.studying.cluster import Cluster, Here

        if self.cluster is None:
            return Here()
        return Cluster(self.cluster, gpus=int(resolve_device(self.device).type == "cuda"))
