"""Profile a target with draft models, and with shapes that have random weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shallowdraft.decoding.candidate import draft_options
from shallowdraft.models.model import Model
from shallowdraft.models.synthetic import random_draft, random_precision
from shallowdraft.portable import require_portable
from shallowdraft.profiling.latency_model import shape_of, trial_shapes
from shallowdraft.profiling.measure import CONTEXTS, all_points, begin, fitting, longest_context, measure
from shallowdraft.progress import Follow, Say
from shallowdraft.records import RANDOM
from shallowdraft.runs.candidate import Candidate, ProposerKey
from shallowdraft.runs.part_times import Point
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.shapes.shape import ModelShape

AUTO = ("auto",)  # the three families of the paper's Figure 4
SHAPE_LOOKAHEADS = (2, 8)  # at which shapes are timed


def random_shapes(shapes: Sequence[str], parent: ModelShape) -> dict[str, ModelShape]:
    """Return the shapes to time by the names of drafts with random weights; shapes that nobody loads are refused."""
    notations = [str(shape) for shape in trial_shapes(parent)] if tuple(shapes) == AUTO else shapes
    by_name = {f"{RANDOM}{notation}": shape_of(notation, parent) for notation in notations}
    for shape in by_name.values():
        require_portable(shape)
    return by_name


def profile_models(
    target: Model,
    drafts: Mapping[str, Model],
    shapes: Mapping[str, ModelShape],
    path: Path,
    *,
    lookaheads: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    draft_dtype: str | None,
    follow: Follow,
    say: Say,
) -> Profile:
    """Time drafts and shapes, or what is left of them; without `contexts` at those for which the models have room."""
    points = _points(target, drafts, shapes, lookaheads, contexts, batches, draft_dtype, say)
    draft_contexts: dict[ProposerKey, int] = {("model", name): draft.shape.context for name, draft in drafts.items()}
    draft_contexts |= {("model", name): shape.context for name, shape in shapes.items()}
    begin(target, draft_contexts, [point for of_draft in points.values() for point in of_draft], path, rounds)
    if drafts:
        of_drafts = [point for name in drafts for point in points[name]]
        follow("profiling", measure(target, draft_options(drafts), of_drafts, path, rounds), rounds * len(of_drafts))
    if shapes:
        total = rounds * sum(len(points[name]) for name in shapes)
        follow("timing shapes", _measure_shapes(target, shapes, points, path, rounds, draft_dtype), total)
    profile = read_profile(path)
    for note in profile.notes:
        say(note)
    return profile


def _points(
    target: Model,
    drafts: Mapping[str, Model],
    shapes: Mapping[str, ModelShape],
    lookaheads: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    draft_dtype: str | None,
    say: Say,
) -> dict[str, list[Point]]:
    """Return where to time each draft, and say where a context was cut to what the models read."""
    points: dict[str, list[Point]] = {}
    cut: dict[str, str] = {}
    candidates = {name: Candidate.with_draft(draft, 1) for name, draft in drafts.items()}
    for name, shape in shapes.items():
        candidates[name] = Candidate(name, 1, dtype=random_precision(shape, target, draft_dtype))
    for name, candidate in candidates.items():
        is_random = name in shapes
        draft_context = (shapes[name] if is_random else drafts[name].shape).context
        own_lookaheads, own_batches = (SHAPE_LOOKAHEADS, (1,)) if is_random else (lookaheads, batches)
        longest = longest_context(target.shape.context, draft_context, max(own_lookaheads))
        fit = fitting(CONTEXTS, longest)
        if not contexts and fit != list(CONTEXTS):
            whose = "the target" if target.shape.context <= draft_context else "the parent" if is_random else "it"
            room = min(target.shape.context, draft_context)
            who = "shapes are" if is_random else f"{name} is"
            cut[who] = f"timed at contexts {' '.join(map(str, fit))}: {whose} has one of {room:,} tokens"
        at_lookaheads = [replace(candidate, lookahead=lookahead) for lookahead in own_lookaheads]
        points[name] = all_points(at_lookaheads, contexts or fit, own_batches)
    for who, how in cut.items():
        say(f"{who} {how}")
    return points


def _measure_shapes(
    target: Model,
    shapes: Mapping[str, ModelShape],
    points: Mapping[str, list[Point]],
    path: Path,
    rounds: int,
    draft_dtype: str | None,
) -> Iterator[int]:
    """Time shapes one after the other, so that only one is in memory, and yield how many points are done."""
    points_done = 0
    for name, shape in shapes.items():
        draft = random_draft(name, shape, target, draft_dtype)
        for count in measure(target, draft_options({name: draft}), points[name], path, rounds):
            yield points_done + count
        points_done += rounds * len(points[name])
