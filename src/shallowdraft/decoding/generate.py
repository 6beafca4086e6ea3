"""Generate text with a target and, if given, a draft: the public entry of the engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack, cast, overload

from shallowdraft.decoding.engine_cache import keep_engine, take_engine
from shallowdraft.decoding.options import BRANCHING, Options, Settings
from shallowdraft.decoding.prompt_tokens import Prompt, encode, is_single
from shallowdraft.decoding.results import Generation, Piece
from shallowdraft.decoding.rows import GeneratedRow, new_row
from shallowdraft.decoding.statistics import PhaseTimes, Statistics
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
    """Continue a prompt, or several as one batch; a draft makes it faster, and the output stays the target's own.

    Args:
        target (Model): the model whose output is generated, as `load` returns it.
        prompt (str | Sequence[int] | list of these): text or token ids to continue; the encoder's
            text of an encoder–decoder. A list gives a list of results, whose times are those of the
            whole batch.
        draft (Model | None = None): a smaller model with the same vocabulary, which proposes
            tokens.
        drafter (str = "model"): what proposes. "model": the draft, one token after the other;
            without a draft decoding is plain. "tree": the draft, as a tree of tokens. "several":
            the draft, as chains drawn independently. "skip": the target without some of its parts.
            "ngram": the text itself where it repeats. "medusa": heads on the target, as a tree of
            tokens.
        lookahead (int | "auto" = 5): draft tokens an iteration, 1 to 32; the depth of a tree.
            "auto" chooses it anew as the text goes, by speed. Then the times decide which random
            numbers are used for what: sampled text keeps its distribution, but a seed does not give
            the same text again.
        nodes (int = 16): draft tokens of a tree, or of several chains together.
        tree (Tree | None = None): the tree that "tree" or "medusa" propose. None: the best one of
            `nodes`, by the acceptance that was measured for the heads, or is usual.
        skips (Sequence[int] | None = None): the parts that "skip" leaves out, 2 i for the attention
            of layer i and 2 i + 1 for its FFN. None: the second half of the layers.
        heads (Heads | None = None): the heads of "medusa", as `load_heads` returns them.
        min_confidence (float | None = None): draft on only while the draft's own probability of its
            last token is at least this, in at least one row of a batch; `lookahead` is the longest
            proposal. For "model" and "skip", on a CPU.
        rule (str = "token"): judge drawn tokens one by one, or with "block" together, which accepts
            more. Both are lossless.
        max_new_tokens (int = 128): end after this many tokens. Generation also ends at the end of
            the target's context.
        temperature (float = 0.0): 0 takes the most likely token each time; above 0 tokens are
            drawn.
        top_k (int | None = None): draw from the k most likely tokens only.
        top_p (float | None = None): draw from the most likely tokens that together reach this
            probability.
        seed (int = 0): seed of the draws. Each row of a batch has a random stream of its own, from
            (seed, row).
        stop (Sequence[str] = ()): strings that end the text; they are not part of it.
        stop_tokens (Sequence[int] | None = None): token ids that end the text. None: the target's
            own.
    """
    single = is_single(prompt)
    prompts = cast("Sequence[Prompt]", [prompt] if single else prompt)
    results = BatchRun(target, prompts, Settings(**options)).finish()
    return results[0] if single else results


def stream(target: Model, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
    """Continue one prompt piece by piece; the options are those of `generate`."""
    if not is_single(prompt):
        raise PromptError("stream takes one prompt, as text or token ids; call it once for each prompt")
    return Stream(BatchRun(target, [prompt], Settings(**options), pieces=True))


class Stream:
    """An iterator over the pieces of a continuation, with the `result` once it has ended."""

    def __init__(self, run: "BatchRun") -> None:
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

    def _decode(self, run: "BatchRun") -> Iterator[Piece]:
        row, shown = run.rows[0], 0
        for _ in run.iterations():
            yield from row.pieces[shown:]
            shown = len(row.pieces)
        self._result = run.results()[0]


class BatchRun:
    """A batch of prompts, from their tokens to the results."""

    def __init__(self, target: Model, prompts: Sequence[Prompt], settings: Settings, *, pieces: bool = False) -> None:
        for role, model in (("target", target), ("draft", settings.draft)):
            if not isinstance(model, Model) and not (role == "draft" and model is None):
                raise OptionError(f"the {role} is {model!r}; give a model that sd.load returned")
        if not prompts:
            raise PromptError("there is no prompt; give text, token ids, or a list of either")
        self.target, self.settings = target, settings
        encoded = [encode(target, prompt) for prompt in prompts]
        sources = encoded if target.shape.encoder else None
        prefixes = [[target.start_token] for _ in encoded] if sources else encoded
        self.rows = [new_row(target, settings, prefix, pieces) for prefix in prefixes]
        limits = [len(prefix) + row.max_new_tokens for prefix, row in zip(prefixes, self.rows, strict=True)]
        self._total_s = 0.0
        self._times: PhaseTimes | None = None
        self.engine = take_engine(target, settings, prefixes, limits, sources)
        self._nodes = self.engine.drafter.nodes if settings.drafter in BRANCHING else 0

    def iterations(self) -> Iterator[None]:
        """Decode until every row has ended, pausing after each iteration; the clock stops while the caller works."""
        begin_s = time.perf_counter()
        for iteration, emitted in enumerate(self.engine.run()):
            for row, (accepted, *tokens) in zip(self.rows, emitted, strict=True):
                if row.finish_reason is None:
                    row.add(accepted, tokens, self._nodes, iteration=iteration > 0)
                    if not row.finite:
                        raise NumericsError.of(self._models())
            self._total_s += time.perf_counter() - begin_s
            yield
            begin_s = time.perf_counter()
            if all(row.finish_reason for row in self.rows):
                self._times = self.read_clock()()
                keep_engine(self.target, self.settings, self.engine)
                return

    def finish(self) -> list[Generation]:
        """Decode until every row has ended, and return the results."""
        for _ in self.iterations():
            pass
        return self.results()

    def rewind(self) -> None:
        """Go back to the end of the prompts and forget what was emitted since."""
        self.engine.rewind()
        for row in self.rows:
            row.tokens.clear()
            row.finish_reason = None

    @property
    def has_room(self) -> bool:
        """Whether another iteration follows in which the draft has room for a whole proposal."""
        return self.engine.lengths.within_draft_context and not all(row.finish_reason for row in self.rows)

    def read_clock(self) -> Callable[[], PhaseTimes]:
        """Read the clock now; return a function that tells what it showed.

        On a GPU an iteration is still under way, and calling the function waits for it.
        """
        seconds, total_s = self.engine.clock.read(), self._total_s
        return lambda: PhaseTimes(seconds("prefill"), seconds("draft"), seconds("verify"), total_s)

    def results(self) -> list[Generation]:
        """Return the result of every prompt, once all rows have ended."""
        assert self._times is not None
        return [self._result(row, self._times) for row in self.rows]

    def _result(self, row: GeneratedRow, times: PhaseTimes) -> Generation:
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
