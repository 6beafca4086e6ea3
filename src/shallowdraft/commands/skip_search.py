"""shallowdraft skip-search: which parts of a target it should leave out when it drafts for itself."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.options import Json, ModelCommand, Target, Trace
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.studying.skip_search import Trial


@dataclass(frozen=True, kw_only=True)
class SkipSearchCommand(ModelCommand):
    """Find which attention and FFN parts a target should skip when it drafts for itself (generate --drafter skip).

    Bayesian optimisation of the predicted speed over a greedy trace, beginning with regular patterns. Stopped half-way,
    the same command goes on; with more --trials it goes further.
    Example: shallowdraft skip-search --target DIR --trace trace.jsonl --out skips.jsonl
    """

    target: Target
    trace: Trace
    out: str
    """File of the trials, in JSON lines, which generate --skips reads."""
    trials: int = 80
    """Sets of parts to try."""
    json_output: Json = False
    """Print {"best": {"skips", "lookahead", "tar", "speed_up"}, "best_uniform": {…}, "trials": N}."""

    def run(self) -> int:
        from shallowdraft.api.inputs import load_target
        from shallowdraft.display.progress import follow
        from shallowdraft.replaying.vocabulary import require_vocabulary
        from shallowdraft.runs.trace import read_trace
        from shallowdraft.studying.skip_search import read_trials, search

        if self.trials < 1:
            raise OptionError(f"--trials is {self.trials}; it must be at least 1")
        self.set_threads()
        trace = read_trace(Path(self.trace))
        target = load_target(self.target, self.dtype, self.device)
        require_vocabulary(trace, target)
        follow("trying what to skip", search(target, trace, Path(self.out), self.trials), self.trials)
        trials = read_trials(Path(self.out))
        best, regular = trials[0], next((trial for trial in trials if trial.uniform), None)
        if self.json_output:
            result = {"best": asdict(best), "best_uniform": regular and asdict(regular), "trials": len(trials)}
            print(json.dumps(result))
        else:
            _show(best, regular, target.shape.layers)
            print(
                f"shallowdraft generate --target {self.target} --drafter skip --skips {self.out} "
                f"--lookahead {best.lookahead} …"
            )
        return 0


def _show(best: "Trial", regular: "Trial | None", layers: int) -> None:
    from shallowdraft.display.tables import new_table, table_console

    table = new_table("skipped", "attention", "FFN", "d", "TAR", "predicted")
    for name, trial in (("best found", best), ("best regular", regular)):
        if trial is not None:
            attention = sum(part % 2 == 0 for part in trial.skips)
            table.add_row(
                name,
                f"{attention} of {layers}",
                f"{len(trial.skips) - attention} of {layers}",
                str(trial.lookahead),
                f"{trial.tar:.2f}",
                f"{trial.speed_up:.2f}x",
            )
    table_console().print(table)
    kinds = {0: "attention of layers", 1: "FFN of layers"}
    for kind, name in kinds.items():
        layers_of = [str(part // 2) for part in best.skips if part % 2 == kind]
        print(f"{name} {', '.join(layers_of) or 'none'}")
