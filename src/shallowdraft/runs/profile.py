"""Profiles: seconds of iterations, by candidate, context and batch size, each sampled beside plain decoding.

A profile has two kinds of lines: samples, and plans that say which samples a command was to take, so that a reader
knows whether it was interrupted.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, NotRequired, TypedDict

import numpy as np

from shallowdraft.cost import Iteration
from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.errors import RecordError
from shallowdraft.files import Count, Range, Seconds, Size
from shallowdraft.limits import MOST_NODES
from shallowdraft.records import RANDOM, Record, Records, command
from shallowdraft.runs.candidate import Candidate, DrafterName
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.part_times import ALL_DRAFTS, PARTS, PartTimes, Point, TimesKey, interpolated, own_key

KIND = "profile"
EARLIER_NAMES = {"target_s": "verify_s", "rest_s": "other_s"}  # of fields, in early profiles
DRAFT_MODEL_DRAFTERS = ("model", "tree")  # drafters with a draft model
PLANNED = "planned"  # the field that only plans have
PartSeconds = Annotated[float, Range(-1e9, 1e9)]
"""Seconds of a part; a message of its own refuses those below 0."""


class PointFields(TypedDict):
    """The fields of a point in a plan."""

    draft: str
    lookahead: Annotated[int, Range(1, MOST_NODES)]
    context: Count
    batch: Size
    drafter: DrafterName
    tree: list[int]
    digest: str
    dtype: str


class SampleFields(TypedDict):
    """The fields of a sample: mean seconds of some iterations."""

    draft: str
    lookahead: Annotated[int, Range(1, MOST_NODES)]
    context: Count
    batch: Size
    drafter: NotRequired[DrafterName]
    tree: NotRequired[list[int]]
    digest: NotRequired[str]
    dtype: NotRequired[str]
    plain_s: PartSeconds
    """Seconds per token of plain decoding, before and after the sample."""
    handover_s: Seconds
    arithmetic_s: Seconds
    pass_s: NotRequired[Seconds]
    """Seconds of the target's pass over one token, without sampling and bookkeeping."""
    draft_s: PartSeconds
    verify_s: PartSeconds
    other_s: PartSeconds
    round: Count
    turn: Count


class PlanFields(TypedDict):
    """The fields of a plan."""

    planned: list[PointFields]
    rounds: Size
    turns: Size
    command: list[str]
    """The command line that takes the samples."""


def open_profile(path: Path, about: Record) -> Records:
    """Begin a profile, or go on with one that has the same description."""
    return Records.open(path, KIND, about, SampleFields | PlanFields, renamed=EARLIER_NAMES)


def plan(file: Records, points: Sequence[Point], rounds: int, turns: int) -> None:
    """Write down the samples to take, unless earlier plans of the file include them."""
    planned_rounds: dict[Point, int] = {}
    for earlier in _plans(file):
        for point in map(point_of, earlier[PLANNED]):
            planned_rounds[point] = max(earlier["rounds"], planned_rounds.get(point, 0))
    # A plan with more rounds includes one with fewer.
    if any(planned_rounds.get(point, 0) < rounds for point in points):
        fields = [point_fields(point) for point in points]
        file.append({PLANNED: fields, "rounds": rounds, "turns": turns, "command": command()})


def samples_taken(file: Records) -> set[tuple[Point, int, int]]:
    """Return the point, round and turn of every sample."""
    return {(point_of(row), row["round"], row["turn"]) for _, row in _samples(file)}


def point_fields(point: Point) -> Record:
    """Return a point as its fields in a line."""
    return asdict(point.candidate) | {"context": point.context, "batch": point.batch}


def point_of(row: Record) -> Point:
    """Read the point of a line."""
    return Point(Candidate.of(row), row["context"], row["batch"])


def _plans(file: Records) -> list[Record]:
    return [row for row in file if PLANNED in row]


def _samples(file: Records) -> Iterator[tuple[str, Record]]:
    """Yield every sample with its file and line."""
    return ((where, row) for where, row in file.placed() if PLANNED not in row)


def read_profile(path: Path) -> "Profile":
    """Read a profile; samples that cannot be used are left out, and its notes say so."""
    file = Records.read(path, KIND, SampleFields | PlanFields, renamed=EARLIER_NAMES)
    samples, notes = _usable_samples(file)
    if not samples:
        raise RecordError("; ".join([f"{path}: holds no measurement", *notes]))
    return Profile(file.about, samples, notes + _incomplete_notes(file))


def read_samples(path: Path) -> dict[Point, list[Record]]:
    """Read the usable samples of a profile that may have none yet."""
    samples, _ = _usable_samples(Records.read(path, KIND, SampleFields | PlanFields, renamed=EARLIER_NAMES))
    return samples


def _usable_samples(file: Records) -> tuple[dict[Point, list[Record]], list[str]]:
    """Return the samples by point, and notes on those that are left out."""
    samples: dict[Point, list[Record]] = {}
    silent: dict[str, list[int]] = {}  # contexts by draft
    for where, row in _samples(file):
        point = point_of(row)
        times = [row[part] for part in ("plain_s", *PARTS)]
        if min(times) < 0 or row["plain_s"] == 0 or row["verify_s"] == 0:
            raise RecordError(f"{where}: {point} took {times} s; such times cannot be, measure it again")
        # A draft model needs time. Where it took none it proposed nothing, so the sample is of a plain token.
        if point.candidate.drafter in DRAFT_MODEL_DRAFTERS and row["draft_s"] == 0:
            silent.setdefault(point.candidate.draft, []).append(point.context)
        else:
            samples.setdefault(point, []).append(row)
    return samples, [_silent_note(file.path, draft, contexts) for draft, contexts in silent.items()]


def _silent_note(path: Path, draft: str, contexts: Sequence[int]) -> str:
    """Return the note on samples that earlier versions took at contexts without room for a proposal."""
    where = " ".join(map(str, sorted(set(contexts))))
    return (
        f"{path}: {len(contexts):,} samples at contexts {where} are left out: {draft} drafted nothing there, as its "
        f"own context was full; time it at shorter ones: profile --drafts {draft} --contexts"
    )


def _incomplete_notes(file: Records) -> list[str]:
    """Return a note if a command that planned samples did not take all of them; the latest such command is named."""
    taken, plans = samples_taken(file), _plans(file)
    latest = {point.candidate.draft: point.candidate for row in plans for point in map(point_of, row[PLANNED])}

    def is_current(candidate: Candidate) -> bool:
        """Return whether the draft's weights are those planned last: samples of replaced ones are not missing."""
        newest = latest[candidate.draft]
        return (candidate.digest, candidate.dtype) == (newest.digest, newest.dtype)

    # The latest plan of current weights that lacks a sample is the command to run again.
    for row in reversed(plans):
        current = [point for point in dict.fromkeys(map(point_of, row[PLANNED])) if is_current(point.candidate)]
        planned = list(product(current, range(row["rounds"]), range(row["turns"])))
        missing = sum(sample not in taken for sample in planned)
        if missing:
            name, *arguments = row["command"]
            again = shlex.join(["shallowdraft" if name == "__main__.py" else name, *arguments])
            return [
                f"{file.path} is incomplete: {missing:,} of {len(planned):,} samples are missing, as the command that "
                f"takes them was interrupted; it goes on if it is run again: {again}"
            ]
    return []


@dataclass(frozen=True, repr=False)
class Profile(Tabular):
    """Times of a machine: samples by point, and medians of them."""

    about: Record
    """Target, shape, precision, device and threads."""
    samples: Mapping[Point, list[Record]] = field(repr=False)
    notes: list[str] = field(default_factory=list)
    """Messages for the user, about samples that are missing or were left out."""

    @property
    def drafts(self) -> list[str]:
        """Names of the draft models that can be loaded."""
        return [name for name in self._latest if not name.startswith(RANDOM)]

    @property
    def shapes(self) -> list[str]:
        """Shapes that were timed with random weights."""
        return [name.removeprefix(RANDOM) for name in self._latest if name.startswith(RANDOM)]

    @property
    def caption(self) -> str:
        about = self.about
        return f"times of {about.get('target')} ({about.get('dtype')}) on {about.get('device')}"

    @property
    def columns(self) -> tuple[str, ...]:
        return (
            "proposer",
            "drafter",
            "lookahead",
            "context",
            "batch",
            "plain ms",
            "draft",
            "verify",
            "other",
            "samples",
        )

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for point, samples in sorted(self.samples.items()):
            candidate = point.candidate
            plain_ms = 1e3 * median(sample["plain_s"] for sample in samples)
            ratios = (median(sample[part] / sample["plain_s"] for sample in samples) for part in PARTS)
            place = (candidate.draft, candidate.drafter, candidate.lookahead, point.context, point.batch)
            rows.append((*place, plain_ms, *ratios, len(samples)))
        return rows

    def to_json(self) -> Record:
        """Return the description and all samples."""
        return {"about": self.about, "samples": [row for rows in self.samples.values() for row in rows]}

    def require_target(self, name: str, digest: str | None) -> None:
        """Refuse a target that is not the one that was timed, as far as the digests are known."""
        timed = self.about.get("target_digest")
        if timed and digest and timed != digest:
            raise RecordError(
                f"the profile has times of {self.about['target']} (content {timed}), and {name} is another model "
                f"(content {digest}), or its weights were replaced since; profile it, or name the other"
            )

    @cached_property
    def _latest(self) -> dict[str, Candidate]:
        """The draft model that was timed last under each name, as its weights may have been replaced."""
        return {point.candidate.draft: point.candidate for point in self.samples if point.candidate.drafter == "model"}

    @cached_property
    def _times(self) -> PartTimes:
        return PartTimes(self.samples)

    def candidate(self, draft: str, lookahead: int) -> Candidate:
        """Return the candidate of the draft model that has this name in the profile."""
        return replace(self._latest.get(draft, Candidate(draft, lookahead)), lookahead=lookahead)

    def lookaheads(self, draft: str | None = None) -> list[int]:
        """Return the lookaheads at which a draft model, or any of them, was timed."""
        return self._times.lookaheads(self._key(draft))

    def lookaheads_at(self, draft: str | None, context: int, batch: int) -> list[int]:
        """Return the lookaheads that were timed at exactly this context and batch size."""
        return self._times.lookaheads_at(self._key(draft), context, batch)

    def _key(self, draft: str | None) -> TimesKey:
        return ALL_DRAFTS if draft is None else own_key(self.candidate(draft, 1))

    def _as_timed(self, candidate: Candidate) -> Candidate:
        """Return the candidate as this profile knows it: early profiles have names but no digests."""
        timed = self._latest.get(candidate.draft, candidate)
        by_name = timed.digest == candidate.draft and not timed.dtype  # without a digest the name stands for it
        return replace(candidate, digest="", dtype="") if by_name else candidate

    def covers(self, candidate: Candidate) -> bool:
        """Return whether the candidate, or the same proposer at a longer lookahead, was timed."""
        timed = self._times.lookaheads(own_key(self._as_timed(candidate)))
        # The same name with other content: no guess is made from the old weights' times.
        if not timed and candidate.draft in self._latest:
            timed_dtype = self._latest[candidate.draft].dtype
            raise RecordError(
                f"the profile has no times of this {candidate.draft} ({candidate.dtype}): its weights were replaced "
                f"since they were timed, or read as {timed_dtype}; profile it again into the same file"
            )
        if not timed:
            raise RecordError(f"the profile has no times of {candidate.draft}; measure it first")
        return candidate.lookahead <= max(timed)  # shorter ones lie between timed ones, or are taken as the shortest

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Return seconds per token of plain decoding."""
        if batch not in self._plain_s:
            raise RecordError(f"the profile has no times of batch {batch}; measure some with profile --batches {batch}")
        return interpolated(context, self._plain_s[batch])

    @cached_property
    def _plain_s(self) -> dict[int, dict[int, float]]:
        """Medians by batch size and context."""
        # Plain decoding was timed beside every candidate: all samples of a batch and context count.
        times: dict[int, dict[int, list[float]]] = {}
        for point, rows in self.samples.items():
            of_context = times.setdefault(point.batch, {}).setdefault(point.context, [])
            of_context.extend(row["plain_s"] for row in rows)
        return {
            batch: {context: median(seconds) for context, seconds in by_context.items()}
            for batch, by_context in times.items()
        }

    def iteration(
        self, draft: str, lookahead: int, context: float, batch: int = 1, state: MachineState | None = None
    ) -> Iteration:
        """Return seconds of an iteration with the draft model that has this name in the profile."""
        return self.iteration_of(self.candidate(draft, lookahead), context, batch, state)

    def iteration_of(
        self, candidate: Candidate, context: float, batch: int = 1, state: MachineState | None = None
    ) -> Iteration:
        """Return seconds of an iteration in a state of the machine, or as it was while profiling.

        Between the timed contexts and lookaheads they lie on straight lines.
        """
        own = own_key(self._as_timed(candidate))
        if not self._times.has(own, batch):
            raise RecordError(_no_times(candidate, batch))
        # A chain takes the same time to verify whichever draft wrote it; trees and skipped parts have their own passes.
        verification = ALL_DRAFTS if candidate.drafter == "model" else own
        keys = {"draft_s": own, "verify_s": verification, "other_s": own}
        nearest = self._times.nearest_state(state) if state else None
        ratios = [self._times.ratio(part, keys[part], candidate.lookahead, context, batch, nearest) for part in PARTS]
        plain_s = state.plain_s if state else self.plain_s(context, batch)
        return Iteration(*(ratio * plain_s for ratio in ratios))

    def verification_s(self, lookahead: int, context: float, batch: int = 1) -> float:
        """Return seconds in which the target verifies a chain of draft tokens: a pass over one token more."""
        return self._of_all_drafts("verify_s", lookahead, context, batch)

    def other_s(self, lookahead: int, context: float, batch: int = 1) -> float:
        """Return seconds of an iteration beside drafting and verification."""
        return self._of_all_drafts("other_s", lookahead, context, batch)

    def _of_all_drafts(self, part: str, lookahead: int, context: float, batch: int) -> float:
        if not self._times.has(ALL_DRAFTS, batch):
            raise RecordError(_no_times(Candidate("DRAFT", lookahead), batch))
        ratio = self._times.ratio(part, ALL_DRAFTS, lookahead, context, batch, None)
        return ratio * self.plain_s(context, batch)  # the ratio is kept, as it varies less than seconds do

    def pass_s(self, context: int, batch: int = 1) -> float:
        """Return seconds of the target's pass over one token."""
        seconds: list[float] = []
        for point, rows in self.samples.items():
            if (point.context, point.batch) == (context, batch):
                seconds += [row["pass_s"] for row in rows if "pass_s" in row]
        if not seconds:
            raise RecordError(f"the profile has no pass_s at context {context}, batch {batch}; measure it again")
        return float(median(seconds))

    def spread(self, draft: str) -> float:
        """Return how much an iteration of a draft varies, relative to its median.

        It is half the interquartile range of the ratio to a plain token, at the draft's median point.
        """

        def of_point(rows: Sequence[Record]) -> float:
            ratios = [_total_s(row) / row["plain_s"] for row in rows]
            # Quartiles rather than a standard deviation: a few disturbed samples do not widen them.
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            return float((high - low) / 2 / middle)

        return median(of_point(rows) for rows in self.of_draft(draft).values())

    def of_draft(self, draft: str) -> dict[Point, list[Record]]:
        """Return the samples of the draft model that has this name in the profile."""
        key = self._key(draft)
        return {point: rows for point, rows in self.samples.items() if own_key(point.candidate) == key}


def _total_s(row: Record) -> float:
    return float(sum(row[part] for part in PARTS))


def _no_times(candidate: Candidate, batch: int) -> str:
    """Return the message on missing times, and how they are measured."""
    missing = f"at lookahead {candidate.lookahead}, batch {batch}"
    how = f"--drafts {candidate.draft} --lookaheads {candidate.lookahead} --batches {batch}"
    if candidate.drafter == "model":
        return f"the profile has no times of {candidate.draft} {missing}; add some: profile {how}"
    return f"the profile has no times of {candidate.draft} ({candidate.drafter}) {missing}; run a study of it"
