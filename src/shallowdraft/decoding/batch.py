"""A batch that requests join and leave between two iterations: what each emits is what `generate` would."""

from collections.abc import Sequence

from shallowdraft.decoding.drafters.create import new_drafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.rows import Row, new_row
from shallowdraft.decoding.state import slots_for
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.model import Model
from shallowdraft.runs.sampling import Sampling

SLACK = 128  # slots that a row has before it, or as many as behind it: room to grow until rows are copied again
PATIENCE = 4  # iterations of a row that nobody asks for are computed for each that would be copied to be rid of them


class Batch:
    """Up to `most` rows that are decoded together by a target and, if given, a draft; none is longer than `longest`.

    A prompt is read by an engine of one row. Its row is then copied into the place of one that has left. Where there is
    none, all rows are copied into a larger batch: they must lie next to each other for the kernels.

    Rows that have left are computed on for a while, since others may take their places. On a CPU a batch is then as
    large as there are rows, and not much longer than it must be. On a GPU there is one of each power of two, as long as
    any text may be, and it is kept: its iterations are captured once, whatever rows it holds later.
    """

    def __init__(self, target: Model, draft: Model | None, lookahead: int, longest: int, most: int) -> None:
        self._target, self._longest = target, longest
        self._keeps = target.device.type == "cuda"
        smaller = (2**power for power in range(most.bit_length()) if 2**power < most)
        self._sizes = [*smaller, most] if self._keeps else range(1, most + 1)
        self._way = Settings(draft=draft, lookahead=lookahead)
        # While rows are copied they are there as they were and as they will be; one more is read.
        rows = (sum(self._sizes) if self._keeps else 2 * most) + 1
        models = (target, draft) if draft else (target,)
        token_bytes = sum(one.shape.kv_bytes_per_token(dtype_name(one.decoder.dtype)) for one in models)
        needed_bytes = rows * self._slots(longest) * token_bytes
        require_memory(needed_bytes, target.device, f"a cache of {most} x {longest} tokens, and copies,")
        self._reader = self._new_reader()
        self._engine: Engine | None = None
        self._kept: dict[int, Engine] = {}
        self._places: dict[Row, int] = {}  # in the engine, which may hold others that have left
        self._wasted = 0  # iterations of those, since all places were taken

    @property
    def rows(self) -> list[Row]:
        return list(self._places)

    def join(self, prompt: list[int], settings: Settings, stream: int = 0) -> Row:
        """Read a prompt and emit its first token; `stream` is the number of the random stream of its seed.

        What proposes is the batch's, all else is taken from the settings.
        """
        row, reader = new_row(self._target, settings, prompt, pieces=True), self._reader
        reader.sampling = settings.sampling
        reader.restart([prompt], [len(prompt) + row.max_new_tokens], settings.seed, None)
        reader.random_streams.begin(None if settings.sampling.greedy else settings.seed, 1, [stream])
        ((accepted, *tokens),) = reader.follow(reader.prefill())
        row.take(accepted, tokens, iteration=False)
        if not row.sound:
            self._reader = self._new_reader()  # what is no number would stay in its cache
        elif not row.finish_reason:
            self._place(row)
        return row

    def warm(self) -> None:
        """Meet every kernel, and capture every iteration where that is done, so that no request waits for it."""
        for size in self._sizes if self._keeps else (1,):
            for temperature in (0.0, 1.0):
                endless = Settings(max_new_tokens=self._longest - 1, temperature=temperature, stop_tokens=())
                rows = [self.join([0], endless) for _ in range(size)]
                for _ in range(3):  # as it is, captured, replayed
                    self.step()
                self.leave(rows)

    def step(self) -> None:
        """One iteration of all rows; those that have ended leave."""
        if not self._places:
            self._engine = None
            return
        assert self._engine is not None
        size, rows = len(self._engine.state.tokens), len(self._places)
        self._wasted = self._wasted + size - rows if size > rows else 0
        too_large = self._size(rows) < size and self._wasted > PATIENCE * rows
        if too_large or not self._fits(self._engine, self._engine.state.longest):
            self._regroup()
        emitted = self._engine.follow(self._engine.iterate())
        for row, place in self._places.items():
            accepted, *tokens = emitted[place]
            row.take(accepted, tokens)
        ended = [row for row in self._places if row.finish_reason or not row.sound]
        self.leave(ended)
        if not all(row.sound for row in ended):
            self._kept.pop(len(self._engine.state.tokens), None)
            self._regroup()  # nor may it stay here

    def leave(self, rows: Sequence[Row]) -> None:
        for row in rows:
            place = self._places.pop(row, None)
            if place is not None and self._engine:
                self._engine.rest(place)

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
        self._wasted = 0
        parts = [(self._engine, place) for place in self._places.values()] if self._engine else []
        parts += fresh
        if not parts:
            self._engine = None
            return
        self._engine = self._kept_for(parts) if self._keeps else self._fitting(parts)
        self._places = {row: place for place, row in enumerate(self._places)}

    def _fitting(self, parts: list[tuple[Engine, int]]) -> Engine:
        """An engine for these rows and no more."""
        longest = max(engine.state.longest for engine, _ in parts)
        room = longest + max(SLACK, longest)
        return Engine.of(parts, min(self._slots(room), self._slots(self._longest)))

    def _kept_for(self, parts: list[tuple[Engine, int]]) -> Engine:
        """The engine for so many rows, the first of which are these."""
        size = self._size(len(parts))
        idle = range(len(parts), size)
        engine = self._kept.get(size)
        if engine is None:
            engine = self._kept[size] = Engine.of([*parts, *[parts[0]] * len(idle)], self._slots(self._longest))
        else:
            for place, part in enumerate(parts):
                engine.put(place, part)
        for place in idle:
            engine.rest(place)
        return engine

    def _size(self, rows: int) -> int:
        """Of the smallest engine for so many."""
        return next(size for size in self._sizes if size >= rows)

    def _fits(self, engine: Engine, longest: int) -> bool:
        """Whether a text so long has room for an iteration."""
        return longest + self._way.longest_lookahead + 1 <= engine.state.tokens.shape[1]

    def _slots(self, longest: int) -> int:
        return slots_for([longest], self._way.longest_lookahead, self._target.device)

    def _new_reader(self) -> Engine:
        drafter = new_drafter(self._target, self._way)
        slots = self._slots(self._longest)
        return Engine(self._target.decoder, drafter, Sampling(), [[0]], [self._longest], slots=slots)
