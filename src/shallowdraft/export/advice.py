"""How far a study says to look ahead: at its best, and by batch size where its profile has times of batches."""

from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft import cost
from shallowdraft.cost import Iteration, Silence
from shallowdraft.decoding.ways import Way
from shallowdraft.errors import RecordError
from shallowdraft.models.checkpoint import read_json
from shallowdraft.profiling.latency import Point, Profile, read_profile
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


def advise(folder: Path, target: str, draft: str) -> Advice:
    """What a study's records say about a draft."""
    if not (folder / "study.json").is_file():
        raise RecordError(f"{folder}: holds no study.json; name the folder of a study that has ended")
    try:
        return _advise(folder, target, draft)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder}: its records lack {error}; run the study again, it reuses the others") from None


def _advise(folder: Path, target: str, draft: str) -> Advice:
    rows = {row["draft"]: row for row in read_json(folder / "study.json")["rows"] if row["drafter"] == "model"}
    if draft not in rows:
        raise RecordError(
            f"{folder}: its study has no draft {draft}; there are {', '.join(rows) or 'none'}; "
            "run the study again with this draft too, it reuses the others"
        )
    trace = read_trace(folder / "trace.jsonl")
    if trace.target != target:
        raise RecordError(f"{folder}: this is a study of {trace.target}, not of {target}; name its target, or another")
    row = rows[draft]
    kept = Records.read(folder / "replays.jsonl", REPLAYS).latest("drafter", "draft").values()
    replayed = next(one for one in kept if (one["drafter"], one["draft"]) == ("model", draft))
    tars = {int(size): tar for size, tar in replayed["tar"].items()}
    silence = {int(size): Silence(**one) for size, one in replayed.get("silence", {}).items()}
    profile = read_profile(folder / "profile.jsonl")
    timed = sorted({point.batch for point in _points(profile, draft)})
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

    longest = max(point.lookahead for point in _points(profile, draft) if point.batch == batch)
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


def _points(profile: Profile, draft: str) -> list[Point]:
    return [point for point in profile.samples if point.way == Way(draft, point.lookahead)]
