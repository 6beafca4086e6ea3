"""Design a draft: the shapes worth building, and a search that builds them."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.api.defaults import ALL_LOOKAHEADS
from shallowdraft.api.inputs import (
    Lookaheads,
    Names,
    as_list,
    executor,
    load_draft_model,
    open_profile,
    open_trace,
    parse_lookaheads,
)
from shallowdraft.api.measuring import predict
from shallowdraft.display.progress import Progress, following
from shallowdraft.errors import OptionError
from shallowdraft.results import DesignResult, DraftPrediction, SearchResult
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.profile import Profile
from shallowdraft.runs.search import read_search
from shallowdraft.runs.trace import Trace

if TYPE_CHECKING:
    from shallowdraft.shapes.shape import ModelShape
    from shallowdraft.studying.search import Rung, ShapeCandidate


def design(
    target: str,
    profile: Profile | str | Path,
    *,
    parent: str | None = None,
    trace: Trace | str | Path | None = None,
    max_parameters: int | None = None,
    lookaheads: Lookaheads = ALL_LOOKAHEADS,
    mean_context: int = 128,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
) -> DesignResult:
    """List the shapes that a parent can be pruned to: how long each drafts here, and the TAR that it needs.

    profile: what `profile` wrote with `shapes="auto"`, on this machine.
    parent: what a draft would be pruned from; by default the target.
    trace: the target's; with it, the TAR that beats the best draft in the profile is shown too.
    max_parameters: leave out larger shapes. mean_context: tokens before a new one, on average, without a trace.
    """
    from shallowdraft.profiling.latency_model import fit, observations
    from shallowdraft.studying.design import design as design_shapes
    from shallowdraft.studying.design import enumerate_shapes

    tried = parse_lookaheads(lookaheads)
    parents, timed = _parents(target, [parent] if parent else [target], profile, device)
    (shape,) = parents.values()
    model = fit(observations(timed, shape))
    best = _best_at_hand(target, trace, timed, dtype, draft_dtype, device) if trace is not None else None
    place = open_trace(trace).mean_context if trace is not None else float(mean_context)
    goal = best.prediction.tokens_per_s if best else None
    return DesignResult(
        tuple(design_shapes(enumerate_shapes(shape, max_parameters), model, timed, place, tried, goal)), model, best
    )


def _parents(
    target: str, names: Sequence[str], profile: Profile | str | Path, device: str | None
) -> "tuple[dict[str, ModelShape], Profile]":
    """Return the shapes of the parents, checked against the target and the profile."""
    from shallowdraft.identity import folder_digest
    from shallowdraft.models.checkpoint import find_folder, read_shape, require_decoder_only
    from shallowdraft.models.model import resolve_device
    from shallowdraft.profiling.measure import require_machine

    timed = open_profile(profile)
    require_machine(timed, resolve_device(device))
    timed.require_target(target, folder_digest(find_folder(target)))
    require_decoder_only(target, *names)
    vocab = read_shape(find_folder(target)).vocab
    parents = {name: read_shape(find_folder(name)) for name in names}
    for shape in parents.values():
        if shape.vocab != vocab:
            raise OptionError(f"a parent has a vocabulary of {shape.vocab:,}, the target of {vocab:,}")
    return parents, timed


def _best_at_hand(
    target: str,
    trace: Trace | str | Path,
    profile: Profile,
    dtype: str | None,
    draft_dtype: str | None,
    device: str | None,
) -> DraftPrediction | None:
    """Return the fastest of the profile's drafts; None if it has none."""
    whole = open_trace(trace)
    whole.require_target(target, profile.about.get("target_digest"))
    if not profile.drafts:
        return None
    return predict(whole, profile, dtype=dtype, draft_dtype=draft_dtype, device=device).drafts[0]


def search(
    target: str,
    profile: str | Path,
    trace: Trace | str | Path,
    out: str | Path,
    *,
    parents: Names = (),
    candidates: int = 6,
    tokens: int = 500_000,
    generated: int = 200_000,
    corpus: str | Path | None = None,
    max_parameters: int | None = None,
    lookaheads: Lookaheads = ALL_LOOKAHEADS,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
    cluster: str | None = None,
    progress: Progress = True,
) -> SearchResult:
    """Build drafts and find the fastest: successive halving over shapes, each distilled on text the target writes.

    profile, trace: files that `profile` (with shapes) and `record` wrote. out: folder; out/draft is the winner.
    parents: what drafts may be pruned from; by default the target.
    candidates: shapes to begin with. tokens: tokens to distil on, over all candidates. generated: tokens that the
    target writes to learn from, after beginnings from the folder `corpus` if there is one.
    """
    from shallowdraft.building.following import following_training, saying_once
    from shallowdraft.models.model import load
    from shallowdraft.profiling.latency_model import fit, observations
    from shallowdraft.studying.search import choose_candidates, new_search, plan_rungs

    tried = parse_lookaheads(lookaheads)
    shapes, timed = _parents(target, as_list(parents) or [target], profile, device)
    model = fit(observations(timed, next(iter(shapes.values()))))
    best, whole = _best_at_hand(target, trace, timed, dtype, draft_dtype, device), open_trace(trace)
    files, say = RunFolder(Path(out)), saying_once(progress)
    _copy_profile(Path(profile), files)
    goal = best.prediction.tokens_per_s if best else None
    chosen = choose_candidates(shapes, model, timed, whole.mean_context, tried, goal, candidates, max_parameters)
    rungs = plan_rungs(len(chosen), tokens)
    say(_described(chosen, rungs))
    winner = new_search(
        target,
        list(shapes),
        files.path,
        whole,
        tried,
        load_target=partial(load, dtype=dtype, device=device),
        load_trainable=partial(load, dtype="float32", device=device, trainable=True),
        load_draft=partial(load_draft_model, dtype=draft_dtype or dtype, device=device),
        generated=generated,
        corpus=Path(corpus) if corpus else None,
        executor=executor(cluster, device),
        follow=following(progress),
        follow_training=following_training(progress),
        say=say,
    ).run(chosen, rungs)
    draft = _copy_once(winner.folder, files.path / "draft")
    return SearchResult(winner.candidate.name, draft, tuple(read_search(files.search)), winner.record, best)


def _described(candidates: "Sequence[ShapeCandidate]", rungs: "Sequence[Rung]") -> str:
    """Return what a search is going to build, in words."""
    plan = ", then ".join(f"{rung.candidates} on {rung.tokens:,} tokens each" for rung in rungs)
    return f"{plan}; candidates: {', '.join(candidate.name for candidate in candidates)}"


def _copy_profile(profile: Path, files: RunFolder) -> None:
    """Copy the profile into the search's folder, where the times of what it builds are added, unless it is there."""
    files.path.mkdir(parents=True, exist_ok=True)
    if not files.profile.exists():
        shutil.copy(profile, files.profile)


def _copy_once(folder: Path, copy: Path) -> Path:
    """Copy a folder whole, unless it was copied before."""
    if not copy.exists():
        unfinished = copy.with_name(copy.name + ".partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder, unfinished).rename(copy)
    return copy
