"""shallowdraft profile: how long an iteration takes on this machine."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shallowdraft.api.defaults import PROFILED_LOOKAHEADS
from shallowdraft.commands.options import DraftCommand, Drafts, Json, Lookaheads, Name, Rounds, Target

if TYPE_CHECKING:
    from rich.table import Table

    from shallowdraft.runs.profile import Profile
    from shallowdraft.shapes.shape import ModelShape

SHOWN = (1, 2, 3, 4, 6, 8, 16)  # lookaheads in the table


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(DraftCommand):
    """Time a target and drafts on this machine: iterations by draft, lookahead, context and batch size.

    Each sample stands between two of plain decoding, so that a machine that others use too does not blur the ratio.
    With --shapes also drafts that do not exist yet, with random weights, and a model of what drafting costs.
    Interrupted, the same command goes on; with another draft it adds to the file.
    Example: shallowdraft profile --target DIR --drafts DIR1 DIR2 --shapes auto --out profile.jsonl
    """

    target: Target
    drafts: Drafts = ()
    shapes: tuple[str, ...] = ()
    """Shapes to time with random weights, like 2x256/4h/688; auto: the three families of the paper's Figure 4."""
    parent: Name = None
    """Model that shapes are pruned from: its family and sizes count. Default: the target."""
    out: str
    """File of the profile, in JSON lines with every sample."""
    lookaheads: Lookaheads = PROFILED_LOOKAHEADS
    contexts: tuple[int, ...] = ()
    """Tokens before the first new one. Default: 64 256, or what target and draft have room for."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: prompts at a time."""
    rounds: Rounds = 3
    json_output: Json = False
    """Print {"about", "samples": […]} and nothing else on stdout."""

    def run(self) -> int:
        from shallowdraft.api.inputs import shape_of
        from shallowdraft.api.measuring import profile

        self.set_threads()
        result = profile(**self.arguments(profile))
        if self.json_output:
            print(json.dumps(result.to_json()))
        else:
            show(result, shape_of(self.parent or self.target))
        return 0


def show(profile: "Profile", parent: "ModelShape") -> None:
    """Print iterations of every draft, passes of the target, and of shapes Figure 4 and the latency model."""
    from shallowdraft.display.tables import table_console

    console = table_console()
    for batch, context in sorted({(point.batch, point.context) for point in profile.samples}):
        timed = {draft: profile.lookaheads_at(draft, context, batch) for draft in profile.drafts}
        timed = {draft: lookaheads for draft, lookaheads in timed.items() if lookaheads}
        if timed:
            console.print(_iterations(profile, timed, context, batch))
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


def _iterations(profile: "Profile", timed: dict[str, list[int]], context: int, batch: int) -> "Table":
    """Return a table of drafts by lookahead; a cell is blank where the draft was not timed."""
    from shallowdraft.display.tables import new_table

    every = sorted({lookahead for lookaheads in timed.values() for lookahead in lookaheads})
    lookaheads = [lookahead for lookahead in every if lookahead in SHOWN] or every
    plain_ms = 1e3 * profile.plain_s(context, batch)
    title = f"ms an iteration (of them drafting); context {context}, batch {batch}; plain decoding {plain_ms:.2f}"
    table = new_table("draft", *(f"d={lookahead}" for lookahead in lookaheads), "half within ±", title=title)
    for draft, own in timed.items():
        cells = (_cell(profile, draft, d, context, batch) if min(own) <= d <= max(own) else "" for d in lookaheads)
        table.add_row(draft, *cells, f"{profile.spread(draft):.1%}")
    return table


def _cell(profile: "Profile", draft: str, lookahead: int, context: int, batch: int) -> str:
    iteration = profile.iteration(draft, lookahead, context, batch)
    return f"{1e3 * iteration.total_s:.2f} ({1e3 * iteration.draft_s:.2f})"


def _shapes(profile: "Profile", parent: "ModelShape") -> "Iterator[str]":
    """Yield lines on Figure 4, and on the latency model with its errors."""
    from shallowdraft.profiling.latency_model import FEWEST, figure_4, fit, observations
    from shallowdraft.profiling.models import SHAPE_LOOKAHEADS
    from shallowdraft.records import RANDOM

    context = min(point.context for point in profile.samples)
    d = max(SHAPE_LOOKAHEADS)
    for title, family in figure_4(parent).items():
        timed = [shape for shape in family if str(shape) in profile.shapes]
        if timed:
            steps = (1e3 * profile.iteration(f"{RANDOM}{shape}", d, context).draft_s / d for shape in timed)
            yield f"ms a draft step, {title}: " + ", ".join(
                f"{shape} {ms:.3f}" for shape, ms in zip(timed, steps, strict=True)
            )
    seen = observations(profile, parent)
    if len({observation.shape for observation in seen}) >= FEWEST:
        model = fit(seen)
        yield (
            f"latency model: {1e6 * model.start_s:.0f} us to start drafting; a step {1e6 * model.step_s:.1f} us, "
            f"{1e6 * model.layer_s:.1f} a layer, {1e12 * model.weight_s:.1f} a million weights, "
            f"{1e12 * model.attended_s:.1f} a million cached numbers; "
            f"typically {model.typical_error:.1%} off, {model.worst_error:.1%} at worst"
        )
