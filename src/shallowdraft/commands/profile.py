"""shallowdraft profile: how long an iteration takes on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.options import DraftCommand, Name, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from shallowdraft.models.model import Model
    from shallowdraft.profiling.latency import Profile as Measured
    from shallowdraft.shapes import ModelShape

FEW = (2, 8)  # lookaheads at which shapes are timed
SHOWN = (1, 2, 3, 4, 6, 8, 16)  # in the table


@dataclass(frozen=True, kw_only=True)
class Profile(DraftCommand):
    """Time a target and drafts on this machine: iterations by draft, lookahead, context and batch size.

    Each sample stands between two of plain decoding, so that a machine that others use too does not blur the ratio.
    With --shapes also drafts that do not exist yet, with random weights, and a law of what drafting costs.
    Stopped half-way, the same command goes on; with another --draft it adds to the file.
    Example: shallowdraft profile --target DIR --draft DIR1 DIR2 --shapes auto --out profile.jsonl
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    draft: tuple[str, ...] = ()
    """Drafts, named likewise."""
    shapes: tuple[str, ...] = ()
    """Shapes to time with random weights, like 2x256/4h/688; auto: the three families of the paper's Figure 4."""
    parent: Name = None
    """Whose family and sizes --shapes take. Default: the target's."""
    out: str
    """The profile: a file of JSON lines with every sample."""
    lookaheads: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    """Draft tokens an iteration; others lie between on a straight line."""
    contexts: tuple[int, ...] = (64, 256)
    """Tokens before the first new one."""
    batches: tuple[int, ...] = (1,)
    """Prompts at a time."""
    rounds: int = 3
    """Samples of each, in rounds over all of them."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.commands.progress import follow
        from shallowdraft.decoding.ways import Way, drafting
        from shallowdraft.profiling.latency import measure, points, read_profile

        if not (self.draft or self.shapes):
            raise OptionError("there is nothing to time; name a --draft, or --shapes auto")
        if min((*self.lookaheads, *self.contexts, *self.batches, self.rounds), default=0) < 1:
            raise OptionError("--lookaheads, --contexts, --batches and --rounds: at least one each, from 1 up")
        self.set_threads()
        require_decoder_only(self.target, *self.draft, *([self.parent] if self.parent else []))
        parent = self._parent_shape()
        trials = self._trials(parent)
        target = sd.load(self.target, self.dtype, self.device)
        if self.draft:
            drafts = {name: self.load_draft(name) for name in self.draft}
            ways = [Way.with_draft(draft, lookahead) for draft in drafts.values() for lookahead in self.lookaheads]
            wanted = points(ways, self.contexts, self.batches)
            steps = measure(target, drafting(drafts), wanted, Path(self.out), self.rounds)
            follow("profiling", steps, self.rounds * len(wanted))
        if trials:
            self._time_shapes(target, trials)
        show(read_profile(Path(self.out)), parent)
        return 0

    def _parent_shape(self) -> "ModelShape":
        from shallowdraft.models.checkpoint import find_folder, read_shape

        return read_shape(find_folder(self.parent or self.target))

    def _trials(self, parent: "ModelShape") -> "dict[str, ModelShape]":
        """The shapes to time, by the names of drafts with random weights; refused before anything is loaded."""
        from shallowdraft.portable import require_portable
        from shallowdraft.profiling.law import RANDOM, shape_of, trial_shapes

        given = (str(shape) for shape in trial_shapes(parent)) if self.shapes == ("auto",) else self.shapes
        trials = {f"{RANDOM}{notation}": shape_of(notation, parent) for notation in given}
        for shape in trials.values():
            require_portable(shape)
        return trials

    def _time_shapes(self, target: "Model", trials: "dict[str, ModelShape]") -> None:
        """One after the other, so that one is in memory at a time."""
        from shallowdraft.commands.progress import follow
        from shallowdraft.decoding.ways import Way, drafting
        from shallowdraft.models.synthetic import random_draft
        from shallowdraft.profiling.latency import measure, points

        samples = self.rounds * len(FEW) * len(self.contexts)

        def steps() -> Iterator[int]:
            for number, (name, shape) in enumerate(trials.items()):
                draft = random_draft(name, shape, target, self.draft_dtype)
                wanted = points([Way.with_draft(draft, d) for d in FEW], self.contexts, [1])
                for count in measure(target, drafting({name: draft}), wanted, Path(self.out), self.rounds):
                    yield number * samples + count

        follow("timing shapes", steps(), len(trials) * samples)


def show(profile: "Measured", parent: "ModelShape") -> None:
    """Iterations of every draft, passes of the target; of shapes Figure 4 and the law."""
    from shallowdraft.commands.tables import table_console
    from shallowdraft.profiling.latency import ANY
    from shallowdraft.profiling.law import RANDOM

    console = table_console()
    drafts = [name for name in profile.drafts if not name.startswith(RANDOM)]
    for batch, context in sorted({(point.batch, point.context) for point in profile.samples}):
        here = {draft: found for draft in drafts if (found := profile.lookaheads_in(draft, context, batch))}
        if here:
            console.print(_iterations(profile, here, context, batch))
        passes = [(1, profile.pass_s(context, batch))]
        passes += [(d + 1, profile.target_s(d, context, batch)) for d in profile.lookaheads_in(ANY, context, batch)]
        console.print(
            f"context {context}, batch {batch}: ms of the target's pass by tokens: "
            + ", ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in passes),
            soft_wrap=True,
        )
    if len(drafts) < len(profile.drafts):
        console.print(*_shapes(profile, parent), sep="\n", soft_wrap=True)


def _iterations(profile: "Measured", timed: dict[str, list[int]], context: int, batch: int) -> "Table":
    """Of drafts with the lookaheads at which they were timed; beyond these a cell is blank."""
    from shallowdraft.commands.tables import new_table

    known = sorted({d for found in timed.values() for d in found})
    lookaheads = [d for d in known if d in SHOWN] or known
    plain_ms = 1e3 * profile.plain_s(context, batch)
    title = f"ms an iteration (of them drafting); context {context}, batch {batch}; plain decoding {plain_ms:.2f}"
    table = new_table("draft", *(f"d={lookahead}" for lookahead in lookaheads), "half within ±", title=title)
    for draft, found in timed.items():
        cells = (_cell(profile, draft, d, context, batch) if min(found) <= d <= max(found) else "" for d in lookaheads)
        table.add_row(draft, *cells, f"{profile.spread(draft):.1%}")
    return table


def _cell(profile: "Measured", draft: str, lookahead: int, context: int, batch: int) -> str:
    found = profile.iteration(draft, lookahead, context, batch)
    return f"{1e3 * found.total_s:.2f} ({1e3 * found.draft_s:.2f})"


def _shapes(profile: "Measured", parent: "ModelShape") -> "Iterator[str]":
    """Figure 4, and the law with its residuals."""
    from shallowdraft.profiling.law import FEWEST, RANDOM, figure_4, fit, observations

    context = min(point.context for point in profile.samples)
    d = max(FEW)
    for title, family in figure_4(parent).items():
        timed = [shape for shape in family if f"{RANDOM}{shape}" in profile.drafts]
        if timed:
            steps = (1e3 * profile.iteration(f"{RANDOM}{shape}", d, context).draft_s / d for shape in timed)
            yield f"ms a draft step, {title}: " + ", ".join(
                f"{shape} {ms:.3f}" for shape, ms in zip(timed, steps, strict=True)
            )
    seen = observations(profile, parent)
    if len({one.shape for one in seen}) >= FEWEST:
        law = fit(seen)
        yield (
            f"law: {1e6 * law.start_s:.0f} us to start drafting; a step {1e6 * law.step_s:.1f} us, "
            f"{1e6 * law.layer_s:.1f} a layer, {1e12 * law.weight_s:.1f} a million weights, "
            f"{1e12 * law.attended_s:.1f} a million cached numbers; "
            f"typically {law.typical_error:.1%} off, {law.worst_error:.1%} at worst"
        )
