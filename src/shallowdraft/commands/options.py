"""Options that commands share."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command takes."""

    debug: bool = False
    """Show the whole traceback of an error instead of one line."""

    def run(self) -> int:
        """Do it; the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """What every command takes that loads a model."""

    dtype: str | None = None
    """float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on CUDA."""
    device: str | None = None
    """cpu, cuda or cuda:N. Default: CUDA where there is one."""
    threads: int | None = None
    """CPU threads. Default: one a core."""

    def set_threads(self) -> None:
        import torch

        from shallowdraft.errors import OptionError

        if self.threads is not None:
            if self.threads < 1:
                raise OptionError(f"threads is {self.threads}; it must be at least 1")
            torch.set_num_threads(self.threads)
