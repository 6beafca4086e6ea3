"""The state of a training run on disk: one file that is replaced whole, and the metrics up to it."""

import json
import math
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shallowdraft.building import data_parallel
from shallowdraft.building.batches import Batches
from shallowdraft.errors import CheckpointError, TrainingError, first_line
from shallowdraft.files import path_in_errors, read_lines, require_regular
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.records import write_whole


class RunState:
    """`state.pt` holds all that the rest of a run depends on, `metrics.jsonl` a line a step."""

    def __init__(
        self,
        folder: Path,
        model: Decoder | Heads,
        learned: nn.Module | None,
        optimiser: torch.optim.Optimizer,
        batches: Batches,
        description: Mapping[str, Any],
    ) -> None:
        self.path, self._metrics = folder / "state.pt", folder / "metrics.jsonl"
        self._model, self._learned, self._optimiser, self._batches = model, learned, optimiser, batches
        self._description = dict(description)
        folder.mkdir(parents=True, exist_ok=True)
        self._board: Any = None
        self._saved_s, self._saving_s = time.monotonic(), 0.0

    def due(self, every_s: float, share: float) -> bool:
        """Whether it is that long ago that it was saved, and saving takes no more than a share of the time."""
        return time.monotonic() - self._saved_s >= max(every_s, self._saving_s / share)

    def save(self, step: int, best: float) -> None:
        begin_s = time.monotonic()
        state = {
            "description": self._description,
            "step": step,
            "best": best,
            "model": data_parallel.whole(self._model.state_dict()),
            "learned": self._learned.state_dict() if self._learned else {},
            "optimiser": data_parallel.whole(self._optimiser.state_dict()),
            "batches": self._batches.state,
        }
        if data_parallel.is_first():
            partial = self.path.with_suffix(".partial")
            try:
                torch.save(state, partial)
                partial.replace(self.path)
            except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
                partial.unlink(missing_ok=True)
                raise TrainingError(
                    f"the state after step {step} could not be written to {self.path.parent} ({error}); "
                    "make room and run the same command again, it goes on from the last state"
                ) from None
        data_parallel.wait()
        self._saved_s = time.monotonic()
        self._saving_s = self._saved_s - begin_s

    def resume(self) -> tuple[int, float]:
        """Load what was saved, if anything; the step to go on with and the best loss so far."""
        if not self.path.exists():
            if data_parallel.is_first():
                self._metrics.unlink(missing_ok=True)
            return 0, math.inf
        require_regular(self.path, CheckpointError)
        try:
            return self._restore(torch.load(self.path, map_location=self._model.device, weights_only=True))
        except (TrainingError, MemoryError):
            raise
        except Exception as error:  # junk makes the unpickler, and what is loaded from it, fail in any way it likes
            raise CheckpointError(
                f"{self.path}: not the state of a run ({first_line(error)}); copy it again, or remove it to start anew"
            ) from None

    def _restore(self, state: Any) -> tuple[int, float]:
        if state["description"] != self._description:
            raise TrainingError(f"{self.path} belongs to another run; name another folder, or remove it to start anew")
        step, best = int(state["step"]), float(state["best"])
        if step < 1 or math.isnan(best):
            raise ValueError(f"step {step}, loss {best}")
        data_parallel.load_model(self._model, state["model"])
        data_parallel.load_optimiser(self._optimiser, state["optimiser"])
        for parameter, moments in self._optimiser.state.items():
            if any(moment.shape not in ((), parameter.shape) for moment in moments.values()):
                raise ValueError("the optimiser's state is of other sizes")
        if self._learned:
            self._learned.load_state_dict(state["learned"])
        self._batches.restore(state["batches"])
        if data_parallel.is_first():
            self._forget_after(step)
        return step, best

    def log(self, record: Mapping[str, Any]) -> None:
        if not data_parallel.is_first():
            return
        with path_in_errors(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._board = self._board or _tensorboard(self._metrics.parent)
        for name, value in (record | record["details"]).items():
            if self._board and isinstance(value, float):
                self._board.add_scalar(name, value, record["step"])

    def _forget_after(self, step: int) -> None:
        """Steps after the saved one are done again; their records would stand there twice."""
        lines = (line for _, line in read_lines(self._metrics, CheckpointError)) if self._metrics.exists() else ()
        write_whole(self._metrics, "".join(islice(lines, step)))


def _tensorboard(folder: Path) -> Any:
    """A TensorBoard writer where the package is installed, else False."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(str(folder))
