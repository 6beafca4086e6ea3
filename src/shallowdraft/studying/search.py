"""Search for the fastest draft by building it: successive halving over shapes.

Every candidate is a shape that some parent can be pruned to. In each rung all that are left are distilled on the
target, on three times as many tokens as in the rung before, replayed on a trace and ranked by predicted speed; a third
goes on. One that cannot be built, loaded or replayed is passed over, and the next best takes its place. Text to learn
from may be a corpus; without one the target writes its own.
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
from shallowdraft.profiling.latency_model import LatencyLaw, layer_weights
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

REDUCTION = 3
HOPELESS = 0.9  # a shape that would have to be accepted more often than that is not built
SEQUENCE, BATCH = 128, 1024
OPENING = 16  # tokens that the target draws before it goes on, drawing or greedily
ABOUT = 1.3  # so many times more or fewer weights are about as many
SMALLEST = 8  # times fewer weights in its layers than the largest from the same parent
PROBE, LAYER_SETS = 0.2, 3  # of the first rung's tokens, for each of so many sets of layers
TRAINED = 0.25  # learning rate for what has been trained before, over the one for what was just cut

Done = TypeVar("Done")


@dataclass(frozen=True)
class ShapeCandidate:
    """A shape to prune a parent to; its own shape means that it is only distilled."""

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
    """How many candidates are distilled on how many tokens each."""

    candidates: int
    tokens: int


@dataclass(frozen=True)
class Found:
    """The fastest."""

    candidate: ShapeCandidate
    folder: Path
    record: Record


@dataclass(frozen=True)
class Failure:
    """Why a candidate is passed over."""

    reason: str


def attempted(step: Callable[[], Done]) -> Done | Failure:
    """The result of a step of one candidate, or its failure; what would fail for all of them is raised."""
    try:
        return step()
    except (ClusterError, CorpusError, RecordError):
        raise
    except (ShallowdraftError, RuntimeError, ValueError) as error:  # torch and transformers raise the latter two
        return Failure(" ".join(str(error).split()) or type(error).__name__)


def plan_rungs(candidates: int, tokens: int) -> list[Rung]:
    """All rungs take about as long: a third of the candidates, three times the tokens, until one is left."""
    sizes = [candidates]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // REDUCTION))
    first = tokens / sum(size * REDUCTION**number for number, size in enumerate(sizes))
    return [Rung(size, max(BATCH, round(first * REDUCTION**number))) for number, size in enumerate(sizes)]


def choose_candidates(
    parents: Mapping[str, ModelShape],
    law: LatencyLaw,
    profile: Profile,
    context: float,
    lookaheads: Sequence[int],
    best_tokens_per_s: float | None,
    count: int,
    max_parameters: int | None = None,
) -> list[ShapeCandidate]:
    """From every parent shapes of several sizes, none that cannot win.

    The parent's own is among them where it could: on a CPU a draft's weights have 8 bits, so that even the target may
    draft for itself.
    """
    found = []
    for name, parent in parents.items():
        designs = design(enumerate_shapes(parent, max_parameters), law, profile, context, lookaheads, best_tokens_per_s)
        able = [one.shape for one in designs if one.to_win.acceptance_rate < HOPELESS]
        found.append([ShapeCandidate(name, shape) for shape in _spread(able, -(-count // len(parents)))])
    mixed = [of_parent[rank] for rank in range(count) for of_parent in found if rank < len(of_parent)]
    if not mixed:
        raise OptionError("no shape that these parents can be pruned to could be faster than what there is")
    return mixed[:count]


def _spread(shapes: Sequence[ModelShape], count: int) -> list[ModelShape]:
    """From the most weights in layers down to an eighth of them, evenly by ratio; of about equal ones the widest.

    Cutting whole layers out of a model harms it less than making all of them narrower.
    """
    if not shapes:
        return []
    most = max(map(layer_weights, shapes))
    wanted = (most / SMALLEST ** (rank / max(1, count - 1)) for rank in range(count))

    def fit(shape: ModelShape, size: float) -> tuple[float, float]:
        distance = abs(log(layer_weights(shape) / size))
        return -shape.d_model * shape.ffn if distance < log(ABOUT) else 0.0, distance

    return list(dict.fromkeys(min(shapes, key=lambda one: fit(one, size)) for size in wanted))


@dataclass(frozen=True)
class Search:
    """What it takes to judge what was built; all of it happens on one machine, after all builds of a rung."""

    builder: "Builder"
    engine: Model
    """The target, packed for decoding."""
    load_draft: Callable[[str], Model]
    trace: Trace
    profile: Path
    lookaheads: Sequence[int]
    follow: Follow
    executor: Executor
    """Where to build."""
    say: Callable[[str], None]
    """Tell the user about a candidate that is passed over."""
    rounds: int = 3

    def run(self, candidates: Sequence[ShapeCandidate], rungs: Sequence[Rung]) -> Found:
        """Build, or what is left of it."""
        about = {
            "target": self.builder.target.name,
            "target_digest": self.builder.target.digest,
            "trace": len(self.trace.outputs),
            "trace_digest": self.trace.digest,
            "parents": {name: parent.digest for name, parent in self.builder.parents.items()},
            "rungs": [vars(rung) for rung in rungs],
        }
        file = open_search(RunFolder(self.builder.folder).search, about)
        done = {(row["candidate"], row["rung"]): row for row in file}
        left = list(candidates)
        for number, rung in enumerate(rungs):
            left = self._ranked(left, number, rung, file, done)
        winner = left[0]
        return Found(winner, self.builder.saved(winner, len(rungs) - 1), done[winner.name, len(rungs) - 1])

    def _ranked(
        self,
        candidates: Sequence[ShapeCandidate],
        number: int,
        rung: Rung,
        file: Records,
        done: dict[tuple[str, int], Record],
    ) -> list[ShapeCandidate]:
        """As many as the rung has room for, fastest first; whoever fails makes room for the next."""
        waiting, able = list(candidates), list[ShapeCandidate]()
        while waiting and len(able) < rung.candidates:
            room = rung.candidates - len(able)
            batch, waiting = waiting[:room], waiting[room:]
            unknown = [candidate for candidate in batch if (candidate.name, number) not in done]
            built = dict(self.executor.map(partial(self.builder.attempt, number, rung), unknown))
            for place, candidate in enumerate(unknown):
                row = done[candidate.name, number] = self._row(candidate, number, rung, built[place])
                file.append(row)
            for candidate in batch:
                row = done[candidate.name, number]
                if "failed" in row:
                    self.say(f"passed over: {candidate.name}: {row['failed']}")
                else:
                    able.append(candidate)
        if not able:
            first = done[candidates[0].name, number]["failed"]
            raise TrainingError(
                f"none of {len(candidates)} candidates could be built, loaded and replayed; the first: {first}; "
                f"put that right, and remove {file.path} to try again"
            )
        return sorted(able, key=lambda candidate: -done[candidate.name, number]["tokens_per_s"])

    def _row(self, candidate: ShapeCandidate, number: int, rung: Rung, built: "Path | Failure") -> Record:
        """The record of a candidate, or of why there is none."""
        judged = built if isinstance(built, Failure) else attempted(lambda: self._judge(candidate, built))
        about = {"candidate": candidate.name, "rung": number, "tokens": rung.tokens}
        return about | ({"failed": judged.reason} if isinstance(judged, Failure) else judged)

    def _judge(self, candidate: ShapeCandidate, folder: Path) -> Record:
        draft = replace(self.load_draft(str(folder)), name=candidate.name)
        candidates = [Candidate.with_draft(draft, lookahead) for lookahead in timed_lookaheads(self.lookaheads)]
        most = longest_context(self.engine.shape.context, draft.shape.context, candidates[-1].lookahead)
        wanted = all_points(candidates, fitting([round(self.trace.mean_context)], most), [1])
        steps = measure(self.engine, draft_options({candidate.name: draft}), wanted, self.profile, self.rounds)
        self.follow(f"timing {candidate.name}", steps, self.rounds * len(wanted))
        found = replay_model(draft, self.trace)
        best = cost.best(forecast(found, read_profile(self.profile), self.lookaheads))
        return {
            "lookahead": best.lookahead,
            "tar": best.tar,
            "speed_up": best.speed_up,
            "tokens_per_s": best.tokens_per_s,
        }


@dataclass(frozen=True)
class Builder:
    """What every build needs, wherever it is done."""

    target: Model
    """With weights that can be read, for distillation."""
    parents: Mapping[str, Model]
    store: TokenStore
    folder: Path
    follow: Follow

    def saved(self, candidate: ShapeCandidate, number: int) -> Path:
        """Where a candidate lies after a rung."""
        return self.folder / candidate.folder / f"rung-{number}"

    def attempt(self, number: int, rung: Rung, candidate: ShapeCandidate) -> "Path | Failure":
        """The folder of a candidate, or why it could not be built."""
        return attempted(lambda: self.build(number, rung, candidate))

    def build(self, number: int, rung: Rung, candidate: ShapeCandidate) -> Path:
        """Train a candidate for a rung, unless it has been; its folder."""
        out = self.saved(candidate, number)
        if not out.exists():
            unfinished = out.with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            decoder = self._trained(candidate, number, rung)
            replace(self.parents[candidate.parent], decoder=decoder).save(unfinished)
            unfinished.rename(out)
        return out

    def _trained(self, candidate: ShapeCandidate, number: int, rung: Rung) -> Decoder:
        """Distilled on from the rung before; what training made worse is left as it was."""
        work = self.folder / candidate.folder / f"training-{number}"
        trainer = Trainer(self.store, work, follow=self.follow, validation_tokens=8192, importance_tokens=32768)
        rate = usual_rate(candidate.shape)
        recipe = Recipe(rung.tokens, BATCH, SEQUENCE, rows_at_once(candidate.shape, SEQUENCE), rate, seed=number)
        parent = self.parents[candidate.parent].decoder
        cut = candidate.shape != parent.shape and number == 0
        if number:
            decoder = load(self.saved(candidate, number - 1), "float32", self.target.device, trainable=True).decoder
        elif cut:
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
            return decoder  # agrees already
        before = copy.deepcopy(decoder)
        recipe = replace(recipe, learning_rate=rate if cut else TRAINED * rate)
        trainer.train("distil", decoder, Distillation(self.target.decoder), recipe)

        def acceptance(draft: Decoder) -> float:
            return trainer.validate(draft, self.target.decoder, SEQUENCE)["acceptance"]

        kept = max((before, decoder), key=acceptance)
        shutil.rmtree(work)
        return kept


def write_text(target: Model, folder: Path, tokens: int, corpus: Path | None) -> Iterator[int]:
    """Text to distil on, made once: the target's own, and a corpus if there is one; yields tokens written."""
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
