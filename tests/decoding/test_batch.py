"""Requests that join and leave a running batch emit what `generate` emits, whatever goes on beside them."""

import pytest
import torch

import shallowdraft as sd
from shallowdraft.decoding import batch
from shallowdraft.decoding.batch import Batch
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.random_streams import RandomStreams
from shallowdraft.decoding.rows import GeneratedRow
from shallowdraft.decoding.sampling import Samplings
from shallowdraft.decoding.state import State
from shallowdraft.models.cache import KVCache

LOOKAHEAD = 3
REQUESTS = [
    ("Once upon a time", {"max_new_tokens": 14}),
    ("The river", {"max_new_tokens": 9, "temperature": 1.0, "seed": 7}),
    ("A list of three things: one", {"max_new_tokens": 16, "temperature": 0.7, "top_k": 20, "seed": 1}),
    ("He said", {"max_new_tokens": 25, "temperature": 1.3, "top_p": 0.8, "seed": 2, "stop": ["the", "."]}),
    ("A long prompt. " * 20, {"max_new_tokens": 6}),
    ("In the beginning", {"max_new_tokens": 1, "temperature": 1.0}),
    ("She", {"max_new_tokens": 17, "stop": [" and"]}),
    ("The river", {"max_new_tokens": 11, "temperature": 1.0, "seed": 7}),
]


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    return sd.load("zoo:target", device="cpu"), sd.load_draft("zoo:4x128", device="cpu")


def staggered(running: Batch, target: sd.Model, at: int = 3) -> list[GeneratedRow]:
    """All requests, so many running at a time; a new one joins where another has left, one is sent away."""
    rows: list[GeneratedRow] = []
    waiting = [(target.encode(prompt), Settings(**options)) for prompt, options in REQUESTS]
    while waiting or running.rows:
        if waiting and len(running.rows) < at:
            rows.append(running.join(*waiting.pop(0)))
        if len(rows) == 2 and len(rows[0].tokens) > 4:
            gone = running.join(target.encode("Nobody waits for this"), Settings(temperature=0.5))
            running.step()
            running.leave([gone])
        running.step()
    return rows


def as_on_a_gpu(running: Batch) -> Batch:
    """With engines of few sizes that are kept, and places in them that are empty."""
    running._keeps, running._sizes = True, [1, 2, 4]
    return running


@pytest.mark.parametrize("kept", [False, True], ids=["", "as on a GPU"])
@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("patience", [0, 4])
def test_a_request_gets_what_generate_gives_it(models, monkeypatch, draft: bool, kept: bool, patience: int):
    """Also where rows are copied over and over, because they have next to no room to grow."""
    monkeypatch.setattr(batch, "MIN_SPARE_SLOTS", 4)
    monkeypatch.setattr(batch, "IDLE_ITERATIONS", patience)
    target, proposer = models[0], models[1] if draft else None
    running = Batch(target, proposer, LOOKAHEAD, 600, 4)
    (as_on_a_gpu(running) if kept else running).warm()
    rows = staggered(running, target)
    for row, (prompt, options) in zip(rows, REQUESTS, strict=True):
        alone = sd.generate(target, prompt, draft=proposer, lookahead=LOOKAHEAD, **options)
        assert (row.tokens, row.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert "".join(piece.text for piece in row.pieces) + row.text.flush() == alone.text
        assert row.accepted_by_iteration == alone.accepted_by_iteration


def nothing_moved(self, row, *_):
    """A row keeps what whoever stood in its place has left."""


@pytest.mark.parametrize("owner", [KVCache, RandomStreams, Samplings, State])
def test_a_row_that_is_moved_without_its_own_is_noticed(models, monkeypatch, owner):
    target, draft = models
    right = staggered(Batch(target, draft, LOOKAHEAD, 600, 4), target)
    monkeypatch.setattr(owner, "put" if owner is KVCache else "replace_row", nothing_moved)
    moved = staggered(Batch(target, draft, LOOKAHEAD, 600, 4), target)
    assert [row.tokens for row in right] != [row.tokens for row in moved]


def moved_and_left_behind(models: tuple[sd.Model, sd.Model]) -> list[int]:
    """A row that is drawn, was moved to a smaller engine and came back to one where it had stood in another place."""
    target, draft = models
    running = as_on_a_gpu(Batch(target, draft, LOOKAHEAD, 600, 4))
    drawn = Settings(max_new_tokens=30, temperature=1.0, seed=3)
    *others, row = [running.join(target.encode("The river"), drawn) for _ in range(4)]
    running.step()
    running.leave(others[:2])
    running.step()
    running.join(target.encode("She"), drawn)
    while running.rows:
        running.step()
    return row.tokens


def test_a_row_does_not_share_its_random_numbers_with_its_shadow(models, monkeypatch):
    target, draft = models
    monkeypatch.setattr(batch, "IDLE_ITERATIONS", 0)
    alone = sd.generate(
        target, "The river", draft=draft, lookahead=LOOKAHEAD, max_new_tokens=30, temperature=1.0, seed=3
    )
    assert moved_and_left_behind(models) == alone.token_ids
    monkeypatch.setattr(RandomStreams, "idle_row", nothing_moved)
    assert moved_and_left_behind(models) != alone.token_ids


def test_a_place_is_kept_for_a_while(models):
    """A row that comes when another has left takes its place; rows are copied if none comes."""
    target, _ = models
    running, endless = Batch(target, None, LOOKAHEAD, 600, 4), Settings(max_new_tokens=500, stop_tokens=())
    rows = [running.join(target.encode("She"), endless) for _ in range(4)]
    engine = running._engine
    for _ in range(3):
        running.leave([rows.pop()])
        running.step()
        rows.append(running.join(target.encode("The river"), endless))
        running.step()
    assert running._engine is engine
    running.leave(rows[1:])
    running.step()
    assert running._engine is engine
    running.step()
    assert len(running._engine.state.tokens) == 1
    while running.rows:
        running.step()
    assert rows[0].tokens == sd.generate(target, "She", max_new_tokens=500, stop_tokens=()).token_ids


def test_prompts_of_one_request_have_streams_of_their_own(models):
    target, draft = models
    running = Batch(target, draft, LOOKAHEAD, 600, 4)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4}
    rows = [running.join(target.encode("Once"), Settings(**options), stream) for stream in range(3)]
    while running.rows:
        running.step()
    together = sd.generate(target, ["Once"] * 3, draft=draft, lookahead=LOOKAHEAD, **options)
    assert [row.tokens for row in rows] == [out.token_ids for out in together]


@pytest.mark.parametrize("kept", [False, True], ids=["", "as on a GPU"])
def test_a_row_without_numbers_leaves_alone(models, monkeypatch, kept: bool):
    """And leaves nothing behind that could spoil the next one."""
    target, draft = models
    running = Batch(target, draft, LOOKAHEAD, 600, 4)
    running = as_on_a_gpu(running) if kept else running
    well = running.join(target.encode("Once upon a time"), Settings(max_new_tokens=12))
    head = target.decoder.head.forward
    monkeypatch.setattr(target.decoder.head, "forward", lambda x: head(x) * torch.nan)
    assert not running.join(target.encode("The river"), Settings()).finite
    monkeypatch.setattr(target.decoder.head, "forward", head)
    again = running.join(target.encode("The river"), Settings(max_new_tokens=12))
    while running.rows:
        running.step()
    for row, prompt in ((well, "Once upon a time"), (again, "The river")):
        assert row.tokens == sd.generate(target, prompt, max_new_tokens=12).token_ids
