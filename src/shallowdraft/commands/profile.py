"""shallowdraft profile: how long an iteration takes on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.options import DraftCommand, Name, require_decoder_only
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from shallowdraft.models.model import Model
    from shallowdraft.runs.profile import Point
    from shallowdraft.runs.profile import Profile as Measured
    from shallowdraft.shapes.shape import ModelShape

FEW = (2, 8)  # lookaheads at which shapes are timed
SHOWN = (1, 2, 3, 4, 6, 8, 16)  # in the table


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(DraftCommand):
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
    contexts: tuple[int, ...] = ()
    """Tokens before the first new one. Default: 64 256, or what target and draft have room for."""
    batches: tuple[int, ...] = (1,)
    """Prompts at a time."""
    rounds: int = 3
    """Samples of each, in rounds over all of them."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.decoding.candidate import draft_options
        from shallowdraft.display.progress import follow, notes
        from shallowdraft.profiling.measure import begin, measure
        from shallowdraft.runs.profile import read_profile

        if not (self.draft or self.shapes):
            raise OptionError("there is nothing to time; name a --draft, or --shapes auto")
        given = (*self.lookaheads, *self.contexts, *self.batches, self.rounds)
        if not (self.lookaheads and self.batches) or min(given) < 1:
            raise OptionError("--lookaheads, --contexts, --batches and --rounds: at least one each, from 1 up")
        self.set_threads()
        require_decoder_only(self.target, *self.draft, *([self.parent] if self.parent else []))
        parent = self._parent_shape()
        trials = self._trials(parent)
        target = sd.load(self.target, self.dtype, self.device)
        drafts = {name: self.load_draft(name) for name in self.draft}
        wanted = self._wanted(target, drafts, trials)
        held = {name: draft.shape.context for name, draft in drafts.items()}
        held |= {name: shape.context for name, shape in trials.items()}
        plan = [point for of_draft in wanted.values() for point in of_draft]
        begin(target, {("model", name): context for name, context in held.items()}, plan, Path(self.out), self.rounds)
        if drafts:
            timed = [point for name in drafts for point in wanted[name]]
            steps = measure(target, draft_options(drafts), timed, Path(self.out), self.rounds)
            follow("profiling", steps, self.rounds * len(timed))
        if trials:
            self._time_shapes(target, trials, wanted)
        profile = read_profile(Path(self.out))
        notes(profile.notes)
        show(profile, parent)
        return 0

    def _wanted(
        self, target: "Model", drafts: "dict[str, Model]", trials: "dict[str, ModelShape]"
    ) -> "dict[str, list[Point]]":
        """Where to time each draft; says where the longest texts that it and the target read decide."""
        from shallowdraft.display.progress import notes
        from shallowdraft.models.synthetic import random_precision
        from shallowdraft.profiling.measure import CONTEXTS, all_points, fitting, longest_context
        from shallowdraft.runs.candidate import Candidate

        wanted, cut, reads = {}, {}, target.shape.context
        candidates = {name: Candidate.with_draft(draft, 1) for name, draft in drafts.items()}
        for name, shape in trials.items():
            candidates[name] = Candidate(name, 1, dtype=random_precision(shape, target, self.draft_dtype))
        for name, candidate in candidates.items():
            random = name in trials
            held = (trials[name] if random else drafts[name].shape).context
            lookaheads, batches = (FEW, (1,)) if random else (self.lookaheads, self.batches)
            fit = fitting(CONTEXTS, longest_context(reads, held, max(lookaheads)))
            if not self.contexts and fit != list(CONTEXTS):
                whose = "the target" if reads <= held else "the parent" if random else "it"
                where = f"at contexts {' '.join(map(str, fit))}: {whose} has one of {min(reads, held):,} tokens"
                cut["shapes are" if random else f"{name} is"] = where
            wanted[name] = all_points(
                [replace(candidate, lookahead=d) for d in lookaheads], self.contexts or fit, batches
            )
        notes(f"{who} timed {where}" for who, where in cut.items())
        return wanted

    def _parent_shape(self) -> "ModelShape":
        from shallowdraft.models.checkpoint import find_folder, read_shape

        return read_shape(find_folder(self.parent or self.target))

    def _trials(self, parent: "ModelShape") -> "dict[str, ModelShape]":
        """The shapes to time, by the names of drafts with random weights; refused before anything is loaded."""
        from shallowdraft.portable import require_portable
        from shallowdraft.profiling.latency_model import shape_of, trial_shapes
        from shallowdraft.records import RANDOM

        given = (str(shape) for shape in trial_shapes(parent)) if self.shapes == ("auto",) else self.shapes
        trials = {f"{RANDOM}{notation}": shape_of(notation, parent) for notation in given}
        for shape in trials.values():
            require_portable(shape)
        return trials

    def _time_shapes(self, target: "Model", trials: "dict[str, ModelShape]", wanted: "dict[str, list[Point]]") -> None:
        """One after the other, so that one is in memory at a time."""
        from shallowdraft.decoding.candidate import draft_options
        from shallowdraft.display.progress import follow
        from shallowdraft.models.synthetic import random_draft
        from shallowdraft.profiling.measure import measure

        size = self.rounds * sum(len(wanted[name]) for name in trials)

        def steps() -> Iterator[int]:
            done = 0
            for name, shape in trials.items():
                draft, of_shape = random_draft(name, shape, target, self.draft_dtype), wanted[name]
                for count in measure(target, draft_options({name: draft}), of_shape, Path(self.out), self.rounds):
                    yield done + count
                done += self.rounds * len(of_shape)

        follow("timing shapes", steps(), size)


def show(profile: "Measured", parent: "ModelShape") -> None:
    """Iterations of every draft, passes of the target; of shapes Figure 4 and the law."""
    from shallowdraft.display.tables import table_console

    console = table_console()
    for batch, context in sorted({(point.batch, point.context) for point in profile.samples}):
        here = {draft: found for draft in profile.drafts if (found := profile.lookaheads_at(draft, context, batch))}
        if here:
            console.print(_iterations(profile, here, context, batch))
        passes = [(1, profile.pass_s(context, batch))]
        passes += [
            (d + 1, profile.verification_s(d, context, batch)) for d in profile.lookaheads_at(None, context, batch)
        ]
        console.print(
            f"context {context}, batch {batch}: ms of the target's pass by tokens: "
            + ", ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in passes),
            soft_wrap=True,
        )
    if profile.shapes:
        console.print(*_shapes(profile, parent), sep="\n", soft_wrap=True)


def _iterations(profile: "Measured", timed: dict[str, list[int]], context: int, batch: int) -> "Table":
    """Of drafts with the lookaheads at which they were timed; beyond these a cell is blank."""
    from shallowdraft.display.tables import new_table

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
    from shallowdraft.profiling.latency_model import FEWEST, figure_4, fit, observations
    from shallowdraft.records import RANDOM

    context = min(point.context for point in profile.samples)
    d = max(FEW)
    for title, family in figure_4(parent).items():
        timed = [shape for shape in family if str(shape) in profile.shapes]
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
