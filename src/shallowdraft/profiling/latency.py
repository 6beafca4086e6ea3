"""Profiles: seconds of iterations at every draft, lookahead, context and batch, each measured beside plain decoding.

Machines are shared and drift. So a few iterations of every lookahead take turns with a few of plain decoding, and what
counts is how they relate: medians are taken of ratios to the plain token next to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

from shallowdraft.cost import Iteration
from shallowdraft.decoding.generation import Options, time_in_turns
from shallowdraft.errors import RecordError
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records, processor

KIND = "profile"
WARM_UP, COUNT, TURNS = 8, 16, 3  # iterations before a sample and of it, and samples in a round


@dataclass(frozen=True, order=True)
class Point:
    """What is timed."""

    draft: str
    lookahead: int
    context: int
    batch: int


@dataclass(frozen=True)
class Profile:
    """Samples by point, and medians of them."""

    about: Record
    samples: Mapping[Point, list[Record]]

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys(point.draft for point in self.samples))

    def lookaheads(self, draft: str) -> list[int]:
        return sorted({point.lookahead for point in self.samples if point.draft == draft})

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds a token of plain decoding."""
        by_context: dict[int, list[float]] = {}
        for point, found in self.samples.items():
            if point.batch == batch:
                by_context.setdefault(point.context, []).extend(sample["plain_s"] for sample in found)
        return self._at(context, {one: median(times) for one, times in by_context.items()})

    def iteration(self, draft: str, lookahead: int, context: float, batch: int = 1) -> Iteration:
        """Seconds of an iteration, between the measured contexts and lookaheads on a straight line."""
        plain_s = self.plain_s(context, batch)
        parts = [self._ratio(part, draft, lookahead, context, batch) * plain_s for part in _PARTS]
        return Iteration(*parts)

    def iterations(self, draft: str, context: float, batch: int = 1) -> dict[int, Iteration]:
        """At every lookahead up to the longest that was measured."""
        longest = max(self.lookaheads(draft))
        return {d: self.iteration(draft, d, context, batch) for d in range(1, longest + 1)}

    def spread(self, draft: str, lookahead: int, context: int, batch: int = 1) -> float:
        """Half the distance of the quartiles of an iteration's length, relative to it."""
        found = self.samples[Point(draft, lookahead, context, batch)]
        ratios = [sum(sample[part] for part in _PARTS) / sample["plain_s"] for sample in found]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        return float((high - low) / 2 / middle)

    def _ratio(self, part: str, draft: str, lookahead: int, context: float, batch: int) -> float:
        by_context: dict[int, dict[int, float]] = {}
        for point, found in self.samples.items():
            if (point.draft, point.batch) == (draft, batch):
                ratio = median(sample[part] / sample["plain_s"] for sample in found)
                by_context.setdefault(point.context, {})[point.lookahead] = ratio
        return self._at(context, {one: self._at(lookahead, ratios) for one, ratios in by_context.items()})

    def _at(self, where: float, values: Mapping[int, float]) -> float:
        if not values:
            raise RecordError("the profile has no such measurement; measure that draft and batch size first")
        known = sorted(values)
        return float(np.interp(where, known, [values[one] for one in known]))


_PARTS = ("draft_s", "target_s", "rest_s")


def points(
    drafts: Sequence[str], lookaheads: Sequence[int], contexts: Sequence[int], batches: Sequence[int]
) -> list[Point]:
    return [Point(*one) for one in product(drafts, lookaheads, contexts, batches)]


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
    here = device_name(device)
    if profile.about["device"] != here:
        raise RecordError(f"the profile was measured on {profile.about['device']}, this is {here}; profile here")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def measure(
    target: Model, drafts: Mapping[str, Model], wanted: Sequence[Point], path: Path, rounds: int
) -> Iterator[int]:
    """Write a profile, rounds over all points; yields how many points are done. What is there is not done again.

    Lookaheads of a draft take turns with each other and with plain decoding.
    """
    file = Records.open(path, KIND, about(target))
    done = {(_point(row), row["round"], row["turn"]) for row in file}
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in wanted:
        groups.setdefault((point.draft, point.context, point.batch), []).append(point)
    count = 0
    for number in range(rounds):
        for group in groups.values():
            left = [point for point in group if any((point, number, turn) not in done for turn in range(TURNS))]
            for row in _sample(target, drafts, left) if left else ():
                if (_point(row), number, row["turn"]) not in done:
                    file.append(row | {"round": number})
            count += len(group)
            yield count


def _sample(target: Model, drafts: Mapping[str, Model], group: Sequence[Point]) -> Iterator[Record]:
    """Mean seconds of some iterations of each point, and of plain decoding next to it, by turn."""
    context, batch = group[0].context, group[0].batch
    draft = drafts[group[0].draft]
    draws = torch.Generator().manual_seed(context)
    prompts = torch.randint(min(target.shape.vocab, draft.shape.vocab), (batch, context), generator=draws).tolist()
    ways = [Options(), *(Options(draft=draft, lookahead=point.lookahead) for point in group)]
    for turn, (plain, *others) in enumerate(
        time_in_turns(target, prompts, ways, warm_up=WARM_UP, count=COUNT, turns=TURNS)
    ):
        for point, times in zip(group, others, strict=True):
            yield asdict(point) | {
                "turn": turn,
                "plain_s": plain.total_s / COUNT,
                "draft_s": times.draft_s / COUNT,
                "target_s": times.verify_s / COUNT,
                "rest_s": max(0.0, times.total_s - times.draft_s - times.verify_s) / COUNT,
            }


def _point(row: Record) -> Point:
    return Point(row["draft"], row["lookahead"], row["context"], row["batch"])


def read_profile(path: Path) -> Profile:
    file = Records.read(path, KIND)
    samples: dict[Point, list[Record]] = {}
    for row in file:
        point = _point(row)
        times = [row[part] for part in ("plain_s", *_PARTS)]
        if not all(np.isfinite(times)) or min(times) < 0 or row["plain_s"] == 0 or row["target_s"] == 0:
            raise RecordError(f"{path}: {point} took {times} s; such times cannot be, measure it again")
        samples.setdefault(point, []).append(row)
    if not samples:
        raise RecordError(f"{path}: holds no measurement")
    return Profile(file.about, samples)
