"""A batch that requests join and leave between two iterations: what each emits is what `generate` would."""

from collections.abc import Sequence

from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.generation import Row, Settings, new_drafter, new_row
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.decoding.state import slots_for
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.model import Model

SLACK = 128  # slots that a row has before it: room to grow until rows are copied again


class Batch:
    """Up to `most` rows that are decoded together by a target and, if given, a draft; none is longer than `longest`.

    A prompt is read by an engine of one row. Its row is then copied into the place of one that has left. Where there is
    none, all rows are copied into a larger batch: they must lie next to each other for the kernels.
    """

    def __init__(self, target: Model, draft: Model | None, lookahead: int, longest: int, most: int) -> None:
        self._target, self._longest = target, longest
        for model in (target, draft) if draft else (target,):
            row_bytes = longest * model.shape.kv_bytes_per_token(dtype_name(model.decoder.dtype))
            # Twice: while rows are copied they are there as they were and as they will be.
            require_memory(2 * most * row_bytes, model.device, f"a cache of {most} x {longest} tokens, and a copy,")
        self._way = Settings(draft=draft, lookahead=lookahead)
        self._reader = self._new_reader()
        self._engine: Engine | None = None
        self._places: dict[Row, int] = {}  # in the engine, which may hold others that have left

    @property
    def rows(self) -> list[Row]:
        return list(self._places)

    def join(self, prompt: list[int], settings: Settings, stream: int = 0) -> Row:
        """Read a prompt and emit its first token; `stream` is the number of the random stream of its seed.

        What proposes is the batch's, all else is taken from the settings.
        """
        row, reader = new_row(self._target, settings, len(prompt), pieces=True), self._reader
        reader.sampling = settings.sampling
        reader.restart([prompt], [len(prompt) + row.max_new_tokens], settings.seed, None)
        reader.noise.begin(settings.seed, 1, stream)
        ((accepted, *tokens),) = reader.follow(reader.prefill())
        row.take(accepted, tokens, iteration=False)
        if not row.sound:
            self._reader = self._new_reader()  # what is no number would stay in its cache
        elif not row.finish_reason:
            self._place(row)
        return row

    def step(self) -> None:
        """One iteration of all rows; those that have ended leave."""
        if not self._places:
            self._engine = None
            return
        assert self._engine is not None
        size = len(self._engine.state.tokens)
        if len(self._places) < size or not self._fits(self._engine, self._engine.state.longest):
            self._regroup()
        emitted = self._engine.follow(self._engine.iterate())
        for row, place in self._places.items():
            accepted, *tokens = emitted[place]
            row.take(accepted, tokens)
        ended = [row for row in self._places if row.finish_reason or not row.sound]
        self.leave(ended)
        if not all(row.sound for row in ended):
            self._regroup()  # nor may it stay here

    def leave(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._places.pop(row, None)

    def _place(self, row: Row) -> None:
        """Where the reader's row goes."""
        fresh = self._reader, 0
        free = set(range(len(self._engine.state.tokens))) - set(self._places.values()) if self._engine else set()
        if self._engine and free and self._fits(self._engine, self._reader.state.longest):
            self._places[row] = min(free)
            self._engine.put(self._places[row], fresh)
        else:
            self._regroup(fresh)
            self._places[row] = len(self._places)

    def _regroup(self, *fresh: tuple[Engine, int]) -> None:
        """The rows that are there, and a fresh one, with room to grow."""
        parts = [(self._engine, place) for place in self._places.values()] if self._engine else []
        parts += fresh
        if not parts:
            self._engine = None
            return
        longest = max(engine.state.longest for engine, _ in parts)
        self._engine = Engine.of(parts, min(self._slots(longest + SLACK), self._slots(self._longest)))
        self._places = {row: place for place, row in enumerate(self._places)}

    def _fits(self, engine: Engine, longest: int) -> bool:
        """Whether a text so long has room for an iteration."""
        return longest + self._way.longest_lookahead + 1 <= engine.state.tokens.shape[1]

    def _slots(self, longest: int) -> int:
        return slots_for([longest], self._way.longest_lookahead, self._target.device)

    def _new_reader(self) -> Engine:
        drafter = new_drafter(self._target, self._way, None)
        slots = self._slots(self._longest)
        return Engine(self._target.decoder, drafter, Sampling(), [[0]], [self._longest], slots=slots)
