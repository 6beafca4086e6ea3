"""Profiles: seconds of iterations in every way, at every context and batch, each measured beside plain decoding.

Machines are shared and change under us: the cores of a virtual machine move, neighbours come and go, and plain decoding
and verification do not suffer alike. So iterations stand between plain tokens. Their time, and those of handing a cache
line from core to core and of some arithmetic, tell in which state the machine was: what is asked for in a state comes
from samples in it.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch

from shallowdraft.cost import Iteration
from shallowdraft.decoding.candidate import Candidate, ProposerKey
from shallowdraft.decoding.options import DrafterName, Options
from shallowdraft.decoding.timing import MachineState, time_beside_plain
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.files import Count, Range, Seconds, Size
from shallowdraft.models.model import Model
from shallowdraft.models.tree import MOST_NODES
from shallowdraft.records import RANDOM, Record, Records, command, processor

KIND = "profile"
PARTS = ("draft_s", "target_s", "rest_s")
ANY = ""  # stands for all draft models
CONTEXTS = (64, 256)  # tokens before the first new one, as far as models have room
OF_DRAFTS = ("model", "tree")  # drafters whose proposals come from a draft model
PLANNED = "planned"  # what only a plan has

Floats = np.ndarray[Any, np.dtype[np.float64]]

WARM_UP, COUNT, TURNS = 4, 12, 3  # iterations before a sample and of it, and samples in a round
RIDGE, ROBUST_STEPS = 0.01, 5
DISTURBED = 3.0  # times as long, over a plain token, as usual: no state of the machine does that
SEVERAL = 5  # samples that a median must rest on
SHORTEST = 1e-12  # seconds that a pass may take
NEAR = {"plain_s": 0.04, "handover_s": 0.4, "arithmetic_s": 0.08}  # what differs by that much is another state


@dataclass(frozen=True, order=True)
class Point:
    """What is timed: a way of speculating at a context and a batch size."""

    candidate: Candidate
    context: int
    batch: int


PartSeconds = Annotated[float, Range(-1e9, 1e9)]
"""Of which those below 0 are refused with their point."""


class Sample(TypedDict):
    """What a line of a profile must have."""

    draft: str
    lookahead: Annotated[int, Range(1, MOST_NODES)]
    context: Count
    batch: Size
    drafter: NotRequired[DrafterName]
    tree: NotRequired[list[int]]
    digest: NotRequired[str]
    dtype: NotRequired[str]
    plain_s: PartSeconds
    handover_s: Seconds
    arithmetic_s: Seconds
    pass_s: NotRequired[Seconds]
    draft_s: PartSeconds
    target_s: PartSeconds
    rest_s: PartSeconds
    round: Count
    turn: Count


class Place(TypedDict):
    """A point that is to be timed."""

    draft: str
    lookahead: Annotated[int, Range(1, MOST_NODES)]
    context: Count
    batch: Size
    drafter: DrafterName
    tree: list[int]
    digest: str
    dtype: str


class Plan(TypedDict):
    """What a line must have that says which samples were to be taken, and is none itself."""

    planned: list[Place]
    rounds: Size
    turns: Size
    command: list[str]


Timed = tuple[DrafterName, str, str, tuple[int, ...]]
"""Whose times: a drafter, the digest of which one (or ANY), its precision, and its tree."""
Alike = tuple[DrafterName, int]
ALL_DRAFTS: Timed = ("model", ANY, ANY, ())


@dataclass(frozen=True)
class Profile:
    """Samples by point, and medians of them."""

    about: Record
    samples: Mapping[Point, list[Record]]
    notes: list[str] = field(default_factory=list)
    """What whoever uses it should be told: samples that are missing, or were left out."""

    @property
    def drafts(self) -> list[str]:
        """Names of the draft models that can be loaded."""
        return [name for name in self._latest if not name.startswith(RANDOM)]

    @property
    def shapes(self) -> list[str]:
        """Draft models with random weights, by the names of their shapes."""
        return [name.removeprefix(RANDOM) for name in self._latest if name.startswith(RANDOM)]

    @cached_property
    def _latest(self) -> dict[str, Candidate]:
        """By name the draft model that was timed last under it: its weights may have been replaced since before."""
        return {point.candidate.draft: point.candidate for point in self.samples if point.candidate.drafter == "model"}

    def candidate(self, draft: str, lookahead: int) -> Candidate:
        """The way of the draft model that this profile calls so."""
        return replace(self._latest.get(draft, Candidate(draft, lookahead)), lookahead=lookahead)

    def lookaheads(self, draft: str) -> list[int]:
        return self._lookaheads(self._whose(draft))

    def _whose(self, draft: str) -> Timed:
        return ALL_DRAFTS if draft == ANY else _own(self.candidate(draft, 1))

    def _lookaheads(self, whose: Timed) -> list[int]:
        return sorted({point.candidate.lookahead for point in self.samples if whose in _counted_for(point)})

    def lookaheads_in(self, draft: str, context: int, batch: int) -> list[int]:
        """Those at which a draft, or ANY, was timed at this very context and batch size."""
        by_context = self._times.get((self._whose(draft), batch), {})
        return sorted(by_context.get(context, {}))

    def _known(self, candidate: Candidate) -> Candidate:
        """The way as this profile has it: an earlier one knows proposers by name alone."""
        timed = self._latest.get(candidate.draft, candidate)
        by_name = timed.digest == candidate.draft and not timed.dtype
        return replace(candidate, digest="", dtype="") if by_name else candidate

    def covers(self, candidate: Candidate) -> bool:
        """Whether it was timed, or one that proposes more."""
        timed = self._lookaheads(_own(self._known(candidate)))
        if not timed and candidate.draft in self._latest:
            timed_dtype = self._latest[candidate.draft].dtype
            raise RecordError(
                f"the profile has no times of this {candidate.draft} ({candidate.dtype}): its weights were replaced "
                f"since they were timed, or read as {timed_dtype}; profile it again into the same file"
            )
        if not timed:
            raise RecordError(f"the profile has no times of {candidate.draft}; measure it first")
        return candidate.lookahead <= max(timed)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds a token of plain decoding."""
        if batch not in self._plain_s:
            raise RecordError(f"the profile has no times of batch {batch}; measure some with profile --batches {batch}")
        return _between(context, self._plain_s[batch])

    @cached_property
    def _plain_s(self) -> dict[int, dict[int, float]]:
        """Medians by batch, then context."""
        times: dict[int, dict[int, list[float]]] = {}
        for point, found in self.samples.items():
            of_context = times.setdefault(point.batch, {}).setdefault(point.context, [])
            of_context.extend(sample["plain_s"] for sample in found)
        return {batch: {one: median(some) for one, some in of.items()} for batch, of in times.items()}

    def iteration(
        self, draft: str, lookahead: int, context: float, batch: int = 1, state: MachineState | None = None
    ) -> Iteration:
        """Seconds of an iteration with the draft model that this profile calls so."""
        return self.iteration_of(self.candidate(draft, lookahead), context, batch, state)

    def iteration_of(
        self, candidate: Candidate, context: float, batch: int = 1, state: MachineState | None = None
    ) -> Iteration:
        """Seconds of an iteration, between the measured contexts and lookaheads on a straight line.

        On the machine as it is then and there; without a state, as it was while profiling.
        """
        lookahead, own = candidate.lookahead, _own(self._known(candidate))
        verified = ALL_DRAFTS if candidate.drafter == "model" else own
        whose = {"draft_s": own, "target_s": verified, "rest_s": own}
        met = state and self._nearest_met(state)
        if (own, batch) not in self._times:
            raise RecordError(_unknown(candidate, batch))
        ratios = [self._ratio(part, whose[part], lookahead, context, batch, met) for part in PARTS]
        plain_s = state.plain_s if state else self.plain_s(context, batch)
        return Iteration(*(ratio * plain_s for ratio in ratios))

    def target_s(self, lookahead: int, context: float, batch: int = 1) -> float:
        """Seconds in which the target verifies so many draft tokens: a pass of one token more."""
        return self._ratio("target_s", ALL_DRAFTS, lookahead, context, batch, None) * self.plain_s(context, batch)

    def rest_s(self, lookahead: int, context: float, batch: int = 1) -> float:
        """Seconds of an iteration beside drafting and verifying."""
        return self._ratio("rest_s", ALL_DRAFTS, lookahead, context, batch, None) * self.plain_s(context, batch)

    def pass_s(self, context: int, batch: int = 1) -> float:
        """Seconds of the target's pass over one token."""
        of_place = (rows for point, rows in self.samples.items() if (point.context, point.batch) == (context, batch))
        known = [row["pass_s"] for rows in of_place for row in rows if "pass_s" in row]
        if not known:
            raise RecordError(f"the profile has no pass_s at context {context}, batch {batch}; measure it again")
        return float(median(known))

    def spread(self, draft: str) -> float:
        """Half the distance of the quartiles of an iteration over a plain token, relative to it: the median point's."""

        def of_point(found: Sequence[Record]) -> float:
            ratios = [sum(sample[part] for part in PARTS) / sample["plain_s"] for sample in found]
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            return float((high - low) / 2 / middle)

        return median(of_point(found) for point, found in self.of_draft(draft).items())

    def of_draft(self, draft: str) -> dict[Point, list[Record]]:
        """Samples of the draft model that this profile calls so."""
        whose = self._whose(draft)
        return {point: rows for point, rows in self.samples.items() if _own(point.candidate) == whose}

    def _nearest_met(self, state: MachineState) -> MachineState:
        """The state, or what came nearest to it while profiling; what is unknown stays so."""
        here = {name: getattr(state, name) for name in NEAR}
        return MachineState(
            **{name: float(np.clip(one, *self._ends[name])) if one else 0.0 for name, one in here.items()}
        )

    @cached_property
    def _ends(self) -> dict[str, tuple[float, float]]:
        """The least and the most of what was met."""
        found = _columns([row for rows in self.samples.values() for row in rows])
        return {name: (float(found[name].min()), float(found[name].max())) for name in NEAR}

    def _ratio(
        self, part: str, whose: Timed, lookahead: int, context: float, batch: int, state: MachineState | None
    ) -> float:
        timed = self._times.get((whose, batch))
        if timed is None:
            raise RecordError(_unknown(Candidate("DRAFT", lookahead), batch))
        by_context = {
            one: _between(
                lookahead,
                {
                    d: _median(found, part, state, self._slopes[part, _alike(whose, d)] if state else {})
                    for d, found in by_lookahead.items()
                },
            )
            for one, by_lookahead in timed.items()
        }
        return _between(context, by_context)

    @cached_property
    def _times(self) -> dict[tuple[Timed, int], dict[int, dict[int, dict[str, Floats]]]]:
        """Samples by whose they are and batch, then context, then lookahead."""
        rows: dict[tuple[Timed, int], dict[int, dict[int, list[Record]]]] = {}
        for point, found in self.samples.items():
            for whose in _counted_for(point):
                by_context = rows.setdefault((whose, point.batch), {})
                by_context.setdefault(point.context, {}).setdefault(point.candidate.lookahead, []).extend(found)
        return {
            key: {context: {d: _columns(found) for d, found in of.items()} for context, of in by_context.items()}
            for key, by_context in rows.items()
        }

    @cached_property
    def _slopes(self) -> dict[tuple[str, Alike], dict[str, float]]:
        """How a part's ratio to a plain token follows the state, by part and lookahead: over all drafts and contexts.

        So that a state which hardly occurred at one point is known from the others.
        """
        groups: dict[tuple[str, Alike], list[dict[str, Floats]]] = {}
        for (whose, _), by_context in self._times.items():
            for lookahead, found in ((d, one) for of in by_context.values() for d, one in of.items()):
                for part in _known_from(whose):
                    groups.setdefault((part, _alike(whose, lookahead)), []).append(found)
        return {key: _slope(found, key[0]) for key, found in groups.items()}


def _between(where: float, values: Mapping[int, float]) -> float:
    known = sorted(values)
    return float(np.interp(where, known, [values[one] for one in known]))


def _unknown(candidate: Candidate, batch: int) -> str:
    """Say what is missing, and how it is measured."""
    missing = f"at lookahead {candidate.lookahead}, batch {batch}"
    how = f"--draft {candidate.draft} --lookaheads {candidate.lookahead} --batches {batch}"
    if candidate.drafter == "model":
        return f"the profile has no times of {candidate.draft} {missing}; add some: profile {how}"
    return f"the profile has no times of {candidate.draft} ({candidate.drafter}) {missing}; run a study of it"


def _own(candidate: Candidate) -> Timed:
    """Whose times they are that belong to this way's proposer alone."""
    return candidate.drafter, candidate.digest, candidate.dtype, candidate.tree


def _counted_for(point: Point) -> list[Timed]:
    """All draft models are verified alike, so that their times count for all of them too."""
    own = _own(point.candidate)
    return [own, ALL_DRAFTS] if point.candidate.drafter == "model" else [own]


def _alike(whose: Timed, lookahead: int) -> Alike:
    """What follows the state of the machine as it does: of draft models those at its lookahead; of other drafters, for
    which there are fewer samples, all ways.
    """
    return whose[0], lookahead if whose[0] == "model" else 0


def _known_from(whose: Timed) -> tuple[str, ...]:
    """Parts of an iteration."""
    if whose[0] != "model":
        return PARTS
    return ("target_s",) if whose == ALL_DRAFTS else ("draft_s", "rest_s")


def _columns(rows: Sequence[Record]) -> dict[str, Floats]:
    return {name: np.array([row[name] for row in rows]) for name in (*NEAR, *PARTS)}


def _slope(groups: Sequence[dict[str, Floats]], part: str) -> dict[str, float]:
    """Change of the ratio's logarithm with the state's: ridge regression on differences to each group's median.

    What is far off the others counts less, and not at all where somebody disturbed it.
    """
    x = np.concatenate([np.stack([_centred(found[name]) for name in NEAR], 1) for found in groups])
    y = np.concatenate([_centred(found[part] / found["plain_s"]) for found in groups])
    sane = np.abs(y) < np.log(DISTURBED)
    x, y = x[sane], y[sane]
    weights = np.ones(len(y))
    for _ in range(ROBUST_STEPS):
        solved = np.linalg.solve((x.T * weights) @ x + RIDGE * np.eye(len(NEAR)), (x.T * weights) @ y)
        off = np.abs(y - x @ solved)
        weights = np.minimum(1.0, 1.5 * np.median(off) / np.maximum(off, 1e-12))
    return dict(zip(NEAR, solved.tolist(), strict=True))


def _centred(values: Floats) -> Floats:
    """Logarithms around their median; zeros, which are unknown, are in the middle."""
    known = values > 0
    logs = np.log(np.where(known, values, 1.0))
    return np.where(known, logs - np.median(logs[known]) if known.any() else 0.0, 0.0)


def _median(found: dict[str, Floats], part: str, state: MachineState | None, slopes: Mapping[str, float]) -> float:
    """Of the ratio to a plain token, of samples taken in about that state: as near as several of them are.

    In a state that was hardly met while profiling the nearest sample may be one that somebody disturbed.
    """
    ratios = found[part] / found["plain_s"]
    if state is None:
        return float(np.median(ratios))
    distances = np.zeros(len(ratios))
    for name, width in NEAR.items():
        here = getattr(state, name)
        known = (found[name] > 0) & (here > 0)
        away = np.where(known, np.log(np.where(known, found[name], 1.0) / (here or 1.0)), 0.0)
        distances += (away / width) ** 2
        ratios = ratios * np.exp(-slopes[name] * away)
    distances -= distances.min()
    weights = np.exp(-distances / 2)
    while weights.sum() ** 2 < min(SEVERAL, len(weights) / 2) * (weights**2).sum():  # Kish's effective number
        distances /= 2
        weights = np.exp(-distances / 2)
    order = np.argsort(ratios)
    return float(np.interp(0.5, (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum(), ratios[order]))


def points(candidates: Sequence[Candidate], contexts: Sequence[int], batches: Sequence[int]) -> list[Point]:
    return [Point(candidate, context, batch) for candidate, context, batch in product(candidates, contexts, batches)]


def about(target: Model) -> Record:
    """What a profile holds for: another target, machine or precision has other times."""
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    return {
        "target": target.name,
        "target_digest": target.digest,
        "shape": str(target.shape),
        "dtype": target.precision,
        "device": device_name(target.device),
        "threads": threads,
    }


def require_target(profile: Profile, name: str, digest: str | None) -> None:
    """Refuse a profile of another target."""
    timed = profile.about.get("target_digest")
    if timed and digest and timed != digest:
        raise RecordError(
            f"the profile has times of {profile.about['target']} (content {timed}), and {name} is another model "
            f"(content {digest}), or its weights were replaced since; profile it, or name the other"
        )


def require_machine(profile: Profile, device: torch.device) -> None:
    """Refuse a profile of another machine."""
    here, there = device_name(device), profile.about.get("device")
    if there != here:
        raise RecordError(f"the profile was measured on {there}, this is {here}; profile here")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def longest_context(target: int, draft: int, lookahead: int) -> int:
    """Behind so many tokens a whole proposal just fits into contexts so long."""
    return min(target, draft) - lookahead - 1


def fitting(wanted: Iterable[int], most: int) -> list[int]:
    """Contexts to time at, those beyond what there is room for cut to that."""
    return sorted({max(1, min(context, most)) for context in wanted})


def intend(target: Model, held: Mapping[ProposerKey, int], wanted: Sequence[Point], path: Path, rounds: int) -> Records:
    """Begin a profile, or go on with it: write down what is to be measured, unless the file says so already.

    `held` is the longest text that each proposer reads. Points at which one would propose nothing are refused.
    """
    _require_room(target, held, wanted)
    file = Records.open(path, KIND, about(target), Sample | Plan)
    known: dict[Point, int] = {}
    for plan in _plans(file):
        known |= {point: max(plan["rounds"], known.get(point, 0)) for point in map(_point, plan[PLANNED])}
    if any(known.get(point, 0) < rounds for point in wanted):
        planned = [_place(point) for point in wanted]
        file.append({PLANNED: planned, "rounds": rounds, "turns": TURNS, "command": command()})
    return file


def _require_room(target: Model, held: Mapping[ProposerKey, int], wanted: Sequence[Point]) -> None:
    """Refuse points at which a proposer has no room for a whole proposal, the longest first."""
    for point in sorted(wanted, key=lambda point: -point.candidate.lookahead):
        candidate, own = point.candidate, held[point.candidate.drafter, point.candidate.draft]
        most = longest_context(target.shape.context, own, candidate.lookahead)
        if point.context > most:
            who = target.name if target.shape.context <= own else candidate.draft
            fits = f"contexts up to {most:,}" if most > 0 else f"lookaheads up to {most + candidate.lookahead - 1:,}"
            raise OptionError(
                f"{who} has a context of {min(target.shape.context, own):,} tokens, no room for {candidate.lookahead} "
                f"draft tokens behind {point.context:,}; {fits} fit"
            )


def _plans(file: Records) -> list[Record]:
    return [row for row in file if PLANNED in row]


def _samples(file: Records) -> Iterator[tuple[str, Record]]:
    """Every sample, and where it stands: file and line."""
    return ((where, row) for where, row in file.placed() if PLANNED not in row)


def measure(
    target: Model, proposers: Mapping[ProposerKey, Options], wanted: Sequence[Point], path: Path, rounds: int
) -> Iterator[int]:
    """Write a profile, rounds over all points; yields how many points are done. What is there is not done again.

    Ways of a proposer take turns with each other and with plain decoding, in an order that is drawn anew each time.
    Nothing is written before their turns are over.
    """
    held = {whose: (options.get("draft") or target).shape.context for whose, options in proposers.items()}
    file = intend(target, held, wanted, path, rounds)
    done = {(_point(row), row["round"], row["turn"]) for _, row in _samples(file)}
    groups: dict[tuple[str, str, int, int], list[Point]] = {}
    for point in wanted:
        groups.setdefault((point.candidate.drafter, point.candidate.digest, point.context, point.batch), []).append(
            point
        )
    count = 0
    for number in range(rounds):
        for group in Random(number).sample([*groups.values()], len(groups)):
            left = [
                point
                for point in dict.fromkeys(group)
                if any((point, number, turn) not in done for turn in range(TURNS))
            ]
            if left:
                rows = [row | {"round": number} for row in _sample(target, proposers, left, number)]
                file.append(*(row for row in rows if (_point(row), number, row["turn"]) not in done))
            count += len(group)
            yield count


def _sample(
    target: Model, proposers: Mapping[ProposerKey, Options], group: Sequence[Point], number: int
) -> Iterator[Record]:
    """Mean seconds of some iterations of each point and of plain decoding beside it, by turn."""
    context, batch = group[0].context, group[0].batch
    candidates = [point.candidate.options(proposers) for point in group]
    draft = candidates[0].get("draft") or target
    draws = torch.Generator().manual_seed(context)
    prompts = torch.randint(min(target.shape.vocab, draft.shape.vocab), (batch, context), generator=draws).tolist()
    seed = f"{number} {group[0].candidate.drafter} {group[0].candidate.draft} {context} {batch}"
    samples = time_beside_plain(target, prompts, candidates, warm_up=WARM_UP, count=COUNT, turns=TURNS, seed=seed)
    for turn, found in enumerate(samples):
        for point, (plain, times, state) in zip(group, found, strict=True):
            yield (
                _place(point)
                | asdict(state)
                | {
                    "turn": turn,
                    "pass_s": plain.verify_s / COUNT,
                    "draft_s": times.draft_s / COUNT,
                    "target_s": times.verify_s / COUNT,
                    "rest_s": max(0.0, times.total_s - times.draft_s - times.verify_s) / COUNT,
                }
            )


def _place(point: Point) -> Record:
    return asdict(point.candidate) | {"context": point.context, "batch": point.batch}


def _point(row: Record) -> Point:
    return Point(Candidate.of(row), row["context"], row["batch"])


def read_profile(path: Path) -> Profile:
    file = Records.read(path, KIND, Sample | Plan)
    samples: dict[Point, list[Record]] = {}
    silent: dict[str, list[int]] = {}
    for where, row in _samples(file):
        point = _point(row)
        times = [row[part] for part in ("plain_s", *PARTS)]
        if min(times) < 0 or row["plain_s"] == 0 or row["target_s"] == 0:
            raise RecordError(f"{where}: {point} took {times} s; such times cannot be, measure it again")
        if point.candidate.drafter in OF_DRAFTS and row["draft_s"] == 0:
            silent.setdefault(point.candidate.draft, []).append(point.context)
        else:
            samples.setdefault(point, []).append(row)
    notes = [_unread(path, draft, contexts) for draft, contexts in silent.items()]
    if not samples:
        raise RecordError("; ".join([f"{path}: holds no measurement", *notes]))
    return Profile(file.about, samples, notes + _incomplete(file))


def _weights(candidate: Candidate) -> tuple[str, str]:
    """What a draft is made of; where it was replaced, what was left out of the old one's samples is not missing."""
    return candidate.digest, candidate.dtype


def _unread(path: Path, draft: str, contexts: Sequence[int]) -> str:
    """Earlier versions timed drafts where these were silent."""
    where = " ".join(map(str, sorted(set(contexts))))
    return (
        f"{path}: {len(contexts):,} samples at contexts {where} are left out: {draft} drafted nothing there, its own "
        f"being full; time it at shorter ones: profile --draft {draft} --contexts"
    )


def _incomplete(file: Records) -> list[str]:
    """A line if samples are missing that were to be taken: of the last command that left some out."""
    done = {(_point(row), row["round"], row["turn"]) for _, row in _samples(file)}
    plans = _plans(file)
    latest = {point.candidate.draft: point.candidate for plan in plans for point in map(_point, plan[PLANNED])}
    for plan in reversed(plans):
        places = dict.fromkeys(map(_point, plan[PLANNED]))
        current = [place for place in places if _weights(place.candidate) == _weights(latest[place.candidate.draft])]
        wanted = list(product(current, range(plan["rounds"]), range(plan["turns"])))
        missing = sum(one not in done for one in wanted)
        if missing:
            name, *arguments = plan["command"]
            again = shlex.join(["shallowdraft" if name == "__main__.py" else name, *arguments])
            return [
                f"{file.path} is incomplete: {missing:,} of {len(wanted):,} samples are missing, as the command that "
                f"takes them was interrupted; it goes on if it is run again: {again}"
            ]
    return []
