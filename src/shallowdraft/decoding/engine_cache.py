"""Engines kept for the next prompts of the same kind: on a GPU each holds captured CUDA graphs."""

import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakKeyDictionary

from shallowdraft.decoding.drafters.create import new_drafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.lookahead_policy import LookaheadPolicy
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.state import slots_for, source_slots_for
from shallowdraft.errors import OptionError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model

MAX_KEPT = 4  # engines of a target, each with its caches and captured iterations
KEPT_ON = ("cuda",)  # on a CPU nothing is captured, and a new engine costs no time

EngineKey = tuple[object, ...]
"""Everything that an engine is made for."""


@dataclass
class _Shelf:
    """The engines of one decoder."""

    addresses: tuple[int, ...]
    """Addresses of the weights: captured iterations are worthless once those were moved."""
    engines: dict[EngineKey, Engine] = field(default_factory=dict)


class EngineCache:
    """Engines kept by the decoder of their target, and freed with it."""

    def __init__(self) -> None:
        self._shelves: WeakKeyDictionary[Decoder, _Shelf] = WeakKeyDictionary()

    def take(self, decoder: Decoder, key: EngineKey) -> Engine | None:
        """Remove and return an engine, if there is one whose captured iterations are still valid."""
        shelf = self._shelves.get(decoder)
        if shelf is None:
            return None
        if shelf.addresses != _addresses(decoder):
            self.drop(decoder)
            return None
        return shelf.engines.pop(key, None)

    def keep(self, decoder: Decoder, key: EngineKey, engine: Engine) -> None:
        """Add an engine that is no longer in use; drop the oldest one if the decoder has more than MAX_KEPT."""
        _release(decoder, engine)
        engines = self._shelves.setdefault(decoder, _Shelf(_addresses(decoder))).engines
        engines[key] = engine
        if len(engines) > MAX_KEPT:
            del engines[next(iter(engines))]

    def drop(self, decoder: Decoder) -> None:
        """Free the memory of a decoder's engines."""
        self._shelves.pop(decoder, None)

    def __len__(self) -> int:
        return sum(len(shelf.engines) for shelf in self._shelves.values())


ENGINES = EngineCache()


def take_engine(
    target: Model,
    settings: Settings,
    prompts: list[list[int]],
    limits: list[int],
    sources: list[list[int]] | None,
) -> Engine:
    """Return an engine for prompts: a kept one that has captured iterations of this kind, or a new one."""
    draft = settings.draft
    if settings.min_confidence is not None and target.device.type == "cuda":
        raise OptionError("min_confidence does not work on a GPU, where an iteration never waits; use lookahead auto")
    lookahead_policy = LookaheadPolicy() if settings.speculative and settings.lookahead == "auto" else None
    drafter = new_drafter(target, settings)
    slots = slots_for(limits, drafter.nodes, target.device)
    key = _key(settings, len(prompts), slots, source_slots_for(sources, target.device))
    engine = ENGINES.take(target.decoder, key)
    if engine is not None:
        engine.restart(prompts, limits, settings.sampling, lookahead_policy, sources, settings.streams)
        return engine
    return Engine.for_prompts(
        target.decoder,
        drafter,
        settings.sampling,
        prompts,
        limits,
        draft_context=draft.shape.context if draft else None,
        lookahead_policy=lookahead_policy,
        rule=settings.rule,
        sources=sources,
        streams=settings.streams,
    )


def keep_engine(target: Model, settings: Settings, engine: Engine) -> None:
    """Keep an engine for later prompts of its kind, if its device is one of KEPT_ON."""
    if target.device.type in KEPT_ON:
        rows, slots = engine.state.tokens.shape
        ENGINES.keep(target.decoder, _key(settings, rows, slots, engine.state.source_slots), engine)


def _key(settings: Settings, rows: int, slots: int, source_slots: int) -> EngineKey:
    """Return everything that an engine is made for.

    The draft or heads go by their id. A kept engine holds them, so that no other object can have
    the same id.
    """
    proposer = id(settings.heads or (settings.draft and settings.draft.decoder))
    fixed = settings.longest_lookahead, settings.lookahead == "auto", settings.rule, replace(settings.sampling, seed=0)
    skips = None if settings.skips is None else tuple(settings.skips)
    return proposer, settings.drafter, settings.nodes, settings.tree, skips, *fixed, rows, slots, source_slots


def _release(decoder: Decoder, engine: Engine) -> None:
    """Make an engine and its drafter hold a shallow copy of a decoder instead of the decoder itself.

    The copy has the same modules and kernels, so captured iterations stay valid. An engine that
    held the decoder under which it is kept would keep that decoder alive for ever.
    """
    twin = copy.copy(decoder)
    for owner in (engine, engine.drafter):
        for name, value in list(vars(owner).items()):
            if value is decoder:
                setattr(owner, name, twin)


def _addresses(decoder: Decoder) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in chain(decoder.parameters(), decoder.buffers()))
