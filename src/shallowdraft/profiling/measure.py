"""Measure a profile: iterations of every candidate, each sample between plain tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random

import torch

from shallowdraft.decoding.candidate import options_of
from shallowdraft.decoding.options import Options
from shallowdraft.decoding.timing import time_beside_plain
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.models.model import Model
from shallowdraft.records import Record, Records, processor
from shallowdraft.runs.candidate import Candidate, ProposerKey
from shallowdraft.runs.part_times import Point
from shallowdraft.runs.profile import Profile, open_profile, plan, point_fields, point_of, samples_taken

CONTEXTS = (64, 256)  # tokens before the first new one, as far as models have room
WARM_UP, COUNT, TURNS = 4, 12, 3  # iterations before a sample and in it, and samples per round


def all_points(candidates: Sequence[Candidate], contexts: Sequence[int], batches: Sequence[int]) -> list[Point]:
    """Return every combination of a candidate, a context and a batch size."""
    return [Point(candidate, context, batch) for candidate, context, batch in product(candidates, contexts, batches)]


def describe(target: Model) -> Record:
    """Return the description of a profile: the target, machine and precision that its times belong to."""
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    return {
        "target": target.name,
        "target_digest": target.digest,
        "shape": str(target.shape),
        "dtype": target.precision,
        "device": device_name(target.device),
        "threads": threads,
    }


def require_machine(profile: Profile, device: torch.device) -> None:
    """Refuse a profile of another machine."""
    here, profiled = device_name(device), profile.about.get("device")
    if profiled != here:
        raise RecordError(f"the profile was measured on {profiled}, this is {here}; profile here")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with its number of cores."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def longest_context(target: int, draft: int, lookahead: int) -> int:
    """Return the longest text behind which a whole proposal fits into both models' contexts."""
    return min(target, draft) - lookahead - 1


def fitting(contexts: Iterable[int], longest: int) -> list[int]:
    """Return the contexts, those beyond the longest cut to it, each once."""
    return sorted({max(1, min(context, longest)) for context in contexts})


def begin(
    target: Model, draft_contexts: Mapping[ProposerKey, int], points: Sequence[Point], path: Path, rounds: int
) -> Records:
    """Begin a profile or go on with it, and write down the samples to take.

    `draft_contexts` has the longest text that each proposer reads. Points at which a proposer would propose nothing are
    refused.
    """
    _require_room(target, draft_contexts, points)
    file = open_profile(path, describe(target))
    plan(file, points, rounds, TURNS)
    return file


def _require_room(target: Model, draft_contexts: Mapping[ProposerKey, int], points: Sequence[Point]) -> None:
    """Refuse points at which a proposer has no room for a whole proposal, the longest lookahead first."""
    for point in sorted(points, key=lambda point: -point.candidate.lookahead):
        candidate, draft_context = point.candidate, draft_contexts[point.candidate.proposer]
        longest = longest_context(target.shape.context, draft_context, candidate.lookahead)
        if point.context > longest:
            who = target.name if target.shape.context <= draft_context else candidate.draft
            if longest > 0:
                fits = f"contexts up to {longest:,}"
            else:
                fits = f"lookaheads up to {longest + candidate.lookahead - 1:,}"
            raise OptionError(
                f"{who} has a context of {min(target.shape.context, draft_context):,} tokens, no room for "
                f"{candidate.lookahead} draft tokens behind {point.context:,}; {fits} fit"
            )


def measure(
    target: Model, proposers: Mapping[ProposerKey, Options], points: Sequence[Point], path: Path, rounds: int
) -> Iterator[int]:
    """Write samples of all points, round by round, and yield how many points are done.

    Samples that the file has already are not taken again. The candidates of a proposer take turns with each other and
    with plain decoding, in an order that is drawn for each round. Nothing is written before their turns are over, as
    writing would disturb them.
    """
    draft_contexts = {key: (options.get("draft") or target).shape.context for key, options in proposers.items()}
    file = begin(target, draft_contexts, points, path, rounds)
    taken = samples_taken(file)
    # Candidates of a group share prompts, so that they can take turns.
    groups: dict[tuple[str, str, int, int], list[Point]] = {}
    for point in points:
        key = point.candidate.drafter, point.candidate.digest, point.context, point.batch
        groups.setdefault(key, []).append(point)

    def is_missing(point: Point, number: int) -> bool:
        return any((point, number, turn) not in taken for turn in range(TURNS))

    points_done = 0
    for number in range(rounds):
        for group in Random(number).sample([*groups.values()], len(groups)):
            missing = [point for point in dict.fromkeys(group) if is_missing(point, number)]
            if missing:
                rows = [row | {"round": number} for row in _samples(target, proposers, missing, number)]
                file.append(*(row for row in rows if (point_of(row), number, row["turn"]) not in taken))
            points_done += len(group)
            yield points_done


def _samples(
    target: Model, proposers: Mapping[ProposerKey, Options], group: Sequence[Point], number: int
) -> Iterator[Record]:
    """Yield a sample of every point in every turn: mean seconds of COUNT iterations, and of plain decoding beside."""
    context, batch, first = group[0].context, group[0].batch, group[0].candidate
    options = [options_of(point.candidate, proposers) for point in group]
    draft = options[0].get("draft") or target
    # The text does not matter for times, so it is random, within both vocabularies.
    random = torch.Generator().manual_seed(context)
    prompts = torch.randint(min(target.shape.vocab, draft.shape.vocab), (batch, context), generator=random).tolist()
    seed = f"{number} {first.drafter} {first.draft} {context} {batch}"
    turns = time_beside_plain(target, prompts, options, warm_up=WARM_UP, count=COUNT, turns=TURNS, seed=seed)
    for turn, timings in enumerate(turns):
        for point, (plain, times, state) in zip(group, timings, strict=True):
            yield (
                point_fields(point)
                | asdict(state)
                | {
                    "turn": turn,
                    "pass_s": plain.verify_s / COUNT,
                    "draft_s": times.draft_s / COUNT,
                    "verify_s": times.verify_s / COUNT,
                    "other_s": max(0.0, times.total_s - times.draft_s - times.verify_s) / COUNT,
                }
            )
