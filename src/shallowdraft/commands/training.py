"""What the commands that train share: options, the token store, a progress line, the end."""

import json
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.interruption import noted, obey
from shallowdraft.commands.options import ModelCommand, Rate
from shallowdraft.errors import OptionError, TrainingError, printable
from shallowdraft.files import read_json
from shallowdraft.records import write_whole

if TYPE_CHECKING:
    import torch

    from shallowdraft.building.estimate import Plan
    from shallowdraft.building.stages import Workshop
    from shallowdraft.building.token_store import TokenStore
    from shallowdraft.building.training import Recipe, Step
    from shallowdraft.models.model import Model
    from shallowdraft.shapes.shape import ModelShape

_SAME_RESULT = ("debug", "device", "threads", "json_output", "out", "dry_run")  # options that do not change a run
SWEPT = (0.5, 1.0, 2.0)  # learning rates that are tried, over the one that the width suggests
LOG_EVERY_S = 30
SWEEP_SHARE = 0.1  # of the tokens, for each


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ModelCommand):
    """What every command takes that trains. Killed or interrupted, the same command goes on where it stopped; where it
    is done it says so again.

    Under `torchrun --nproc-per-node N -m shallowdraft …` the work is shared by N processes.
    """

    corpus: str
    """Folder of text: domain.jsonl (lines with a "text" field) or domain.txt, also .xz, .gz; domain-val is held out.
    Or a folder that `datasets` saved."""
    out: str
    """Folder for the model; OUT/training holds tokens, the state of the run and metrics.jsonl."""
    tokens: int
    """Tokens to train on."""
    batch_tokens: int = 16384
    """Tokens in a batch."""
    sequence: int = 256
    """Tokens in a sequence."""
    learning_rate: Rate = None
    """Peak of the learning rate. Default: what the model's width suggests; prune and distill try three around it."""
    seed: int = 0
    """Seed of the order of the text, and of fresh weights."""
    compile: bool = False
    """Train through torch.compile: a minute to start, then faster on a GPU."""
    recompute: bool = False
    """Compute activations again on the way back instead of keeping them: slower, for large models."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the result as one JSON object and nothing else on stdout."""

    def run(self) -> int:
        if (Path(self.out) / "config.json").exists():
            return self._say_again()
        return self.build()

    @abstractmethod
    def build(self) -> int:
        """Train, measure and `finish`."""

    @property
    def work(self) -> Path:
        return Path(self.out) / "training"

    def recipe(self, shape: "ModelShape | None" = None) -> "Recipe":
        from shallowdraft.building.training import Recipe, rows_at_once, usual_rate

        rate = self.learning_rate or (usual_rate(shape) if shape else 1e-3)
        return Recipe(
            tokens=self.tokens,
            batch_tokens=self.batch_tokens,
            sequence=self.sequence,
            micro_rows=rows_at_once(shape, self.sequence) if shape else 1,
            learning_rate=rate,
            seed=self.seed,
        )

    def start(self) -> "torch.device":
        """Find what is wrong before any work, and join the other processes."""
        from shallowdraft.building import data_parallel
        from shallowdraft.models.model import resolve_device

        self.recipe()
        self.set_threads()
        device = data_parallel.join(resolve_device(self.device))
        self._require_same_run()
        return device

    def require_float32(self) -> None:
        if self.dtype not in (None, "float32"):
            raise OptionError(f"--dtype is {self.dtype}; weights are trained in float32, on CUDA with bf16 arithmetic")

    @property
    def _record(self) -> Path:
        """The options of the run that the work folder belongs to; there once it trains."""
        return self.work / "run.json"

    @property
    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _SAME_RESULT}

    @property
    def resumes(self) -> bool:
        """Whether what lies in the work folder is this run's."""
        return self._record.exists()

    def _changed(self) -> str:
        """The options that the run in the output folder, if there is one, was started with and this one was not."""
        if not self.resumes:
            return ""
        begun = read_json(self._record, TrainingError)
        if set(begun) != set(self._options):
            return "another command"
        changed = [name for name, value in self._options.items() if value != begun[name]]
        return ", ".join(f"--{name.replace('_', '-')} {printable(str(begun[name]))[:200]}" for name in changed)

    def _require_same_run(self) -> None:
        """An unfinished run in the output folder must have been started with the same options."""
        if was := self._changed():
            raise OptionError(
                f"{self.out} holds an unfinished run that was started with {was}; use the same options to go on, "
                "or name another folder"
            )

    @property
    def _result(self) -> Path:
        """What `finish` said of the run; there before the model is."""
        return self.work / "result.json"

    def _say_again(self) -> int:
        """The model is there: say what came of it, if it is this run's."""
        changed = self._changed()
        if changed or not self._result.exists():
            made = f", made with {changed}" if changed else ""
            raise OptionError(f"{self.out} already holds a model{made}; name another folder")
        say(f"{self.out} is done")
        self._say(read_json(self._result, TrainingError))
        return 0

    def begin(self) -> None:
        """Nothing stands in the way of training: from here on the work folder is this run's."""
        from shallowdraft.building import data_parallel

        if data_parallel.is_first():
            write_whole(self._record, json.dumps(self._options, indent=2) + "\n")

    def workshop(self, tokenizer: Any) -> "Workshop":
        from shallowdraft.building.batches import Batches
        from shallowdraft.building.stages import Workshop

        store = self.store(tokenizer)
        Batches(store, rows=1, sequence=self.sequence, seed=0)  # is there text enough?
        judged = Batches(store, part="val", rows=1, sequence=self.sequence, seed=0).weights
        if silent := [domain for domain in store.domains if domain not in judged]:
            say(f"{', '.join(silent)}: too little held-out text for sequences of {self.sequence}, not in the figures")
        return Workshop(store, self.work, follow, count=count, compiled=self.compile, recompute=self.recompute)

    def store(self, tokenizer: Any) -> "TokenStore":
        """The corpus in tokens: made once, kept in the work folder."""
        from shallowdraft.building import data_parallel
        from shallowdraft.building.token_store import open_store, write_store

        folder = self.work / "tokens"
        if data_parallel.is_first() and not self.resumes:
            say(f"reading {self.corpus}")
            shutil.rmtree(folder, ignore_errors=True)  # of a start that did not come to training
            write_store(Path(self.corpus), tokenizer, folder)
        data_parallel.wait()
        store = open_store(folder)
        store.require_tokenizer(tokenizer)
        return store

    def finish(self, model: "Model", measured: dict[str, float]) -> int:
        """Save the model and say what came of it."""
        about = {"shape": str(model.shape), "parameters": model.shape.parameters}
        said = f"{model.shape}, {model.shape.parameters:,} parameters"
        return self.conclude(lambda: model.save(self.out), about, said, measured)

    def conclude(self, save: "Callable[[], None]", about: dict[str, Any], said: str, measured: dict[str, float]) -> int:
        """Save what was trained and say what it is and what it measures: the same if it is asked for once more."""
        from shallowdraft.building import data_parallel

        if wrong := [name for name, value in measured.items() if not isfinite(value)]:
            raise TrainingError(
                f"{self.out}: {wrong[0].replace('_', ' ')} of the trained model is {measured[wrong[0]]}; "
                f"if training did not diverge, its saved state is damaged: remove {self.work} and train again"
            )
        if data_parallel.is_first():
            result = {"about": about, "said": said, "measured": measured}
            write_whole(self._result, json.dumps(result, indent=2) + "\n")
            save()
            self._say(result)
        data_parallel.leave()
        return 0

    def _say(self, result: dict[str, Any]) -> None:
        from shallowdraft.building import data_parallel

        if not data_parallel.is_first():
            return
        measured = result["measured"]
        if self.json_output:
            print(json.dumps({"out": self.out} | result["about"] | measured))
            return
        values = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items())
        print(f"{self.out}: {result['said']}; held out: {values}")


def count(name: str, total: int) -> "Iterable[int]":
    """Numbers up to a total, with a line of progress on stderr."""
    from shallowdraft.building import data_parallel
    from shallowdraft.commands.progress import shown

    return shown(name, range(total), total) if data_parallel.is_first() else range(total)


def follow(name: str, steps: "Generator[Step, None, None]") -> None:
    """A line of progress on stderr; into a log, a new one now and then.

    Ctrl-C and SIGTERM wait for the end of a step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shallowdraft.building import data_parallel
    from shallowdraft.commands.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    said_s = time.monotonic()
    # Several processes must stop after the same step, and none knows what others were told.
    noting: AbstractContextManager[list[int]] = noted() if data_parallel.processes() == 1 else nullcontext([])
    try:
        with (
            noting as told,
            Progress(*columns, console=console, disable=not data_parallel.is_first()) as progress,
        ):
            task = progress.add_task(name)
            for number, step in enumerate(steps, 1):
                if number == 1 and step.step > 1:
                    say(f"{name}: going on after step {step.step - 1}")
                state = f"{name}: loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s"
                progress.update(task, total=step.steps, completed=step.step, description=state)
                if not console.is_terminal and time.monotonic() - said_s > LOG_EVERY_S:
                    said_s = time.monotonic()
                    say(f"{state}, step {step.step} of {step.steps}")
                if told:
                    steps.close()
                    obey(told[0])
    except (KeyboardInterrupt, SystemExit):
        say("the same command goes on from the last saved state")
        raise


def say_plan(plan: "Plan") -> None:
    duration = f"{plan.seconds / 60:,.0f} min" if plan.seconds >= 60 else f"{plan.seconds:.0f} s"
    sizes = f"{plan.memory_bytes / 2**30:.2f} GiB of memory, {plan.disk_bytes / 2**30:.2f} GiB of disk"
    say(f"about {duration}, {sizes}")


def say(text: str) -> None:
    from shallowdraft.building import data_parallel
    from shallowdraft.commands.console import Console

    if data_parallel.is_first():
        Console(stderr=True, highlight=False).print(text, style="dim", soft_wrap=True)
