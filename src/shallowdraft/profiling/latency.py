"""Profiles: seconds of iterations in every way, at every context and batch, each measured beside plain decoding.

Machines are shared and change under us: the cores of a virtual machine move, neighbours come and go, and plain decoding
and verification do not suffer alike. So iterations stand between plain tokens. Their time, and those of handing a cache
line from core to core and of some arithmetic, tell in which state the machine was: what is asked for in a state comes
from samples in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch

from shallowdraft.cost import Iteration
from shallowdraft.decoding.generation import DrafterName, Options
from shallowdraft.decoding.timing import MachineState, time_beside_plain
from shallowdraft.decoding.ways import Way, Whose
from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Range, Seconds, Size
from shallowdraft.models.model import Model
from shallowdraft.models.tree import MOST_NODES
from shallowdraft.records import Record, Records, processor

KIND = "profile"
PARTS = ("draft_s", "target_s", "rest_s")
ANY = ""  # stands for all draft models

Floats = np.ndarray[Any, np.dtype[np.float64]]

WARM_UP, COUNT, TURNS = 4, 12, 3  # iterations before a sample and of it, and samples in a round
RIDGE, ROBUST_STEPS = 0.01, 5
DISTURBED = 3.0  # times as long, over a plain token, as usual: no state of the machine does that
SEVERAL = 5  # samples that a median must rest on
SHORTEST = 1e-12  # seconds that a pass may take
NEAR = {"plain_s": 0.04, "handover_s": 0.4, "arithmetic_s": 0.08}  # what differs by that much is another state


@dataclass(frozen=True, order=True)
class Point:
    """What is timed."""

    draft: str
    lookahead: int
    context: int
    batch: int
    drafter: DrafterName = "model"
    tree: tuple[int, ...] = ()

    @property
    def way(self) -> Way:
        return Way(self.draft, self.lookahead, self.drafter, self.tree)


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
    plain_s: PartSeconds
    handover_s: Seconds
    arithmetic_s: Seconds
    pass_s: NotRequired[Seconds]
    draft_s: PartSeconds
    target_s: PartSeconds
    rest_s: PartSeconds


class Numbered(Sample):
    """What it must have for more to be added."""

    round: Count
    turn: Count


Timed = tuple[DrafterName, str, tuple[int, ...]]
"""Whose times: a drafter, which one (or ANY), and its tree."""
Alike = tuple[DrafterName, int]
ALL_DRAFTS: Timed = ("model", ANY, ())


@dataclass(frozen=True)
class Profile:
    """Samples by point, and medians of them."""

    about: Record
    samples: Mapping[Point, list[Record]]

    @property
    def drafts(self) -> list[str]:
        """Draft models."""
        return list(dict.fromkeys(point.draft for point in self.samples if point.drafter == "model"))

    def lookaheads(self, draft: str) -> list[int]:
        return self._lookaheads(("model", draft, ()))

    def _lookaheads(self, whose: Timed) -> list[int]:
        return sorted({point.lookahead for point in self.samples if whose in _counted_for(point)})

    def lookaheads_in(self, draft: str, context: int, batch: int) -> list[int]:
        """Those at which a draft, or ANY, was timed at this very context and batch size."""
        by_context = self._times.get((("model", draft, ()), batch), {})
        return sorted(by_context.get(context, {}))

    def covers(self, way: Way) -> bool:
        """Whether it was timed, or one that proposes more."""
        timed = self._lookaheads((way.drafter, way.draft, way.tree))
        if not timed:
            raise RecordError(f"the profile has no times of {way.draft}; measure it first")
        return way.lookahead <= max(timed)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds a token of plain decoding."""
        by_context: dict[int, list[float]] = {}
        for point, found in self.samples.items():
            if point.batch == batch:
                by_context.setdefault(point.context, []).extend(sample["plain_s"] for sample in found)
        if not by_context:
            raise RecordError(f"the profile has no times of batch {batch}; measure some with profile --batches {batch}")
        return _between(context, {one: median(times) for one, times in by_context.items()})

    def iteration(
        self, draft: str, lookahead: int, context: float, batch: int = 1, state: MachineState | None = None
    ) -> Iteration:
        """Seconds of an iteration with a draft model."""
        return self.iteration_of(Way(draft, lookahead), context, batch, state)

    def iteration_of(self, way: Way, context: float, batch: int = 1, state: MachineState | None = None) -> Iteration:
        """Seconds of an iteration, between the measured contexts and lookaheads on a straight line.

        On the machine as it is then and there; without a state, as it was while profiling.
        """
        lookahead, own = way.lookahead, (way.drafter, way.draft, way.tree)
        verified: Timed = ALL_DRAFTS if way.drafter == "model" else own
        whose: dict[str, Timed] = {"draft_s": own, "target_s": verified, "rest_s": own}
        met = state and self._nearest_met(state)
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

        return median(
            of_point(found) for point, found in self.samples.items() if point.way == Way(draft, point.lookahead)
        )

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
            raise RecordError(_unknown(whose, lookahead, batch))
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
                by_context.setdefault(point.context, {}).setdefault(point.lookahead, []).extend(found)
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


def _unknown(whose: Timed, lookahead: int, batch: int) -> str:
    """What is missing, and how it is measured."""
    drafter, draft, _ = whose
    named = draft or "any draft"
    how = f"--draft {draft or 'DRAFT'} --lookaheads {lookahead} --batches {batch}"
    if drafter == "model":
        return f"the profile has no times of {named} at lookahead {lookahead}, batch {batch}; add some: profile {how}"
    return f"the profile has no times of {named} ({drafter}) at lookahead {lookahead}, batch {batch}; run a study of it"


def _counted_for(point: Point) -> list[Timed]:
    """All draft models are verified alike, so that their times count for all of them too."""
    own: Timed = (point.drafter, point.draft, point.tree)
    return [own, ALL_DRAFTS] if point.drafter == "model" else [own]


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


def points(ways: Sequence[Way], contexts: Sequence[int], batches: Sequence[int]) -> list[Point]:
    return [
        Point(way.draft, way.lookahead, context, batch, way.drafter, way.tree)
        for way, context, batch in product(ways, contexts, batches)
    ]


def about(target: Model) -> Record:
    """What a profile holds for: another target, machine or precision has other times."""
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    return {
        "target": target.name,
        "shape": str(target.shape),
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "device": device_name(target.device),
        "threads": threads,
    }


def require_machine(profile: Profile, device: torch.device) -> None:
    """Refuse a profile of another machine."""
    here, there = device_name(device), profile.about.get("device")
    if there != here:
        raise RecordError(f"the profile was measured on {there}, this is {here}; profile here")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def measure(
    target: Model, proposers: Mapping[Whose, Options], wanted: Sequence[Point], path: Path, rounds: int
) -> Iterator[int]:
    """Write a profile, rounds over all points; yields how many points are done. What is there is not done again.

    Ways of a proposer take turns with each other and with plain decoding.
    """
    file = Records.open(path, KIND, about(target), Numbered)
    done = {(_point(row), row["round"], row["turn"]) for row in file}
    groups: dict[tuple[str, str, int, int], list[Point]] = {}
    for point in wanted:
        groups.setdefault((point.drafter, point.draft, point.context, point.batch), []).append(point)
    count = 0
    for number in range(rounds):
        for group in groups.values():
            left = [point for point in group if any((point, number, turn) not in done for turn in range(TURNS))]
            for row in _sample(target, proposers, left) if left else ():
                if (_point(row), number, row["turn"]) not in done:
                    file.append(row | {"round": number})
            count += len(group)
            yield count


def _sample(target: Model, proposers: Mapping[Whose, Options], group: Sequence[Point]) -> Iterator[Record]:
    """Mean seconds of some iterations of each point and of plain decoding beside it, by turn."""
    context, batch = group[0].context, group[0].batch
    ways = [point.way.options(proposers) for point in group]
    draft = ways[0].get("draft") or target
    draws = torch.Generator().manual_seed(context)
    prompts = torch.randint(min(target.shape.vocab, draft.shape.vocab), (batch, context), generator=draws).tolist()
    samples = time_beside_plain(target, prompts, ways, warm_up=WARM_UP, count=COUNT, turns=TURNS)
    for turn, found in enumerate(samples):
        for point, (plain, times, state) in zip(group, found, strict=True):
            yield (
                asdict(point)
                | asdict(state)
                | {
                    "turn": turn,
                    "pass_s": plain.verify_s / COUNT,
                    "draft_s": times.draft_s / COUNT,
                    "target_s": times.verify_s / COUNT,
                    "rest_s": max(0.0, times.total_s - times.draft_s - times.verify_s) / COUNT,
                }
            )


def _point(row: Record) -> Point:
    (point,) = points([Way.of(row)], [row["context"]], [row["batch"]])
    return point


def read_profile(path: Path) -> Profile:
    file = Records.read(path, KIND, Sample)
    samples: dict[Point, list[Record]] = {}
    for where, row in file.placed():
        point = _point(row)
        times = [row[part] for part in ("plain_s", *PARTS)]
        if not all(np.isfinite(times)) or min(times) < 0 or min(row["plain_s"], row["target_s"]) < SHORTEST:
            raise RecordError(f"{where}: {point} took {times} s; such times cannot be, measure it again")
        samples.setdefault(point, []).append(row)
    if not samples:
        raise RecordError(f"{path}: holds no measurement")
    return Profile(file.about, samples)
