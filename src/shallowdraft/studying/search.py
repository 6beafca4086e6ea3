"""Search for the fastest draft by building candidates: successive halving over shapes.

Every candidate is a shape that some parent can be pruned to. In each rung the remaining candidates are distilled on the
target, replayed on a trace and ranked by predicted speed; a third of them goes on to the next rung, with three times as
many tokens. One that cannot be built, loaded or replayed is passed over, and the next best takes its place. The text to
learn from may be a corpus; without one the target writes its own.
"""

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from typing import TypeVar

from shallowdraft import cost
from shallowdraft.building.generated_text import write_continuations
from shallowdraft.building.pruning_methods import prune_by_importance
from shallowdraft.building.recipe import Recipe, rows_at_once, usual_rate
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.token_store import TokenStore, empty_store, open_store, write_store
from shallowdraft.building.trainer import Trainer
from shallowdraft.decoding.candidate import draft_options
from shallowdraft.errors import ClusterError, CorpusError, OptionError, RecordError, ShallowdraftError, TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, load
from shallowdraft.profiling.latency_model import LatencyModel, layer_weights
from shallowdraft.profiling.measure import all_points, fitting, longest_context, measure
from shallowdraft.progress import Follow
from shallowdraft.records import Record, Records
from shallowdraft.replaying.model import replay_model
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.search import open_search
from shallowdraft.runs.trace import Trace
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.cluster import Executor
from shallowdraft.studying.design import design, enumerate_shapes
from shallowdraft.studying.forecast import forecast
from shallowdraft.studying.study import timed_lookaheads

REDUCTION = 3  # times fewer candidates from rung to rung, and times more tokens for each
MOST_ACCEPTANCE = 0.9  # a shape that would need a higher acceptance rate to win is not built
SEQUENCE, BATCH = 128, 1024  # tokens of a training sequence and of a training step
OPENING = 16  # tokens that the target samples as a prompt, before it writes on from there
SIMILAR = 1.3  # shapes whose weights differ by less than this factor are about as large
SMALLEST = 8  # times fewer weights in its layers than the largest candidate of the same parent
PROBE, LAYER_SETS = 0.2, 3  # share of the first rung's tokens for each of some sets of layers that are tried out
TRAINED_RATE = 0.25  # learning rate of a model that was trained before, relative to that of one just pruned

Result = TypeVar("Result")


@dataclass(frozen=True)
class ShapeCandidate:
    """A shape to prune a parent to; with the parent's own shape it is only distilled."""

    parent: str
    shape: ModelShape

    @property
    def name(self) -> str:
        return f"{self.shape} of {self.parent}"

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.name)


@dataclass(frozen=True)
class Rung:
    """A number of candidates, each distilled on a number of tokens."""

    candidates: int
    tokens: int


@dataclass(frozen=True)
class FastestDraft:
    """The fastest candidate, where it was built, and its record in the last rung."""

    candidate: ShapeCandidate
    folder: Path
    record: Record


@dataclass(frozen=True)
class PassedOver:
    """The reason for which a candidate cannot go on."""

    reason: str


def attempted(step: Callable[[], Result]) -> Result | PassedOver:
    """Return the result of a step of one candidate, or its failure; raise errors that every candidate would have."""
    try:
        return step()
    except (ClusterError, CorpusError, RecordError):
        raise
    except (ShallowdraftError, RuntimeError, ValueError) as error:  # torch and transformers raise the latter two
        return PassedOver(" ".join(str(error).split()) or type(error).__name__)


def plan_rungs(candidates: int, tokens: int) -> list[Rung]:
    """Divide the tokens among rungs of about the same length, each with a third of the last one's candidates."""
    sizes = [candidates]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // REDUCTION))
    first = tokens / sum(size * REDUCTION**number for number, size in enumerate(sizes))
    return [Rung(size, max(BATCH, round(first * REDUCTION**number))) for number, size in enumerate(sizes)]


def choose_candidates(
    parents: Mapping[str, ModelShape],
    latency: LatencyModel,
    profile: Profile,
    context: float,
    lookaheads: Sequence[int],
    best_tokens_per_s: float | None,
    count: int,
    max_parameters: int | None = None,
) -> list[ShapeCandidate]:
    """Choose shapes of several sizes from every parent, among those that could win.

    A parent's own shape is among them if it could win: on a CPU a draft's weights have 8 bits, so that even the target
    may draft for itself.
    """
    by_parent = []
    for name, parent in parents.items():
        shapes = enumerate_shapes(parent, max_parameters)
        designs = design(shapes, latency, profile, context, lookaheads, best_tokens_per_s)
        able = [entry.shape for entry in designs if entry.to_win.acceptance_rate < MOST_ACCEPTANCE]
        by_parent.append([ShapeCandidate(name, shape) for shape in _spread(able, -(-count // len(parents)))])
    # The parents take turns, so that none is cut off.
    mixed = [of_parent[rank] for rank in range(count) for of_parent in by_parent if rank < len(of_parent)]
    if not mixed:
        raise OptionError("no shape that these parents can be pruned to could be faster than the best there is")
    return mixed[:count]


def _spread(shapes: Sequence[ModelShape], count: int) -> list[ModelShape]:
    """Choose shapes from the most weights in layers down to an eighth of them, at even ratios.

    Of shapes of about the same size the widest is chosen: pruning whole layers harms a model less than making all of
    them narrower.
    """
    if not shapes:
        return []
    largest = max(map(layer_weights, shapes))
    sizes = (largest / SMALLEST ** (rank / max(1, count - 1)) for rank in range(count))

    def fit(shape: ModelShape, size: float) -> tuple[float, float]:
        distance = abs(log(layer_weights(shape) / size))
        return -shape.d_model * shape.ffn if distance < log(SIMILAR) else 0.0, distance

    return list(dict.fromkeys(min(shapes, key=lambda shape: fit(shape, size)) for size in sizes))


@dataclass(frozen=True)
class Search:
    """A search on one machine: builds may be elsewhere, but all replays and timings of a rung are done here."""

    builder: "Builder"
    engine: Model
    """The target, packed for decoding."""
    load_draft: Callable[[str], Model]
    trace: Trace
    profile: Path
    lookaheads: Sequence[int]
    follow: Follow
    executor: Executor
    """Computes the builds."""
    say: Callable[[str], None]
    """Tells the user about a candidate that is passed over."""
    rounds: int = 3
    """Rounds of timing."""

    def run(self, candidates: Sequence[ShapeCandidate], rungs: Sequence[Rung]) -> FastestDraft:
        """Search through all rungs; candidates that an interrupted search has judged are not judged again."""
        about = {
            "target": self.builder.target.name,
            "target_digest": self.builder.target.digest,
            "trace": len(self.trace.outputs),
            "trace_digest": self.trace.digest,
            "parents": {name: parent.digest for name, parent in self.builder.parents.items()},
            "rungs": [vars(rung) for rung in rungs],
        }
        file = open_search(RunFolder(self.builder.folder).search, about)
        judged = {(row["candidate"], row["rung"]): row for row in file}
        remaining = list(candidates)
        for number, rung in enumerate(rungs):
            remaining = self._ranked(remaining, number, rung, file, judged)
        winner = remaining[0]
        return FastestDraft(winner, self.builder.saved(winner, len(rungs) - 1), judged[winner.name, len(rungs) - 1])

    def _ranked(
        self,
        candidates: Sequence[ShapeCandidate],
        number: int,
        rung: Rung,
        file: Records,
        judged: dict[tuple[str, int], Record],
    ) -> list[ShapeCandidate]:
        """Return the candidates that fill a rung, the fastest first; the next best replaces each that fails.

        `candidates` come in the order of the rung before; rows that are not `judged` yet are added to it and the file.
        """
        waiting, able = list(candidates), list[ShapeCandidate]()
        while waiting and len(able) < rung.candidates:
            room = rung.candidates - len(able)
            batch, waiting = waiting[:room], waiting[room:]
            unjudged = [candidate for candidate in batch if (candidate.name, number) not in judged]
            built = dict(self.executor.map(partial(self.builder.attempt, number, rung), unjudged))
            for cell, candidate in enumerate(unjudged):
                row = judged[candidate.name, number] = self._row(candidate, number, rung, built[cell])
                file.append(row)
            for candidate in batch:
                row = judged[candidate.name, number]
                if "failed" in row:
                    self.say(f"passed over: {candidate.name}: {row['failed']}")
                else:
                    able.append(candidate)
        if not able:
            first = judged[candidates[0].name, number]["failed"]
            raise TrainingError(
                f"none of {len(candidates)} candidates could be built, loaded and replayed; the first: {first}; "
                f"put that right, and remove {file.path} to try again"
            )
        return sorted(able, key=lambda candidate: -judged[candidate.name, number]["tokens_per_s"])

    def _row(self, candidate: ShapeCandidate, number: int, rung: Rung, built: "Path | PassedOver") -> Record:
        """Return the record of a candidate: its speed, or the reason for which it is passed over."""
        figures = built if isinstance(built, PassedOver) else attempted(lambda: self._judge(candidate, built))
        about = {"candidate": candidate.name, "rung": number, "tokens": rung.tokens}
        return about | ({"failed": figures.reason} if isinstance(figures, PassedOver) else figures)

    def _judge(self, candidate: ShapeCandidate, folder: Path) -> Record:
        """Time and replay a built draft, and return its predicted speed at its best lookahead."""
        draft = replace(self.load_draft(str(folder)), name=candidate.name)
        timed = [Candidate.with_draft(draft, lookahead) for lookahead in timed_lookaheads(self.lookaheads)]
        longest = longest_context(self.engine.shape.context, draft.shape.context, timed[-1].lookahead)
        points = all_points(timed, fitting([round(self.trace.mean_context)], longest), [1])
        steps = measure(self.engine, draft_options({candidate.name: draft}), points, self.profile, self.rounds)
        self.follow(f"timing {candidate.name}", steps, self.rounds * len(points))
        replay = replay_model(draft, self.trace)
        best = cost.best(forecast(replay, read_profile(self.profile), self.lookaheads))
        return {
            "lookahead": best.lookahead,
            "tar": best.tar,
            "speed_up": best.speed_up,
            "tokens_per_s": best.tokens_per_s,
        }


@dataclass(frozen=True)
class Builder:
    """Everything that a build needs, on any machine."""

    target: Model
    """The target with weights in float32, for distillation."""
    parents: Mapping[str, Model]
    store: TokenStore
    folder: Path
    follow: Follow

    def saved(self, candidate: ShapeCandidate, number: int) -> Path:
        """Return the folder of a candidate after a rung."""
        return self.folder / candidate.folder / f"rung-{number}"

    def attempt(self, number: int, rung: Rung, candidate: ShapeCandidate) -> "Path | PassedOver":
        """Build a candidate for a rung; return its folder, or the reason for which it could not be built."""
        return attempted(lambda: self.build(number, rung, candidate))

    def build(self, number: int, rung: Rung, candidate: ShapeCandidate) -> Path:
        """Train a candidate for a rung, unless it was trained already; return its folder."""
        out = self.saved(candidate, number)
        if not out.exists():
            unfinished = out.with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            decoder = self._trained(candidate, number, rung)
            replace(self.parents[candidate.parent], decoder=decoder).save(unfinished)
            unfinished.rename(out)
        return out

    def _trained(self, candidate: ShapeCandidate, number: int, rung: Rung) -> Decoder:
        """Prune the parent, or take the last rung's draft, and distil it; keep the better of before and after."""
        work = self.folder / candidate.folder / f"training-{number}"
        trainer = Trainer(self.store, work, follow=self.follow, validation_tokens=8192, importance_tokens=32768)
        rate = usual_rate(candidate.shape)
        recipe = Recipe(rung.tokens, BATCH, SEQUENCE, rows_at_once(candidate.shape, SEQUENCE), rate, seed=number)
        parent = self.parents[candidate.parent].decoder
        pruned = candidate.shape != parent.shape and number == 0
        if number:
            decoder = load(self.saved(candidate, number - 1), "float32", self.target.device, trainable=True).decoder
        elif pruned:
            decoder = prune_by_importance(
                trainer,
                parent,
                candidate.shape,
                recipe,
                objective="forward-kl",
                probe=PROBE,
                target=self.target.decoder,
                sets=LAYER_SETS,
            )
        else:
            decoder = load(candidate.parent, "float32", self.target.device, trainable=True).decoder
        if candidate.shape == self.target.shape and candidate.parent == self.target.name:
            return decoder  # the target itself: it agrees already
        before = copy.deepcopy(decoder)
        recipe = replace(recipe, learning_rate=rate if pruned else TRAINED_RATE * rate)
        trainer.train("distil", decoder, Distillation(self.target.decoder), recipe)

        def acceptance(draft: Decoder) -> float:
            return trainer.validate(draft, self.target.decoder, SEQUENCE)["acceptance"]

        better = max((before, decoder), key=acceptance)
        shutil.rmtree(work)
        return better


def write_text(target: Model, folder: Path, tokens: int, corpus: Path | None) -> Iterator[int]:
    """Write the text to distil on, unless it is there, and yield the number of tokens written.

    It is the target's own writing, and the corpus if there is one.
    """
    if (folder / "text" / "store.json").exists():
        return
    tokenizer = target.require_tokenizer()
    plain = folder / "corpus"
    if corpus is None:
        store = empty_store(tokenizer, plain)
    else:
        store = open_store(plain) if (plain / "store.json").exists() else write_store(corpus, tokenizer, plain)
    size = {"tokens": tokens, "prompt": OPENING, "length": SEQUENCE - OPENING, "rows": 64}
    yield from write_continuations(store, target.decoder, folder / "text", **size, seed=1)


def new_search(
    target: str,
    parents: Sequence[str],
    folder: Path,
    trace: Trace,
    lookaheads: Sequence[int],
    *,
    load_target: Callable[[str], Model],
    load_trainable: Callable[[str], Model],
    load_draft: Callable[[str], Model],
    generated: int,
    corpus: Path | None,
    executor: Executor,
    follow: Follow,
    follow_training: Follow,
    say: Callable[[str], None],
) -> Search:
    """Load the models, let the target write the text to learn from, and return the search that is ready to run."""
    trainable = load_trainable(target)
    follow("the target writes", write_text(trainable, folder, generated, corpus), generated)
    builder = Builder(
        target=trainable,
        parents={name: load_trainable(name) for name in parents},
        store=open_store(folder / "text"),
        folder=folder,
        follow=follow_training,
    )
    return Search(
        builder=builder,
        engine=load_target(target),
        load_draft=load_draft,
        trace=trace,
        profile=RunFolder(folder).profile,
        lookaheads=lookaheads,
        follow=follow,
        executor=executor,
        say=say,
    )
