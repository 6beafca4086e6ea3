"""When live runs and profiles write, and in which order ways run: real models, watched between one run and the next."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from shallowdraft.decoding import timing
from shallowdraft.decoding.candidate import draft_options
from shallowdraft.decoding.generate import BatchRun, generate
from shallowdraft.decoding.options import Options, Settings
from shallowdraft.decoding.results import Generation
from shallowdraft.models.synthetic import SyntheticPair, make_pair
from shallowdraft.profiling import measure as measuring
from shallowdraft.records import Records
from shallowdraft.runs import profile as profiles
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.live import KIND
from shallowdraft.runs.trace import Output
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying import live
from shallowdraft.studying.live import run_live

WAYS = [Candidate("draft", lookahead) for lookahead in (1, 2, 3)]
PLAIN = 0


@pytest.fixture(scope="module")
def synthetic() -> SyntheticPair:
    return make_pair(parse_shape("2x32/2h/48", vocab=320), parse_shape("1x32/2h/48", vocab=320), 0.8)


@pytest.fixture(scope="module")
def outputs(synthetic: SyntheticPair) -> list[Output]:
    return [Output(str(at), "few", 0, [at, at + 7], synthetic.walk(at + 7, 6)) for at in range(4)]


@dataclass
class Seen:
    """A run as it began: its prompt, its lookahead, and the lines that the file had then."""

    prompt: tuple[int, ...]
    lookahead: int
    lines: int


class Watch:
    """Real live runs, seen between one and the next."""

    def __init__(self, synthetic: SyntheticPair, outputs: list[Output], path: Path, monkeypatch: pytest.MonkeyPatch):
        self.synthetic, self.outputs, self.path = synthetic, outputs, path
        self.seen: list[Seen] = []
        self.killed_at: int | None = None
        monkeypatch.setattr(live, "generate", self.generate)

    def generate(self, target: object, prompt: list[int], **options: object) -> Generation:
        lookahead = options.get("lookahead", PLAIN)
        self.seen.append(Seen(tuple(prompt), lookahead, self.path.read_bytes().count(b"\n") - 1))
        if len(self.seen) == self.killed_at:
            raise KeyboardInterrupt
        return generate(target, prompt, **options)

    def run(self, rounds: int = 2) -> Iterator[int]:
        proposers = draft_options({"draft": self.synthetic.draft})
        given = {"max_new_tokens": 6, "rounds": rounds, "about": {}}
        return run_live(self.synthetic.target, proposers, WAYS, self.outputs, self.path, **given)

    def turns(self) -> list[list[Seen]]:
        """Runs of whole turns, up to where stalls are taken again."""
        size = 2 + 2 * len(WAYS)
        whole = len(self.outputs) * 2 * size
        return [self.seen[at : at + size] for at in range(0, min(whole, len(self.seen)), size)]

    def orders(self) -> list[list[int]]:
        return [[one.lookahead for one in turn if one.lookahead != PLAIN] for turn in self.turns()]


def test_nothing_is_written_between_the_runs_of_a_turn(
    synthetic: SyntheticPair, outputs: list[Output], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And the first of its plain runs is in no record."""
    watch = Watch(synthetic, outputs, tmp_path / "live.jsonl", monkeypatch)
    list(watch.run())
    for number, turn in enumerate(watch.turns()):
        assert {one.lines for one in turn} == {number * len(WAYS)}
        assert len({one.prompt for one in turn}) == 1
        assert [one.lookahead == PLAIN for one in turn] == [True, True, *[False, True] * len(WAYS)]
    rows = list(Records.read(watch.path, KIND))
    for before, after in pairwise(rows[: len(WAYS)]):
        assert before["states"][1] == after["states"][0]


def test_the_order_of_ways_is_drawn_anew_for_each_prompt_and_round(
    synthetic: SyntheticPair, outputs: list[Output], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = (Watch(synthetic, outputs, tmp_path / name, monkeypatch) for name in ("first", "second"))
    list(second.run())
    monkeypatch.setattr(live, "generate", first.generate)
    list(first.run())
    assert all(sorted(order) == [1, 2, 3] for order in first.orders())
    assert len({tuple(order) for order in first.orders()}) > 2
    assert first.orders()[: len(outputs)] != first.orders()[len(outputs) :]  # the other round
    assert first.orders() == second.orders()


def test_who_is_stopped_loses_one_turn_and_goes_on_in_the_same_order(
    synthetic: SyntheticPair, outputs: list[Output], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = Watch(synthetic, outputs, tmp_path / "whole", monkeypatch)
    list(whole.run())
    watch = Watch(synthetic, outputs, tmp_path / "stopped", monkeypatch)
    size = 2 + 2 * len(WAYS)
    watch.killed_at = 3 * size + 5  # in the midst of the fourth turn
    with pytest.raises(KeyboardInterrupt):
        list(watch.run())
    assert len(list(Records.read(watch.path, KIND))) == 3 * len(WAYS)
    before, watch.seen, watch.killed_at = watch.orders()[:3], [], None
    assert next(watch.run()) == 3 * len(WAYS)
    list(watch.run())
    assert before + watch.orders()[: len(whole.orders()) - 3] == whole.orders()


def test_ways_of_a_profile_take_turns_in_drawn_orders_and_are_written_together(
    synthetic: SyntheticPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, lines, orders = tmp_path / "profile.jsonl", [], []
    lookaheads: dict[int, int] = {}
    begin, rewind = timing._endless, BatchRun.rewind

    def endless(target: object, prompts: list[list[int]], settings: Settings, iterations: int) -> BatchRun:
        run = begin(target, prompts, settings, iterations)
        lookaheads[id(run)] = settings.lookahead if settings.draft else PLAIN
        return run

    def watched(run: BatchRun) -> None:
        lines.append(path.read_bytes().count(b"\n") - 1)
        orders.append(lookaheads[id(run)])
        rewind(run)

    monkeypatch.setattr(timing, "_endless", endless)
    monkeypatch.setattr(BatchRun, "rewind", watched)
    proposers = {key: Options(**options) for key, options in draft_options({"draft": synthetic.draft}).items()}
    wanted = measuring.all_points(WAYS, [8], [1])
    list(measuring.measure(synthetic.target, proposers, wanted, path, 2))
    each = 1 + measuring.TURNS * (1 + 2 * len(WAYS))  # of a round: the one that counts for nothing, and the turns
    assert lines == [1] * each + [1 + measuring.TURNS * len(WAYS)] * each  # the first says what is to be timed
    drawn = []
    for start in (0, each):
        assert orders[start : start + 2] == [PLAIN, PLAIN]
        for turn in range(measuring.TURNS):
            at = start + 1 + turn * (1 + 2 * len(WAYS))
            assert set(orders[at : at + 2 * len(WAYS) + 1 : 2]) == {PLAIN}
            drawn.append(tuple(orders[at + 1 : at + 2 * len(WAYS) : 2]))
    assert all(sorted(order) == [1, 2, 3] for order in drawn)
    assert len(set(drawn)) > 2
    _, *rows = Records.read(path, profiles.KIND)
    assert [row["lookahead"] for row in rows] == [1, 2, 3] * measuring.TURNS * 2
