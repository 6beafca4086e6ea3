"""The state of a training run on disk: one file that is replaced as a whole, and the metrics up to it.

A resumed run is bit-identical to an undisturbed one because a step depends on nothing but `state.pt`:
- the weights, what the task learns beside them, and AdamW's moments are stored in full precision;
- batches, gates and rollouts draw their random numbers from (seed, step), so no generator's state is needed;
- the step number fixes the learning rate, the position in the text and the phase of the masks;
- the domain weights, which follow from losses that were measured earlier, are part of the position in the text.
A run with another shape, task or recipe would read the same file as something else, so its description is compared.
"""

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
from shallowdraft.distributed import is_first
from shallowdraft.errors import CheckpointError, TrainingError, first_line
from shallowdraft.files import path_in_errors, read_lines, replacing, require_regular
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.records import write_whole


class RunState:
    """`state.pt` with everything that the rest of a run depends on, and `metrics.jsonl` with a line a step."""

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
        self._tensorboard: Any = None
        self._last_save_s, self._saving_s = time.monotonic(), 0.0

    def is_due(self, every_s: float, share: float) -> bool:
        """Return whether the last save is `every_s` ago and the next would take no more than a share of the time."""
        return time.monotonic() - self._last_save_s >= max(every_s, self._saving_s / share)

    def save(self, step: int, best: float) -> None:
        """Replace the saved state; all processes must call this."""
        begin_s = time.monotonic()
        state = {
            "description": self._description,
            "step": step,
            "best": best,  # else a resumed run would not know a diverged loss
            "model": data_parallel.unshard(self._model.state_dict()),
            "learned": self._learned.state_dict() if self._learned else {},
            "optimiser": data_parallel.unshard(self._optimiser.state_dict()),
            "batches": self._batches.state,
        }
        if is_first():
            try:
                with replacing(self.path) as partial:
                    torch.save(state, partial)
            except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
                raise TrainingError(
                    f"the state after step {step} could not be written to {self.path.parent} ({error}); "
                    "make room and run the same command again, it goes on from the last state"
                ) from None
        # No process may go on, or end, before the state it would resume from is on disk.
        data_parallel.wait_for_all()
        self._last_save_s = time.monotonic()
        self._saving_s = self._last_save_s - begin_s

    def resume(self) -> tuple[int, float]:
        """Load the saved state, if there is one; return the number of steps done and the best loss so far."""
        if not self.path.exists():
            if is_first():
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
            # torch accepts moments of any shape here and fails, or broadcasts, only at the next step.
            if any(moment.shape not in ((), parameter.shape) for moment in moments.values()):
                raise ValueError("the optimiser's state is of other sizes")
        if self._learned:  # of masks: log a, and the multipliers, which are a buffer
            self._learned.load_state_dict(state["learned"])
        self._batches.restore(state["batches"])
        if is_first():
            self._drop_metrics_after(step)
        return step, best

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a step's figures to metrics.jsonl and, where TensorBoard is installed, to its event file."""
        if not is_first():
            return
        with path_in_errors(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._tensorboard = self._tensorboard or _new_tensorboard(self._metrics.parent)
        for name, value in (record | record["details"]).items():
            if self._tensorboard and isinstance(value, float):
                self._tensorboard.add_scalar(name, value, record["step"])

    def _drop_metrics_after(self, step: int) -> None:
        """Drop the records of steps after the saved one, which are done, and logged, again."""
        lines = (line for _, line in read_lines(self._metrics, CheckpointError)) if self._metrics.exists() else ()
        write_whole(self._metrics, "".join(islice(lines, step)))


def _new_tensorboard(folder: Path) -> Any:
    """Return a TensorBoard writer where the package is installed, else False."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(str(folder))
