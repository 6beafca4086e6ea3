"""Engines that are kept for the next prompts of the same kind: on a GPU each holds captured CUDA graphs."""

from dataclasses import replace

from shallowdraft.decoding.drafters.create import new_drafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.lookahead_policy import LookaheadPolicy
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.state import slots_for, source_slots_for
from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model

KEPT = 4  # engines of a target, each with its caches and captured iterations


def take_engine(
    target: Model,
    settings: Settings,
    prompts: list[list[int]],
    limits: list[int],
    sources: list[list[int]] | None,
) -> Engine:
    """A new engine, or on a GPU one that has captured such iterations before."""
    draft = settings.draft
    if settings.min_confidence is not None and target.device.type == "cuda":
        raise OptionError("min_confidence is not there on a GPU, where an iteration never waits; use lookahead auto")
    lookahead_policy = LookaheadPolicy() if settings.speculative and settings.lookahead == "auto" else None
    drafter = new_drafter(target, settings)
    slots = slots_for(limits, drafter.nodes, target.device)
    kind = _kind(settings, len(prompts), slots, source_slots_for(sources, target.device))
    kept: Engine | None = target.decoder.kept.pop(kind, None)
    if kept is not None:
        kept.restart(prompts, limits, settings.seed, lookahead_policy, sources, settings.streams)
        return kept
    context = draft.shape.context if draft else None
    given = (
        target.decoder,
        drafter,
        settings.sampling,
        prompts,
        limits,
        context,
        lookahead_policy,
        settings.rule,
        sources,
    )
    return Engine(*given, streams=settings.streams)


def keep_engine(target: Model, settings: Settings, engine: Engine) -> None:
    """For the next prompts of this kind."""
    if target.device.type == "cuda":
        kept, (rows, slots) = target.decoder.kept, engine.state.tokens.shape
        kept[_kind(settings, rows, slots, engine.state.source_slots)] = engine
        if len(kept) > KEPT:
            del kept[next(iter(kept))]


def _kind(settings: Settings, rows: int, slots: int, source_slots: int) -> tuple[object, ...]:
    """What an engine is made for; it holds on to what proposes, so that nothing else can have its id."""
    proposer = id(settings.heads or (settings.draft and settings.draft.decoder))
    fixed = settings.longest_lookahead, settings.lookahead == "auto", settings.rule, replace(settings.sampling, seed=0)
    skips = None if settings.skips is None else tuple(settings.skips)
    return proposer, settings.drafter, settings.nodes, settings.tree, skips, *fixed, rows, slots, source_slots
