"""The choice of lookahead on made-up machines, and that it changes nothing but speed."""

import random
from pathlib import Path

import pytest
import torch

import shallowdraft as sd
from shallowdraft.cost import independent_tar
from shallowdraft.decoding.lookahead_policy import MAX_AUTO_LOOKAHEAD, LookaheadPolicy
from shallowdraft.models.synthetic import make_pair
from shallowdraft.shapes.notation import parse_shape


def simulate(policy: LookaheadPolicy, rate: float, step: float, iterations: int, seed: int = 0) -> list[int]:
    """A machine on which a draft step costs `step` of a target's pass, and a text of independent acceptance."""
    draws, chosen = random.Random(seed), []
    for _ in range(iterations):
        lookahead = policy.choose()
        kept = 0
        while kept < lookahead and draws.random() < rate:
            kept += 1
        policy.learn(lookahead, [kept], (1 + step * lookahead) * draws.uniform(0.95, 1.05))
        chosen.append(lookahead)
    return chosen


def best(rate: float, step: float) -> int:
    return max(range(MAX_AUTO_LOOKAHEAD + 1), key=lambda d: independent_tar(rate, d) / (1 + step * d))


def speed(chosen: list[int], rate: float, step: float) -> float:
    return sum(independent_tar(rate, d) for d in chosen) / sum(1 + step * d for d in chosen)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("step", [0.05, 0.2, 0.5])
def test_it_comes_close_to_the_best_fixed_lookahead(rate: float, step: float):
    chosen = simulate(LookaheadPolicy(), rate, step, 400)
    fixed = best(rate, step)
    assert speed(chosen[50:], rate, step) > 0.93 * speed([fixed], rate, step)


def test_where_speculation_does_not_pay_it_stops_and_returns_when_the_text_changes():
    policy = LookaheadPolicy()
    chosen = simulate(policy, 0.1, 0.4, 200)
    assert chosen[50:].count(0) > 0.85 * 150
    chosen = simulate(policy, 0.9, 0.1, 300)
    assert chosen[150:].count(0) < 0.2 * 150
    assert max(chosen[150:]) >= 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[sd.Model, sd.Model]:
    shapes = parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512)
    target, draft = (sd.load(path) for path in make_pair(*shapes, 0.7).save(tmp_path_factory.mktemp("pair")))
    return target, draft


class Random(LookaheadPolicy):
    """Any lookahead, at every iteration: nothing about the caches may depend on a steady one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._draws = random.Random(seed)

    def choose(self) -> int:
        return self._draws.choice((0, 0, 0, 1, 2, 5, 8))


@pytest.mark.parametrize("rows", [1, 3])
def test_any_order_of_lookaheads_gives_the_output_of_plain_decoding(
    pair: tuple[sd.Model, sd.Model], rows: int, monkeypatch: pytest.MonkeyPatch
):
    target, draft = pair
    prompts = [[5, 6, 7], [9], list(range(40, 60))][:rows]
    plain = sd.generate(target, prompts, max_new_tokens=90)
    monkeypatch.setattr("shallowdraft.decoding.engine_cache.LookaheadPolicy", Random)
    auto = sd.generate(target, prompts, draft=draft, lookahead="auto", max_new_tokens=90)
    assert [run.token_ids for run in auto] == [run.token_ids for run in plain]


def test_a_draft_that_did_not_read_what_it_missed_would_be_noticed(
    pair: tuple[sd.Model, sd.Model], monkeypatch: pytest.MonkeyPatch
):
    """Random weights attend to what they read, so an unread token changes what is proposed."""
    from shallowdraft.decoding.drafters.model import ModelDrafter
    from shallowdraft.models.synthetic import random_decoder

    model = sd.Model("same", random_decoder(parse_shape("4x64/4h/96", vocab=64), seed=3, scale=1.5).pack())
    monkeypatch.setattr("shallowdraft.decoding.engine_cache.LookaheadPolicy", Random)
    same = sd.generate(model, [1, 2, 3], draft=model, lookahead="auto", max_new_tokens=120)
    assert set(same.accepted_by_iteration[:-1]) <= {0, 1, 2, 5, 8}  # its own draft: all that it proposes is accepted
    propose = ModelDrafter.propose
    monkeypatch.setattr(ModelDrafter, "propose", lambda self, state, uniforms, _: propose(self, state, uniforms, 0))
    forgetful = sd.generate(model, [1, 2, 3], draft=model, lookahead="auto", max_new_tokens=120)
    assert forgetful.token_ids == same.token_ids
    assert not set(forgetful.accepted_by_iteration[:-1]) <= {0, 1, 2, 5, 8}


def test_sampling_keeps_its_law(pair: tuple[sd.Model, sd.Model], monkeypatch: pytest.MonkeyPatch):
    from shallowdraft.models.synthetic import random_decoder

    target = sd.Model("t", random_decoder(parse_shape("2x16/2h/24", vocab=4), seed=11, scale=1.5).pack())
    draft = sd.Model("d", random_decoder(parse_shape("1x16/2h/24", vocab=4), seed=12, scale=1.5).pack())
    monkeypatch.setattr("shallowdraft.decoding.engine_cache.LookaheadPolicy", Random)
    counts = []
    for way in ({}, {"draft": draft, "lookahead": "auto"}):
        runs = sd.generate(target, [[1, 2]] * 20_000, max_new_tokens=6, temperature=1.0, seed=len(way), **way)
        last = torch.tensor([run.token_ids[-2:] for run in runs])
        counts.append(torch.bincount(last[:, 0] * 4 + last[:, 1], minlength=16).double())
    from scipy import stats

    assert stats.chi2_contingency(torch.stack(counts).numpy()[:, (sum(counts) > 0).numpy()]).pvalue > 1e-3


def test_wrong_lookaheads(pair: tuple[sd.Model, sd.Model], tmp_path: Path):
    with pytest.raises(sd.ShallowdraftError, match="or auto"):
        sd.generate(pair[0], [1], draft=pair[1], lookahead="always")
