"""Generate text with a target and, if given, a draft: the public entry of the engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack, cast, overload

from shallowdraft.decoding.engine_cache import keep_engine, take_engine
from shallowdraft.decoding.options import BRANCHING, Options, Settings
from shallowdraft.decoding.prompt_tokens import Prompt, encode, is_single
from shallowdraft.decoding.results import Generation, Piece
from shallowdraft.decoding.rows import Row, new_row
from shallowdraft.decoding.statistics import Statistics, Times
from shallowdraft.errors import NumericsError, OptionError, PromptError
from shallowdraft.models.model import Model


@overload
def generate(target: Model, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation: ...


@overload
def generate(
    target: Model, prompt: list[str] | list[list[int]] | list[Prompt], **options: Unpack[Options]
) -> list[Generation]: ...


def generate(
    target: Model, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]
) -> Generation | list[Generation]:
    """Decode text or token ids, or a list of either as one batch; with a draft faster, with the same result.

    The prompt is what is continued; of an encoder–decoder it is what the encoder reads.

    Options and defaults: draft=None, drafter="model", lookahead=5 ("auto": what pays, chosen anew as the text goes),
    max_new_tokens=128, temperature=0.0, top_k=None, top_p=None, seed=0, stop=() (strings, not part of the text),
    stop_tokens=None (the target's own). Generation also ends where the context does. Each row of a batch draws a random
    stream of its own from (seed, row); the times of a batch are its rows'. With "auto" the times decide which draws are
    used for what: the law of sampled text is the same, the text of a seed is not.

    Other drafters: "tree": the draft branches into `nodes`=16 tokens, `lookahead` deep, or into a given `tree`.
    "several": it draws as many chains as `nodes` allows. "skip": no draft, the target without the parts that `skips`
    names, 2 i for the attention of layer i and 2 i + 1 for its FFN, by default the second half of its layers. "ngram":
    no draft, the text itself proposes where it repeats, on a CPU by how many match. "medusa": no draft, `heads`
    on the target (sd.load_heads) propose a tree of `nodes`, no deeper than there are heads. min_confidence=None (a
    probability): a draft, or "skip", goes on only while its own probability of its last token is at least that, in a
    batch in some row; `lookahead` is then the longest proposal. rule="token" ("block": drawn proposals are judged as a
    whole, which accepts more).
    """
    single = is_single(prompt)
    prompts = cast("Sequence[Prompt]", [prompt] if single else prompt)
    results = Run(target, prompts, Settings(**options)).finish()
    return results[0] if single else results


def stream(target: Model, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
    """`generate` for one prompt, piece by piece."""
    if not is_single(prompt):
        raise PromptError("stream takes one prompt: text or token ids, and not none of them")
    return Stream(Run(target, [prompt], Settings(**options), pieces=True))


class Stream:
    """An iterator over the pieces of a continuation; `result` is there when it has ended."""

    def __init__(self, run: "Run") -> None:
        self._pieces = self._decode(run)
        self._result: Generation | None = None

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> Generation:
        if self._result is None:
            raise OptionError("the stream has not ended yet; iterate to its end, then read its result")
        return self._result

    def _decode(self, run: "Run") -> Iterator[Piece]:
        row, shown = run.rows[0], 0
        for _ in run.iterations():
            yield from row.pieces[shown:]
            shown = len(row.pieces)
        self._result = run.results()[0]


class Run:
    """A batch from prompts to results."""

    def __init__(self, target: Model, prompts: Sequence[Prompt], settings: Settings, *, pieces: bool = False) -> None:
        for role, model in (("target", target), ("draft", settings.draft)):
            if not isinstance(model, Model) and not (role == "draft" and model is None):
                raise OptionError(f"the {role} is {model!r}; give a model that sd.load returned")
        if not prompts:
            raise PromptError("there is no prompt; give text, token ids, or a list of either")
        self.target, self.settings = target, settings
        encoded = [encode(target, prompt) for prompt in prompts]
        sources = encoded if target.shape.encoder else None
        begun = [[target.start_token] for _ in encoded] if sources else encoded
        self.rows = [new_row(target, settings, ids, pieces) for ids in begun]
        limits = [len(ids) + row.max_new_tokens for ids, row in zip(begun, self.rows, strict=True)]
        self._total_s = 0.0
        self._times: Times | None = None
        self.engine = take_engine(target, settings, begun, limits, sources)
        self._nodes = self.engine.drafter.nodes if settings.drafter in BRANCHING else 0

    def iterations(self) -> Iterator[None]:
        """Decode until every row has ended, pausing after each iteration; the clock stops while the caller works."""
        begin_s = time.perf_counter()
        for iteration, emitted in enumerate(self.engine.run()):
            for row, (accepted, *tokens) in zip(self.rows, emitted, strict=True):
                if row.finish_reason is None:
                    row.take(accepted, tokens, self._nodes, iteration=iteration > 0)
                    if not row.sound:
                        raise NumericsError.of(self._models())
            self._total_s += time.perf_counter() - begin_s
            yield
            begin_s = time.perf_counter()
            if all(row.finish_reason for row in self.rows):
                self._times = self.read_clock()()
                keep_engine(self.target, self.settings, self.engine)
                return

    def finish(self) -> list[Generation]:
        """Decode until every row has ended."""
        for _ in self.iterations():
            pass
        return self.results()

    def rewind(self) -> None:
        """Back to where the prompts end: what was emitted since is forgotten."""
        self.engine.rewind()
        for row in self.rows:
            row.tokens.clear()
            row.finish_reason = None

    @property
    def goes_on(self) -> bool:
        """Whether another iteration follows, in which a draft has room for a whole proposal."""
        return self.engine.within_draft_context and not all(row.finish_reason for row in self.rows)

    def read_clock(self) -> Callable[[], Times]:
        """The run's times up to here, to be asked for later: on a GPU an iteration is still under way, and asking
        waits for it.
        """
        seconds, total_s = self.engine.clock.read(), self._total_s
        return lambda: Times(seconds("prefill"), seconds("draft"), seconds("verify"), total_s)

    def results(self) -> list[Generation]:
        """What came of every prompt, once all have ended."""
        assert self._times is not None
        return [self._result(row, self._times) for row in self.rows]

    def _result(self, row: Row, times: Times) -> Generation:
        accepted, lookahead = row.accepted_by_iteration, self.engine.drafter.lookahead
        stats = Statistics.derive(
            tokens=len(row.tokens),
            emitted=len(row.tokens) - 1,
            drafted=row.drafted,
            histogram=[accepted.count(n) for n in range(lookahead + 1)],
            proposed=[row.proposed_by_iteration.count(n) for n in range(lookahead + 1)],
            times=times,
        )
        text = "".join(piece.text for piece in row.pieces)
        assert row.finish_reason is not None
        return Generation(text, row.tokens, stats, row.finish_reason, accepted)

    def _models(self) -> str:
        draft = self.settings.draft
        heads = " or its heads" if self.settings.heads else ""
        return f"target {self.target.name}{heads}" + (f" or draft {draft.name}" if draft else "")
