"""A batch that requests join and leave between two iterations; each gets what `generate` would give it."""

from collections.abc import Sequence

from shallowdraft.decoding.drafters.create import new_drafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.rows import GeneratedRow, new_row
from shallowdraft.decoding.state import slots_for
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.model import Model
from shallowdraft.runs.sampling import Sampling

MIN_SPARE_SLOTS = 128  # slots that a new engine has beyond its longest row, so that rows are not copied again soon
IDLE_ITERATIONS = 4  # idle row-iterations tolerated per active row before the active rows are copied to fewer rows


class Batch:
    """Up to `most` rows that are decoded together by a target and, if given, a draft; none is longer than `longest`.

    An engine of one row, the reader, reads a new prompt. Its row is then copied over an idle row.
    If there is none, all rows are copied into a larger engine, because rows must lie next to each
    other for the kernels.

    Rows that have left are idle for a while, since a new one may replace them. On a CPU an engine
    has as many rows as are needed, and not many more slots. On a GPU there is one engine for each
    power of two, as long as any text may be, and it is kept: its iterations are captured once,
    whichever rows it holds later.
    """

    def __init__(self, target: Model, draft: Model | None, lookahead: int, longest: int, most: int) -> None:
        self._target, self._longest = target, longest
        self._keeps = target.device.type == "cuda"
        smaller = (2**power for power in range(most.bit_length()) if 2**power < most)
        self._sizes = [*smaller, most] if self._keeps else range(1, most + 1)
        self._proposing = Settings(draft=draft, lookahead=lookahead)
        # While rows are copied, old and new engine exist side by side; the reader has one row more.
        rows = (sum(self._sizes) if self._keeps else 2 * most) + 1
        models = (target, draft) if draft else (target,)
        token_bytes = sum(model.shape.kv_bytes_per_token(dtype_name(model.decoder.dtype)) for model in models)
        needed_bytes = rows * self._slots(longest) * token_bytes
        require_memory(needed_bytes, target.device, f"a cache of {most} x {longest} tokens, and copies,")
        self._reader = self._new_reader()
        self._engine: Engine | None = None
        self._kept: dict[int, Engine] = {}  # by number of rows
        self._indices: dict[GeneratedRow, int] = {}  # active rows by index in the engine; its other rows are idle
        self._idle_iterations = 0  # row-iterations of idle rows since all rows were active

    @property
    def rows(self) -> list[GeneratedRow]:
        return list(self._indices)

    def join(self, prompt: list[int], settings: Settings, stream: int = 0) -> GeneratedRow:
        """Read a prompt and emit its first token; `stream` is the number of its random stream.

        The batch decides what proposes; everything else is taken from the settings.
        """
        row, reader = new_row(self._target, settings, prompt, pieces=True), self._reader
        limit = len(prompt) + row.max_new_tokens
        reader.restart([prompt], [limit], settings.sampling, streams=[stream], iterations_ahead=1)
        ((accepted, *tokens),) = reader.read(reader.prefill())
        row.add(accepted, tokens, iteration=False)
        if not row.finite:
            self._reader = self._new_reader()  # NaN must not stay in its KV cache
        elif not row.finish_reason:
            self._place(row)
        return row

    def warm(self) -> None:
        """Compile every kernel, and on a GPU capture every iteration, so that no request waits for that."""
        for size in self._sizes if self._keeps else (1,):
            for temperature in (0.0, 1.0):
                endless = Settings(max_new_tokens=self._longest - 1, temperature=temperature, stop_tokens=())
                rows = [self.join([0], endless) for _ in range(size)]
                for _ in range(3):  # eager, captured, replayed
                    self.step()
                self.leave(rows)

    def step(self) -> None:
        """Run one iteration of all rows, and remove those that have ended."""
        if not self._indices:
            self._engine = None
            return
        assert self._engine is not None
        size, active = len(self._engine.state.tokens), len(self._indices)
        self._idle_iterations = self._idle_iterations + size - active if size > active else 0
        too_large = self._size(active) < size and self._idle_iterations > IDLE_ITERATIONS * active
        if too_large or not self._fits(self._engine, self._engine.state.longest):
            self._regroup()
        emitted = self._engine.read(self._engine.iterate())
        for row, index in self._indices.items():
            accepted, *tokens = emitted[index]
            row.add(accepted, tokens)
        ended = [row for row in self._indices if row.finish_reason or not row.finite]
        self.leave(ended)
        if not all(row.finite for row in ended):  # NaN must not stay in this engine either
            self._kept.pop(len(self._engine.state.tokens), None)
            self._regroup()

    def leave(self, rows: Sequence[GeneratedRow]) -> None:
        """Remove rows from the batch; their places in the engine are idle until others replace them."""
        for row in rows:
            index = self._indices.pop(row, None)
            if index is not None and self._engine:
                self._engine.idle_row(index)

    def _place(self, row: GeneratedRow) -> None:
        """Copy the reader's row over an idle row, or into a larger engine."""
        size = len(self._engine.state.tokens) if self._engine else 0
        idle = set(range(size)) - set(self._indices.values())
        if self._engine and idle and self._fits(self._engine, self._reader.state.longest):
            self._indices[row] = min(idle)
            self._engine.replace_row(self._indices[row], self._reader, 0)
        else:
            self._regroup((self._reader, 0))
            self._indices[row] = len(self._indices)

    def _regroup(self, *new: tuple[Engine, int]) -> None:
        """Copy the active rows, and a new one behind them, into an engine with room to grow."""
        self._idle_iterations = 0
        rows = [(self._engine, index) for index in self._indices.values()] if self._engine else []
        rows += new
        if not rows:
            self._engine = None
            return
        self._engine = self._kept_engine(rows) if self._keeps else self._fitting_engine(rows)
        self._indices = {row: index for index, row in enumerate(self._indices)}

    def _fitting_engine(self, rows: list[tuple[Engine, int]]) -> Engine:
        """Build an engine for exactly these rows."""
        longest = max(engine.state.longest for engine, _ in rows)
        room = longest + max(MIN_SPARE_SLOTS, longest)
        return Engine.from_rows(rows, min(self._slots(room), self._slots(self._longest)))

    def _kept_engine(self, rows: list[tuple[Engine, int]]) -> Engine:
        """Return the kept engine of the smallest sufficient size, with these rows first and idle ones behind them."""
        size = self._size(len(rows))
        idle = range(len(rows), size)
        engine = self._kept.get(size)
        if engine is None:
            filled = [*rows, *[rows[0]] * len(idle)]
            engine = self._kept[size] = Engine.from_rows(filled, self._slots(self._longest))
        else:
            for index, (source, source_index) in enumerate(rows):
                engine.replace_row(index, source, source_index)
        for index in idle:
            engine.idle_row(index)
        return engine

    def _size(self, rows: int) -> int:
        """Return the number of rows of the smallest engine that holds this many."""
        return next(size for size in self._sizes if size >= rows)

    def _fits(self, engine: Engine, longest: int) -> bool:
        """Tell whether an engine has room for an iteration of a text of this length."""
        return longest + self._proposing.longest_lookahead + 1 <= engine.state.tokens.shape[1]

    def _slots(self, longest: int) -> int:
        return slots_for([longest], self._proposing.longest_lookahead, self._target.device)

    def _new_reader(self) -> Engine:
        drafter = new_drafter(self._target, self._proposing)
        slots = self._slots(self._longest)
        return Engine.for_prompts(self._target.decoder, drafter, Sampling(), [[0]], [self._longest], slots=slots)
