"""The lookahead that a study recommends: the best one, and one for every batch size that its profile has timed."""

from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft import cost
from shallowdraft.cost import Iteration
from shallowdraft.errors import RecordError
from shallowdraft.identity import folder_digest
from shallowdraft.models.checkpoint import find_folder
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.replays import ReplayRecord, read_replays
from shallowdraft.runs.study import StudyRow, read_study
from shallowdraft.runs.trace import read_trace


@dataclass(frozen=True)
class Advice:
    """The lookahead to set, and the speed-up that a study predicted or measured with it."""

    lookahead: int
    by_batch: dict[int, int] = field(default_factory=dict)
    """Lookaheads by batch size, 0 if plain decoding is faster; empty if no batches were timed."""
    speed_up: float | None = None
    interval: tuple[float, float] | None = None
    """The 95 % interval of a speed-up that was measured live."""
    how: str = "chosen by hand"
    """The source of the speed-up, or of the lookahead if there is none."""
    notes: list[str] = field(default_factory=list)
    """Notes of the study's profile, on samples that it lacks."""


def advise(folder: Path, target: str, draft: str) -> Advice:
    """Return a study's advice on a draft of its target, both named as for `load`."""
    run = RunFolder(folder)
    if not run.study.is_file():
        raise RecordError(f"{folder}: holds no study.json; name the folder of a study that has ended")
    row = _study_row(run, draft)
    trace = read_trace(run.trace)
    if (trace.target_digest or trace.target) not in (folder_digest(find_folder(target)), target):
        raise RecordError(
            f"{folder}: this is a study of {trace.target}, not of {target}, or of other weights under that name; "
            "name its target, or another study"
        )
    replay, profile = _replay(run, row.candidate.draft), read_profile(run.profile)
    timed = sorted({point.batch for point in profile.of_draft(replay.draft)})
    by_batch = {1: row.candidate.lookahead if row.speed_up > 1 else 0} | {
        batch: _best_lookahead(profile, replay, trace.mean_context, batch) for batch in timed if batch > 1
    }
    return Advice(
        row.candidate.lookahead,
        by_batch if len(by_batch) > 1 else {},
        row.speed_up,
        row.live.interval if row.live else None,
        "measured live" if row.live else "predicted",
        profile.notes,
    )


def _study_row(run: RunFolder, draft: str) -> StudyRow:
    """Return the row of a draft in study.json, which is known by the content of its folder."""
    rows = [row for row in read_study(run.study).rows if row.candidate.drafter == "model"]
    digest = folder_digest(find_folder(draft))
    for row in rows:
        if row.candidate.digest in (digest, draft):
            return row
    names = [row.candidate.draft for row in rows]
    replaced = "; its weights were replaced since" if draft in names else ""
    raise RecordError(
        f"{run.path}: its study has no draft {draft} of this content{replaced}; there are "
        f"{', '.join(names) or 'none'}; run the study again with this draft too, it reuses the others"
    )


def _replay(run: RunFolder, draft: str) -> ReplayRecord:
    """Return the replay of a draft model."""
    replay = next((row for row in read_replays(run.replays) if (row.drafter, row.draft) == ("model", draft)), None)
    if replay is None or not replay.tar:
        raise RecordError(f"{run.replays}: has no TAR of {draft}; run the study again")
    return replay


def _best_lookahead(profile: Profile, replay: ReplayRecord, context: float, batch: int) -> int:
    """Return the fastest lookahead in batches of this size; 0 if plain decoding is faster."""
    draft, plain_s = replay.draft, profile.plain_s(context, batch)

    def iteration(lookahead: int) -> Iteration:
        silent = replay.silence[lookahead].iterations if lookahead in replay.silence else 0.0
        drafting = profile.iteration(draft, lookahead, context, batch)
        return cost.mean_iteration([drafting, Iteration(0.0, plain_s)], [1 - silent, silent])

    longest = max(point.candidate.lookahead for point in profile.of_draft(draft) if point.batch == batch)
    predictions = {
        d: cost.Prediction(d, tar, iteration(d), plain_s, silence=replay.silence.get(d))
        for d, tar in replay.tar.items()
        if d <= longest
    }
    if not predictions:
        raise RecordError(
            f"the profile times {draft} in batches of {batch} only up to lookahead {longest}, "
            "and the study has none so short; "
            f"add times: profile --drafts {draft} --lookaheads {min(replay.tar)} --batches {batch}"
        )
    best = cost.best(predictions)
    return best.lookahead if best.speed_up > 1 else 0
