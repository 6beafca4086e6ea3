"""Text that models write themselves, as a domain of a store and as the second half of training rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from building.test_training import RECIPE, SHAPE, make_store, reader

import shallowdraft as sd
from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import continuations, share_generated, write_continuations
from shallowdraft.building.tasks import Distillation
from shallowdraft.building.token_store import TokenStore, open_store
from shallowdraft.building.training import fresh_decoder, train
from shallowdraft.errors import CorpusError, OptionError
from shallowdraft.models.synthetic import random_decoder

TARGET = random_decoder(SHAPE, seed=3)
PROMPTS = torch.randint(0, 320, (5, 9), generator=torch.Generator().manual_seed(0))


def test_continuations_are_the_engines():
    text = continuations(TARGET, PROMPTS, 12, temperature=0.0)
    assert torch.equal(text[:, :9], PROMPTS)
    for row, prompt in zip(text.tolist(), PROMPTS.tolist(), strict=True):
        alone = sd.generate(sd.Model("target", TARGET, None, ()), prompt, max_new_tokens=12)
        assert row[9:] == alone.token_ids


def test_drawn_continuations_follow_from_the_seed():
    first, same, other = (continuations(TARGET, PROMPTS, 12, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_too_long_continuations_are_refused():
    with pytest.raises(OptionError, match="do not fit the model's context of 2048"):
        continuations(TARGET, PROMPTS, 2040)


def extended(folder: Path) -> TokenStore:
    progress = write_continuations(
        make_store(folder), TARGET, folder / "more", tokens=600, prompt=8, length=16, rows=5, seed=1
    )
    assert list(progress) == [120, 240, 360, 480, 600]
    return open_store(folder / "more")


def test_the_targets_text_is_a_domain_of_its_own(tmp_path: Path):
    store = extended(tmp_path)
    assert store.domains == ["animals", "colours", "generated"]
    assert store.counts["generated"] == {"train": 4 * 5 * 25, "val": 5 * 25}
    text = torch.from_numpy(store.tokens("generated", "train").astype("int64")).view(-1, 25)
    assert (text[:, -1] == store.end).all()
    assert torch.equal(continuations(TARGET, text[:5, :8], 16, seed=2), text[:5, :-1])
    held_out = store.tokens("generated", "val").tolist()[:8]
    corpus = store.tokens("animals", "val").tolist() + store.tokens("colours", "val").tolist()
    assert any(corpus[start : start + 8] == held_out for start in range(len(corpus)))
    only = Batches(store, rows=4, sequence=24, seed=0, domains=["generated"])
    assert only.next().shape == (4, 25)
    assert Batches(store, rows=4, sequence=24, seed=0).weights.keys() == {"animals", "colours", "generated"}
    with pytest.raises(CorpusError, match="already"):
        list(write_continuations(store, TARGET, tmp_path / "x", tokens=1, prompt=8, length=16, rows=5, seed=1))


def test_writing_goes_on_where_it_stopped(tmp_path: Path):
    store = make_store(tmp_path)
    options = {"tokens": 600, "prompt": 8, "length": 16, "rows": 5, "seed": 1}
    steps = write_continuations(store, TARGET, tmp_path / "stopped", **options)
    assert [next(steps), next(steps)] == [120, 240]
    steps.close()
    kept = (tmp_path / "stopped" / "1.npy").stat().st_mtime_ns
    assert next(write_continuations(store, TARGET, tmp_path / "stopped", **options)) == 120
    assert (tmp_path / "stopped" / "1.npy").stat().st_mtime_ns == kept
    for name in ("stopped", "straight"):
        list(write_continuations(store, TARGET, tmp_path / name, **options))
    stopped, straight = (
        open_store(tmp_path / name).tokens("generated", "train").tolist() for name in ("stopped", "straight")
    )
    assert stopped == straight
    assert not list((tmp_path / "stopped").glob("*.npy"))


def test_a_share_of_the_batch_is_the_targets_text():
    corpus = {"wiki": 0.6, "news": 0.3, "generated": 0.1}
    assert share_generated(corpus, 0.5) == pytest.approx({"wiki": 1 / 3, "news": 1 / 6, "generated": 0.5})
    assert share_generated(corpus, 1.0) == pytest.approx({"wiki": 0, "news": 0, "generated": 1.0})
    assert share_generated({"generated": 1.0}, 0.5) == {"generated": 1.0}
    assert share_generated({"wiki": 1.0}, 0.5) == {"wiki": 1.0}


def test_rollouts_end_in_the_drafts_own_words_and_resume(tmp_path: Path):
    store = make_store(tmp_path)
    job = Distillation(TARGET, rollout=0.5)
    tokens = torch.from_numpy(reader(store).next())
    draft = fresh_decoder(SHAPE, seed=5)
    rolled = job._rolled_out(draft, tokens)
    half = (tokens.shape[1] + 1) // 2
    assert torch.equal(rolled[:, :half], tokens[:, :half])
    changed = (rolled != tokens).any(1)
    assert 2 <= int(changed.sum()) <= 14  # of 16, each by a coin
    draws = np.random.default_rng([0, 0, 0, 0])
    chosen = torch.from_numpy(draws.random(len(tokens)) < 0.5)
    written = continuations(draft, tokens[chosen, :half], tokens.shape[1] - half, seed=int(draws.integers(2**31)))
    assert torch.equal(rolled[chosen], written)
    assert torch.equal(rolled[~chosen], tokens[~chosen])
    drawn = torch.cat([job._rolled_out(draft, row[None]) != row[None] for row in tokens.repeat(4, 1)]).any(1)
    assert 0.3 < float(drawn.float().mean()) < 0.7  # the share holds for single rows too

    def final(folder: str, stop: int | None) -> torch.Tensor:
        model = fresh_decoder(SHAPE, seed=5)
        for record in train(model, Distillation(TARGET, rollout=0.25), reader(store), RECIPE, tmp_path / folder):
            if record.step == stop:
                break
        return model.embed.weight.detach()

    straight = final("straight", None)
    final("stopped", 11)
    assert torch.equal(final("stopped", None), straight)


@pytest.mark.parametrize(
    ("wrong", "said"), [({"rollout": 2.0}, "a share"), ({"objective": "cross-entropy"}, "given text")]
)
def test_wrong_rollouts(wrong: dict, said: str):
    with pytest.raises(OptionError, match=said):
        Distillation(TARGET, **({"rollout": 0.5} | wrong))
