"""The folder that a build writes to, from the options of the run to its result."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.distributed import is_first
from shallowdraft.errors import OptionError, TrainingError, printable
from shallowdraft.files import read_json
from shallowdraft.records import write_whole


@dataclass(frozen=True, repr=False)
class BuildResult(Tabular):
    """Result of a build: where the model is, and how good it is."""

    out: Path
    """Folder of the model, or of the heads."""
    description: str
    about: Mapping[str, Any]
    """Fields of the result: `shape` and `parameters` of a model, `heads` where heads were trained."""
    parameters: int
    """Parameters of the model, or of the heads."""
    held_out: Mapping[str, float]
    """Figures on held-out text: loss in nats per token, acceptance rate, greedy match, greedy TAR …"""
    seconds: float
    """Seconds from the last start to the end."""
    finished_before: bool = False
    """Whether nothing was done because this run had been finished by an earlier call."""

    @property
    def caption(self) -> str:
        return f"{self.out}: {self.description}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("held out", "value")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        return [(name.replace("_", " "), value) for name, value in self.held_out.items()]

    def to_json(self) -> dict[str, Any]:
        """Return {"out", "shape" and "parameters" or "heads", and the figures on held-out text}."""
        return {"out": str(self.out), **self.about, **self.held_out}


@dataclass(frozen=True)
class OutputFolder:
    """The folder of a build: the model, and under `training` everything that a continued run needs.

    `training/run.json` has the options that the run was started with, `training/result.json` its result.
    """

    path: Path
    options: Mapping[str, Any]
    """Options that change the result, as JSON has them."""

    @property
    def work(self) -> Path:
        """Folder of tokens, states and metrics."""
        return self.path / "training"

    @property
    def started(self) -> bool:
        """Whether training was started here."""
        return self._run_file.exists()

    @property
    def _run_file(self) -> Path:
        return self.work / "run.json"

    @property
    def _result_file(self) -> Path:
        return self.work / "result.json"

    def require_same_options(self) -> None:
        """Raise if the folder holds an unfinished run that was started with other options."""
        if changed := self._changed_options():
            raise OptionError(
                f"{self.path} holds an unfinished run that was started with {changed}; use the same options to go on, "
                "or name another folder"
            )

    def start(self) -> None:
        """Write down the options, from where on the work folder belongs to this run."""
        if is_first():
            write_whole(self._run_file, json.dumps(self.options, indent=2) + "\n")

    def earlier_result(self) -> BuildResult | None:
        """Return the result if this run was finished before; raise if the folder holds another model."""
        if not (self.path / "config.json").exists():
            return None
        changed = self._changed_options()
        if changed or not self._result_file.exists():
            cause = f", made with {changed}" if changed else ""
            raise OptionError(f"{self.path} already holds a model{cause}; name another folder")
        result = read_json(self._result_file, TrainingError)
        about, held_out = result["about"], result["measured"]
        parameters, seconds = result.get("parameters", about.get("parameters", 0)), result.get("seconds", 0.0)
        return BuildResult(self.path, result["said"], about, parameters, held_out, seconds, finished_before=True)

    def finish(self, result: BuildResult, save: Callable[[], None]) -> BuildResult:
        """Write the result, then save the model; once config.json is there, the run counts as finished."""
        if wrong := [name for name, value in result.held_out.items() if not isfinite(value)]:
            raise TrainingError(
                f"{self.path}: {wrong[0].replace('_', ' ')} of the trained model is {result.held_out[wrong[0]]}; "
                f"if training did not diverge, its saved state is damaged: remove {self.work} and train again"
            )
        if is_first():
            content = {
                "about": result.about,
                "said": result.description,
                "measured": result.held_out,
                "parameters": result.parameters,
                "seconds": result.seconds,
            }
            write_whole(self._result_file, json.dumps(content, indent=2) + "\n")
            save()
        return result

    def _changed_options(self) -> str:
        """Name the options that differ from those of the run in this folder, with the values it was started with."""
        if not self.started:
            return ""
        before = read_json(self._run_file, TrainingError)
        if set(before) != set(self.options):
            return "another command"
        changed = [name for name, value in self.options.items() if value != before[name]]
        return ", ".join(f"--{name.replace('_', '-')} {printable(str(before[name]))[:200]}" for name in changed)
