"""Profiles: seconds of iterations at every draft, lookahead, context and batch, each measured beside plain decoding.

Machines are shared and drift. So every sample is a pair, some iterations of speculation right after some of plain
decoding, and what is kept is how they relate: medians are taken of ratios to the plain token next to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

from shallowdraft.cost import Iteration
from shallowdraft.decoding.generation import Options, time_iterations
from shallowdraft.errors import RecordError
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records, processor

KIND = "profile"
WARM_UP, COUNT = 4, 24  # iterations before a sample, and of it


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
    """Write a profile, rounds over all points; yields how many samples are there. What is there is not done again."""
    file = Records.open(path, KIND, about(target))
    done = {(Point(*(row[name] for name in asdict(wanted[0]))), row["round"]) for row in file} if wanted else set()
    left = [(point, number) for number in range(rounds) for point in wanted if (point, number) not in done]
    total = rounds * len(wanted)
    yield total - len(left)
    if left:
        sample(target, drafts, left[0][0])  # warms up
    for count, (point, number) in enumerate(left, 1):
        file.append(asdict(point) | {"round": number} | sample(target, drafts, point))
        yield total - len(left) + count


def sample(target: Model, drafts: Mapping[str, Model], point: Point) -> Record:
    """Mean seconds of some iterations: plain decoding's, then the draft's."""
    draws = torch.Generator().manual_seed(point.context)
    vocab = min(target.shape.vocab, *(draft.shape.vocab for draft in drafts.values()))
    prompts = torch.randint(vocab, (point.batch, point.context), generator=draws).tolist()
    ways: tuple[Options, Options] = ({}, {"draft": drafts[point.draft], "lookahead": point.lookahead})
    plain, speculative = (time_iterations(target, prompts, WARM_UP, COUNT, **way) for way in ways)
    rest_s = max(0.0, speculative.total_s - speculative.draft_s - speculative.verify_s)
    return {
        "plain_s": plain.total_s / COUNT,
        "draft_s": speculative.draft_s / COUNT,
        "target_s": speculative.verify_s / COUNT,
        "rest_s": rest_s / COUNT,
    }


def read_profile(path: Path) -> Profile:
    file = Records.read(path, KIND)
    samples: dict[Point, list[Record]] = {}
    for row in file:
        point = Point(row["draft"], row["lookahead"], row["context"], row["batch"])
        times = [row[part] for part in ("plain_s", *_PARTS)]
        if not all(np.isfinite(times)) or min(times) < 0 or row["plain_s"] == 0 or row["target_s"] == 0:
            raise RecordError(f"{path}: {point} took {times} s; such times cannot be, measure it again")
        samples.setdefault(point, []).append(row)
    if not samples:
        raise RecordError(f"{path}: holds no measurement")
    return Profile(file.about, samples)
