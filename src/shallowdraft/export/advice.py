"""The lookahead that a study recommends: the best one, and one for every batch size that its profile has timed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from shallowdraft import cost
from shallowdraft.cost import Iteration, Silence
from shallowdraft.decoding.options import MAX_LOOKAHEAD
from shallowdraft.errors import RecordError
from shallowdraft.files import Range, from_record, require_fields
from shallowdraft.identity import folder_digest
from shallowdraft.models.checkpoint import find_folder, read_json
from shallowdraft.profiling.latency import Profile, read_profile
from shallowdraft.records import Record, Records
from shallowdraft.replay.trace import read_trace
from shallowdraft.study.study import REPLAYS


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


class _LiveSpeedUp(TypedDict):
    """A speed-up that was measured live."""

    speed_up: float
    interval: tuple[float, float]


class _StudyRow(TypedDict):
    """The fields of a row of a study that are read here."""

    drafter: str
    draft: str
    lookahead: Annotated[int, Range(1, MAX_LOOKAHEAD)]
    predicted_speed_up: float
    live: _LiveSpeedUp | None


class _StudyResult(TypedDict):
    """The fields of study.json that are read here."""

    rows: list[_StudyRow]


class _ReplayFields(TypedDict):
    """The fields of a replay that are read here."""

    drafter: str
    draft: str
    tar: dict[int, float]
    silence: NotRequired[dict[int, Silence]]


def advise(folder: Path, target: str, draft: str) -> Advice:
    """Return a study's advice on a draft of its target, both named as for `load`."""
    if not (folder / "study.json").is_file():
        raise RecordError(f"{folder}: holds no study.json; name the folder of a study that has ended")
    try:
        return _advise(folder, target, draft)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: its records lack {error}; run the study again, it reuses the others") from None


def _advise(folder: Path, target: str, draft: str) -> Advice:
    row = _study_row(folder, draft)
    draft, trace = row["draft"], read_trace(folder / "trace.jsonl")
    if (trace.target_digest or trace.target) not in (folder_digest(find_folder(target)), target):
        raise RecordError(
            f"{folder}: this is a study of {trace.target}, not of {target}, or of other weights under that name; "
            "name its target, or another study"
        )
    tars, silence = _replayed(folder / "replays.jsonl", draft)
    profile = read_profile(folder / "profile.jsonl")
    timed = sorted({point.batch for point in profile.of_draft(draft)})
    live = row["live"]
    speed_up = live["speed_up"] if live else row["predicted_speed_up"]
    by_batch = {1: row["lookahead"] if speed_up > 1 else 0} | {
        batch: _best_lookahead(profile, draft, tars, silence, trace.mean_context, batch) for batch in timed if batch > 1
    }
    return Advice(
        row["lookahead"],
        by_batch if len(by_batch) > 1 else {},
        speed_up,
        tuple(live["interval"]) if live else None,
        "measured live" if live else "predicted",
        profile.notes,
    )


def _study_row(folder: Path, draft: str) -> Record:
    """Return the row of a draft in study.json, which is known by the content of its folder."""
    file = folder / "study.json"
    study = read_json(file)
    require_fields(study, _StudyResult, str(file), RecordError)
    rows: list[Record] = [row for row in study["rows"] if row["drafter"] == "model"]
    digest = folder_digest(find_folder(draft))
    for row in rows:
        if row.get("digest", row["draft"]) in (digest, draft):
            return row
    names = [row["draft"] for row in rows]
    replaced = "; its weights were replaced since" if draft in names else ""
    raise RecordError(
        f"{folder}: its study has no draft {draft} of this content{replaced}; there are "
        f"{', '.join(names) or 'none'}; run the study again with this draft too, it reuses the others"
    )


def _replayed(file: Path, draft: str) -> tuple[dict[int, float], dict[int, Silence]]:
    """Return a draft's TAR and silence by lookahead."""
    records = Records.read(file, REPLAYS, _ReplayFields).latest("drafter", "draft").values()
    record = next((row for row in records if (row["drafter"], row["draft"]) == ("model", draft)), None)
    if not record or not record["tar"]:
        raise RecordError(f"{file}: has no TAR of {draft}; run the study again")
    silence = {d: from_record(Silence, row, str(file), RecordError) for d, row in record.get("silence", {}).items()}
    return {int(d): tar for d, tar in record["tar"].items()}, {int(d): value for d, value in silence.items()}


def _best_lookahead(
    profile: Profile, draft: str, tars: dict[int, float], silence: dict[int, Silence], context: float, batch: int
) -> int:
    """Return the fastest lookahead in batches of this size; 0 if plain decoding is faster."""
    plain_s = profile.plain_s(context, batch)

    def iteration(lookahead: int) -> Iteration:
        silent = silence[lookahead].iterations if lookahead in silence else 0.0
        drafting = profile.iteration(draft, lookahead, context, batch)
        return cost.mean_iteration([drafting, Iteration(0.0, plain_s)], [1 - silent, silent])

    longest = max(point.candidate.lookahead for point in profile.of_draft(draft) if point.batch == batch)
    predictions = {
        d: cost.Prediction(d, tar, iteration(d), plain_s, silence=silence.get(d))
        for d, tar in tars.items()
        if d <= longest
    }
    if not predictions:
        raise RecordError(
            f"the profile times {draft} in batches of {batch} only up to lookahead {longest}, "
            "and the study has none so short; "
            f"add times: profile --draft {draft} --lookaheads {min(tars)} --batches {batch}"
        )
    best = cost.best(predictions)
    return best.lookahead if best.speed_up > 1 else 0
