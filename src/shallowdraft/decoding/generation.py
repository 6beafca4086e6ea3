"""Generate text with a target and, if given, a draft: the public entry of the engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal, TypedDict, Unpack, cast, get_args, overload

from shallowdraft.decoding.drafters import (
    Drafter,
    HeadsDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    SkipDrafter,
    TreeDrafter,
    early_exit,
)
from shallowdraft.decoding.engine import UNSOUND, Engine
from shallowdraft.decoding.pace import LONGEST, Pace
from shallowdraft.decoding.sampling import Sampling
from shallowdraft.decoding.state import slots_for, source_slots_for
from shallowdraft.decoding.statistics import Statistics, Times
from shallowdraft.decoding.text import TextStream, text_stream
from shallowdraft.decoding.verification import Rule
from shallowdraft.errors import NumericsError, OptionError, PromptError
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.models.tree import MOST_NODES, Tree, best_tree, chains
from shallowdraft.shapes import require_one_kind

MAX_LOOKAHEAD = 32
RANKS = (0.6, 0.15, 0.07, 0.04, 0.03, 0.02)  # how often a draft's first, second, … choice is the target's
KEPT = 4  # engines of a target, each with its caches and captured iterations

Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length", "context"]
DrafterName = Literal["model", "tree", "several", "skip", "ngram", "medusa"]
"""What proposes: a draft model; one that branches; one that draws several chains; the target without some parts; the
text itself where it repeats; heads on the target."""
BRANCHING, DRAFTLESS = ("tree", "several", "medusa"), ("skip", "ngram", "medusa")


class Options(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`; `Settings` has their defaults."""

    draft: Model | None
    drafter: DrafterName
    lookahead: int | Literal["auto"]
    nodes: int
    tree: Tree | None
    skips: Sequence[int] | None
    heads: Heads | None
    min_confidence: float | None
    rule: Rule
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stop: Sequence[str]
    stop_tokens: Sequence[int] | None


@dataclass(frozen=True)
class Settings:
    """How to generate."""

    draft: Model | None = None
    drafter: DrafterName = "model"
    lookahead: int | Literal["auto"] = 5
    nodes: int = 16
    tree: Tree | None = None
    skips: Sequence[int] | None = None
    heads: Heads | None = None
    min_confidence: float | None = None
    rule: Rule = "token"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    whole: bool = False
    """Whether n-grams propose as many tokens as they may, however few matched: to time that."""
    streams: Sequence[int] | None = None
    """Numbers of the rows' random streams; None: those of the rows."""

    def __post_init__(self) -> None:
        whole = isinstance(self.lookahead, int) and 1 <= self.lookahead <= MAX_LOOKAHEAD
        if not whole and self.lookahead != "auto":
            raise OptionError(
                f"lookahead is {self.lookahead!r}; it must be a whole number from 1 to {MAX_LOOKAHEAD}, or auto"
            )
        for name, value, known in (("drafter", self.drafter, DrafterName), ("rule", self.rule, Rule)):
            if value not in get_args(known):
                raise OptionError(f"{name} is {value!r}; it must be one of {', '.join(get_args(known))}")
        if self.draft is not None and self.drafter in DRAFTLESS:
            raise OptionError(f"the {self.drafter} drafter takes no draft model; leave one of the two out")
        if self.heads is not None and self.drafter != "medusa":
            raise OptionError("heads are for the medusa drafter")
        if self.tree is not None and self.drafter not in ("tree", "medusa"):
            raise OptionError("a tree is for the tree and medusa drafters")
        if self.drafter in BRANCHING:
            self._check_tree()
        if self.min_confidence is not None:
            self._check_confidence()
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens is {self.max_new_tokens}; it must be a whole number of at least 1")
        _ = self.sampling  # checks the rest
        if isinstance(self.stop, str) or "" in self.stop:
            raise OptionError("stop must be a list of strings, none of them empty")

    def _check_confidence(self) -> None:
        if not isinstance(self.min_confidence, int | float) or not 0 <= self.min_confidence <= 1:
            raise OptionError(f"min_confidence is {self.min_confidence!r}; it is a probability, from 0 to 1")
        if self.drafter not in ("model", "skip") or self.lookahead == "auto":
            raise OptionError(
                "min_confidence is for the model and skip drafters, with a lookahead in numbers: the longest"
            )

    def _check_tree(self) -> None:
        if self.lookahead == "auto" or self.rule != "token":
            raise OptionError("a tree takes a lookahead in numbers, and no other rule than token")
        if self.drafter == "several" and self.temperature == 0:
            raise OptionError("several chains of a tree differ only where they are drawn; give a temperature above 0")
        fewest = 1 if self.drafter == "medusa" else self.lookahead
        if self.tree is None and not (isinstance(self.nodes, int) and fewest <= self.nodes <= MOST_NODES):
            raise OptionError(f"nodes is {self.nodes!r}; a tree of depth {self.lookahead} has {fewest} to {MOST_NODES}")

    @property
    def speculative(self) -> bool:
        return self.draft is not None or self.drafter in DRAFTLESS

    def shape_of_tree(self, vocab: int) -> Tree:
        """Of heads, as they were measured; a draft's choices of rank 1, 2, … are right as often as is usual."""
        if self.tree is not None:
            return self.tree
        assert isinstance(self.lookahead, int)
        if self.drafter == "several":
            return chains(self.nodes // self.lookahead, self.lookahead)
        depth = self.longest_lookahead
        measured = self.heads.chances if self.heads else []
        return best_tree(measured[:depth] or [RANKS[:vocab]] * depth, self.nodes)

    @property
    def longest_lookahead(self) -> int:
        if not self.speculative:
            return 0
        longest = LONGEST if self.lookahead == "auto" else self.lookahead
        return min(longest, self.heads.shape.count) if self.heads else longest

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class Generation:
    """What came of one prompt."""

    text: str
    token_ids: list[int]
    """New tokens only, a stop token included."""
    stats: Statistics
    finish_reason: FinishReason
    """A stop token or stop string; max_new_tokens; the end of the model's context."""
    accepted_by_iteration: list[int]
    """Draft tokens kept in each iteration."""


@dataclass(frozen=True)
class Piece:
    """A token as it is emitted, with the text that has become readable by it."""

    text: str
    token_id: int | None
    """None for text that was held back until the end."""
    drafted: bool
    """Whether it is an accepted draft token rather than the target's own."""


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
    single = _is_single(prompt)
    prompts = cast("Sequence[Prompt]", [prompt] if single else prompt)
    results = Run(target, prompts, Settings(**options)).finish()
    return results[0] if single else results


def stream(target: Model, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
    """`generate` for one prompt, piece by piece."""
    if not _is_single(prompt):
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


@dataclass(eq=False)
class Row:
    """One prompt on the host: what was kept of each iteration, and when to stop."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    text: TextStream
    followed: bool
    """Whether stop strings or a reader need text as it comes."""
    full: FinishReason
    """Why the row ends if nothing stops it."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    accepted_by_iteration: list[int] = field(default_factory=list)
    proposed_by_iteration: list[int] = field(default_factory=list)
    """How many tokens deep."""
    drafted: int = 0
    finish_reason: FinishReason | None = None
    sound: bool = True
    """Whether the models gave it numbers only."""

    def take(self, accepted: int, tokens: Sequence[int], nodes: int = 0, *, iteration: bool = True) -> None:
        """Keep what was emitted, up to where the row ends; a tree proposed `nodes`. Prefill is no iteration."""
        if accepted == UNSOUND:
            self.sound = False
            return
        for kept, token in enumerate(tokens[: accepted + 1], 1):
            self.tokens.append(token)
            if self.followed:
                self.pieces.append(Piece(self.text.push(token), token, drafted=kept <= accepted))
            if token in self.stop_tokens or self.text.stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                self.finish_reason = self.full
            if self.finish_reason:
                self._end_text()
                break
        if iteration:
            chain = len(tokens) - 1
            self.accepted_by_iteration.append(min(accepted, kept))  # tokens that were cut off do not count
            self.proposed_by_iteration.append(chain)
            self.drafted += chain and (nodes or chain)

    def _end_text(self) -> None:
        if rest := self.text.flush(() if self.followed else self.tokens):
            self.pieces.append(Piece(rest, None, drafted=False))
        if self.text.stopped:
            self.finish_reason = "stop"


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
        self.engine = _engine(target, settings, begun, limits, sources)
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
                _keep(self.target, self.settings, self.engine)
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


def _is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Text, or token ids as integers, an array or a tensor of one dimension; not a list of such."""
    if not hasattr(prompt, "__len__"):
        raise PromptError(f"the prompt is {prompt!r}; give text, token ids, or a list of either")
    if isinstance(prompt, str) or not len(prompt):
        return isinstance(prompt, str)
    return isinstance(prompt[0], Integral) or getattr(prompt[0], "ndim", None) == 0


def encode(target: Model, prompt: Prompt) -> list[int]:
    """A prompt as token ids, with room for new ones."""
    ids = token_ids(target, prompt)
    if encoder := target.shape.encoder:
        if len(ids) > encoder.context:
            raise PromptError(
                f"the prompt has {len(ids):,} tokens and {target.name} reads {encoder.context:,}; shorten the prompt"
            )
    elif len(ids) >= target.shape.context:
        raise PromptError(
            f"the prompt has {len(ids):,} tokens and {target.name} a context of {target.shape.context:,}; "
            "shorten the prompt so that there is room for new tokens"
        )
    return ids


def token_ids(target: Model, prompt: Prompt) -> list[int]:
    """A prompt as token ids, however many."""
    if not len(prompt):
        raise PromptError("the prompt is empty; give at least one token")
    ids = target.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt has no tokens; give text that the tokenizer knows")
    if wrong := [token for token in ids if not 0 <= token < target.shape.vocab]:
        raise PromptError(f"token id {wrong[0]} is outside the target's vocabulary of {target.shape.vocab:,}")
    return ids


def new_row(target: Model, settings: Settings, begun: Sequence[int], pieces: bool) -> Row:
    """`begun` is the prompt; of an encoder–decoder the start token, which is no text."""
    room = target.shape.context - len(begun)
    if settings.stop:
        target.require_tokenizer()
    return Row(
        max_new_tokens=min(settings.max_new_tokens, room),
        stop_tokens=frozenset(target.stop_tokens if settings.stop_tokens is None else settings.stop_tokens),
        text=text_stream(target, () if target.shape.encoder else begun, settings.stop),
        followed=pieces or bool(settings.stop),
        full="length" if settings.max_new_tokens <= room else "context",
    )


def _engine(
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
    pace = Pace() if settings.speculative and settings.lookahead == "auto" else None
    drafter = new_drafter(target, settings)
    slots = slots_for(limits, drafter.nodes, target.device)
    kind = _kind(settings, len(prompts), slots, source_slots_for(sources, target.device))
    kept: Engine | None = target.decoder.kept.pop(kind, None)
    if kept is not None:
        kept.restart(prompts, limits, settings.seed, pace, sources, settings.streams)
        return kept
    context = draft.shape.context if draft else None
    given = target.decoder, drafter, settings.sampling, prompts, limits, context, pace, settings.rule, sources
    return Engine(*given, streams=settings.streams)


def _keep(target: Model, settings: Settings, engine: Engine) -> None:
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


def new_drafter(target: Model, settings: Settings) -> Drafter:
    draft, lookahead = settings.draft, settings.longest_lookahead
    if settings.drafter == "ngram":
        return NgramDrafter(lookahead, settings.sampling, target.shape.vocab, whole=settings.whole)
    if settings.drafter == "skip":
        skips = early_exit(target.shape.layers) if settings.skips is None else settings.skips
        return SkipDrafter(target.decoder, skips, lookahead, settings.sampling, settings.min_confidence)
    if settings.drafter == "medusa":
        if settings.heads is None:
            raise OptionError("the medusa drafter needs heads on the target; give those that sd.load_heads returns")
        tree = settings.shape_of_tree(target.shape.vocab)
        if tree.depth > settings.heads.shape.count:
            raise OptionError(
                f"a tree of depth {tree.depth} needs as many heads; there are {settings.heads.shape.count}"
            )
        return HeadsDrafter(target.decoder, settings.heads, tree, settings.sampling)
    if draft is None:
        if settings.drafter in BRANCHING:
            raise OptionError("a tree is proposed by a draft model; give one as draft")
        return NoDrafter()
    check_vocabulary(target, draft).require()
    require_one_kind(target.shape, draft.shape)
    if draft.device != target.device:
        raise OptionError(f"the target is on {target.device} and the draft on {draft.device}; load both on one device")
    if settings.drafter in BRANCHING:
        independent = settings.drafter == "several"
        tree, sampling = settings.shape_of_tree(min(target.shape.vocab, draft.shape.vocab)), settings.sampling
        return TreeDrafter(draft.decoder, tree, sampling, target.shape.vocab, independent=independent)
    return ModelDrafter(draft.decoder, lookahead, settings.sampling, target.shape.vocab, settings.min_confidence)
