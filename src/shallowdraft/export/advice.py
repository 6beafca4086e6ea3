"""How far a study says to look ahead: at its best, and by batch size where its profile has times of batches."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from shallowdraft import cost
from shallowdraft.cost import Iteration, Silence
from shallowdraft.decoding.generation import MAX_LOOKAHEAD
from shallowdraft.errors import RecordError
from shallowdraft.files import Range, from_record, require_fields
from shallowdraft.identity import folder_digest
from shallowdraft.models.checkpoint import find_folder, read_json
from shallowdraft.profiling.latency import Profile, read_profile
from shallowdraft.records import Records
from shallowdraft.replay.traces import read_trace
from shallowdraft.study.study import REPLAYS


@dataclass(frozen=True)
class Advice:
    """What to set, and what a study knows about it."""

    lookahead: int
    by_batch: dict[int, int] = field(default_factory=dict)
    """Lookaheads by batch size, 0 where plain decoding is faster; empty where no batches were timed."""
    speed_up: float | None = None
    interval: tuple[float, float] | None = None
    """Of a speed-up that was measured live: 95 %."""
    how: str = "chosen by hand"
    """Where the speed-up comes from."""
    notes: list[str] = field(default_factory=list)
    """What is missing of the study's profile."""


class _Live(TypedDict):
    speed_up: float
    interval: tuple[float, float]


class _Row(TypedDict):
    """What a row of a study must have."""

    drafter: str
    draft: str
    lookahead: Annotated[int, Range(1, MAX_LOOKAHEAD)]
    predicted_speed_up: float
    live: _Live | None


class _Study(TypedDict):
    rows: list[_Row]


class _Replay(TypedDict):
    """What a replay must have."""

    drafter: str
    draft: str
    tar: dict[int, float]
    silence: NotRequired[dict[int, Silence]]


def advise(folder: Path, target: str, draft: str) -> Advice:
    """Say what a study's records know about a draft of its target, both named as `load` takes them."""
    if not (folder / "study.json").is_file():
        raise RecordError(f"{folder}: holds no study.json; name the folder of a study that has ended")
    try:
        return _advise(folder, target, draft)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: its records lack {error}; run the study again, it reuses the others") from None


def _advise(folder: Path, target: str, draft: str) -> Advice:
    study = read_json(folder / "study.json")
    require_fields(study, _Study, str(folder / "study.json"), RecordError)
    rows = [row for row in study["rows"] if row["drafter"] == "model"]
    digest = folder_digest(find_folder(draft))
    row = next((row for row in rows if row.get("digest", row["draft"]) in (digest, draft)), None)
    if row is None:
        names = [row["draft"] for row in rows]
        replaced = "; its weights were replaced since" if draft in names else ""
        raise RecordError(
            f"{folder}: its study has no draft {draft} of this content{replaced}; there are "
            f"{', '.join(names) or 'none'}; run the study again with this draft too, it reuses the others"
        )
    draft, trace = row["draft"], read_trace(folder / "trace.jsonl")
    if (trace.target_digest or trace.target) not in (folder_digest(find_folder(target)), target):
        raise RecordError(
            f"{folder}: this is a study of {trace.target}, not of {target}, or of other weights under that name; "
            "name its target, or another study"
        )
    kept = Records.read(folder / "replays.jsonl", REPLAYS, _Replay).latest("drafter", "draft").values()
    replayed = next((one for one in kept if (one["drafter"], one["draft"]) == ("model", draft)), None)
    if not replayed or not replayed["tar"]:
        raise RecordError(f"{folder / 'replays.jsonl'}: has no TAR of {draft}; run the study again")
    tars = {int(size): tar for size, tar in replayed["tar"].items()}
    where = str(folder / "replays.jsonl")
    silence = {
        int(size): from_record(Silence, one, where, RecordError) for size, one in replayed.get("silence", {}).items()
    }
    profile = read_profile(folder / "profile.jsonl")
    timed = sorted({point.batch for point in profile.of_draft(draft)})
    live = row["live"]
    speed_up = live["speed_up"] if live else row["predicted_speed_up"]
    by_batch = {1: row["lookahead"] if speed_up > 1 else 0} | {
        batch: _best(profile, draft, tars, silence, trace.mean_context, batch) for batch in timed if batch > 1
    }
    return Advice(
        row["lookahead"],
        by_batch if len(by_batch) > 1 else {},
        speed_up,
        tuple(live["interval"]) if live else None,
        "measured live" if live else "predicted",
        profile.notes,
    )


def _best(
    profile: Profile, draft: str, tars: dict[int, float], silence: dict[int, Silence], context: float, batch: int
) -> int:
    """The lookahead that is fastest in batches of this size; 0 where none beats plain decoding."""
    plain_s = profile.plain_s(context, batch)

    def iteration(lookahead: int) -> Iteration:
        silent = silence[lookahead].iterations if lookahead in silence else 0.0
        drafting = profile.iteration(draft, lookahead, context, batch)
        return cost.mean_iteration([drafting, Iteration(0.0, plain_s)], [1 - silent, silent])

    longest = max(point.way.lookahead for point in profile.of_draft(draft) if point.batch == batch)
    found = {
        d: cost.Prediction(d, tar, iteration(d), plain_s, silence=silence.get(d))
        for d, tar in tars.items()
        if d <= longest
    }
    if not found:
        raise RecordError(
            f"the profile times {draft} in batches of {batch} up to lookahead {longest}, and no such is in the study; "
            f"add times: profile --draft {draft} --lookaheads {min(tars)} --batches {batch}"
        )
    best = cost.best(found)
    return best.lookahead if best.speed_up > 1 else 0
