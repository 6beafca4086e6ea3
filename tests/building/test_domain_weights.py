"""Dynamic batch loading: the formula by hand, and more text from the domain that lags."""

import json
from math import exp
from pathlib import Path

import pytest
from building.test_training import RECIPE, SHAPE, make_store, reader

from shallowdraft.building.batches import Batches
from shallowdraft.building.domain_weights import DomainBalance, rebalance
from shallowdraft.building.tasks import Pretraining
from shallowdraft.building.trainer import Trainer
from shallowdraft.building.training import fresh_decoder, train


def test_the_formula_by_hand():
    weights = rebalance({"wiki": 0.6, "code": 0.3, "news": 0.1}, {"wiki": 0.0, "code": 0.5, "news": -0.2})
    raised = [0.6, 0.3 * exp(0.5), 0.1 * exp(-0.2)]
    by_hand = [0.9999 * value / sum(raised) + 1e-4 / 3 for value in raised]
    assert list(weights.values()) == pytest.approx(by_hand, rel=1e-12)
    # The same in figures: 0.6 + 0.494616 + 0.081873 = 1.176489
    assert list(weights.values()) == pytest.approx([0.509974, 0.420408, 0.069617], abs=1e-6)
    assert sum(weights.values()) == pytest.approx(1)


def test_equal_lag_changes_nothing_and_no_domain_dies():
    weights = {"a": 0.7, "b": 0.3}
    assert rebalance(weights, {"a": 2.0, "b": 2.0}) == pytest.approx(weights, abs=1e-4)
    for _ in range(50):
        weights = rebalance(weights, {"a": 5.0, "b": 0.0})
    assert weights["b"] >= 0.4e-4
    assert rebalance(weights, {"a": 0.0, "b": 900.0})["b"] > 0.99  # no overflow


def test_a_domain_that_is_not_measured_keeps_its_weight():
    weights = {"a": 0.5, "b": 0.3, "tiny": 0.2}
    moved = DomainBalance(lambda _: {}, every=1).update(weights, {"a": 0.0, "b": 1.0})
    assert moved["tiny"] == 0.2
    assert moved["b"] > 0.4
    assert sum(moved.values()) == pytest.approx(1)


def test_weight_moves_to_the_domain_that_lags(tmp_path: Path):
    """The target has learned both domains, the model only one of them."""
    store = make_store(tmp_path)
    target, model = fresh_decoder(SHAPE, seed=1), fresh_decoder(SHAPE, seed=1)
    list(train(target, Pretraining(), reader(store), RECIPE, tmp_path / "target"))
    animals = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=3, domains=["animals"])
    list(train(model, Pretraining(), animals, RECIPE, tmp_path / "model"))
    trainer = Trainer(store, tmp_path)
    balance = trainer.domain_balance(target, RECIPE)
    assert balance.every == RECIPE.steps // 20
    before = reader(store).weights
    losses = balance.losses(model)
    lag = {domain: loss - balance.reference[domain] for domain, loss in losses.items()}
    assert lag["colours"] > lag["animals"] + 0.05
    assert balance.update(before, losses)["colours"] > before["colours"] + 0.01


def test_the_log_has_the_losses_that_moved_the_weights(tmp_path: Path):
    store = make_store(tmp_path)
    balance = Trainer(store, tmp_path).domain_balance(fresh_decoder(SHAPE, seed=1), RECIPE)
    list(train(fresh_decoder(SHAPE, seed=2), Pretraining(), reader(store), RECIPE, tmp_path / "run", balance=balance))
    steps = [json.loads(line)["details"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    weights = dict(reader(store).weights)
    moved = [step for step in steps if step]
    assert len(moved) == RECIPE.steps // balance.every
    for step in moved:
        lag = {domain: step[f"loss_{domain}"] - step[f"reference_{domain}"] for domain in weights}
        weights = rebalance(weights, lag)
        assert weights == pytest.approx({domain: step[f"weight_{domain}"] for domain in weights})


def test_batches_follow_the_weights_and_a_resumed_run_too(tmp_path: Path):
    store = make_store(tmp_path)

    def weights(folder: str, stop: int | None) -> dict[str, float]:
        batches = reader(store)
        balance = DomainBalance(lambda model: {"animals": 0.0, "colours": 0.3}, every=5)
        steps = train(fresh_decoder(SHAPE, seed=1), Pretraining(), batches, RECIPE, tmp_path / folder, balance=balance)
        for record in steps:
            if record.step == stop:
                break
        assert record.details == {} or record.details["weight_colours"] == batches.weights["colours"]
        return batches.weights

    straight = weights("straight", None)
    weights("stopped", 17)
    assert weights("stopped", None) == straight
    assert straight["colours"] > 0.8
    drawn = reader(store)
    drawn.weights = {"animals": 0.0, "colours": 1.0}
    colours = Batches(store, rows=RECIPE.rows, sequence=RECIPE.sequence, seed=3, domains=["colours"])
    rows_of_colours = {tuple(row) for _ in range(60) for row in colours.next().tolist()}
    assert sum(tuple(row) in rows_of_colours for row in drawn.next().tolist()) > 0
