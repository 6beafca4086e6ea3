"""A batch that requests join and leave between two iterations: what each emits is what `generate` would."""

from collections.abc import Sequence

from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.generation import Row, Settings, new_drafter, new_row
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.decoding.state import slots_for
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.model import Model


class Batch:
    """Up to `most` rows that are decoded together by a target and, if given, a draft; none is longer than `longest`.

    A prompt is read by an engine of one row. Its row is then copied beside those of the batch: rows must lie next to
    each other, and copying what they hold takes about as long as an iteration that looks at it.
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
        self._places: list[int] = []  # of the rows, in the engine; it may hold others that have left
        self.rows: list[Row] = []

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
        if row.sound and not row.finish_reason:
            self._regroup([(reader, 0)])
            self.rows.append(row)
        elif not row.sound:
            self._reader = self._new_reader()  # what is no number would stay in its cache
        return row

    def step(self) -> None:
        """One iteration of all rows; those that have ended leave."""
        if self._engine is not None and self.rows:
            if len(self._places) < len(self._engine.state.tokens):
                self._regroup([])
            for row, (accepted, *tokens) in zip(self.rows, self._engine.follow(self._engine.iterate()), strict=True):
                row.take(accepted, tokens)
            self.leave([row for row in self.rows if row.finish_reason or not row.sound])

    def leave(self, rows: Sequence[Row]) -> None:
        kept = [(row, place) for row, place in zip(self.rows, self._places, strict=True) if row not in rows]
        self.rows, self._places = [row for row, _ in kept], [place for _, place in kept]

    def _regroup(self, fresh: list[tuple[Engine, int]]) -> None:
        old = [(self._engine, place) for place in self._places] if self._engine else []
        self._engine = Engine.of(old + fresh)
        self._places = list(range(len(old + fresh)))

    def _new_reader(self) -> Engine:
        drafter = new_drafter(self._target, self._way, None)
        slots = slots_for([self._longest], drafter.nodes, self._target.device)
        return Engine(self._target.decoder, drafter, Sampling(), [[0]], [self._longest], slots=slots)
