import pytest
import torch

from shallowdraft.building.losses import OBJECTIVES, acceptance, hybrid, tar_from_runs, total_variation


@pytest.fixture
def laws() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(50, 30, generator=random) * 2, torch.randn(50, 30, generator=random) * 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_zero_only_for_equal_laws(name: str, laws):
    target, draft = laws
    assert OBJECTIVES[name](target, target + 3).abs().max() < 1e-5
    assert OBJECTIVES[name](target, draft).min() > 0.01


@pytest.mark.parametrize("name", OBJECTIVES)
def test_following_an_objective_raises_acceptance(name: str, laws):
    target, draft = laws[0], laws[1].clone().requires_grad_()
    before = acceptance(target, draft).mean().item()
    optimiser = torch.optim.Adam([draft], lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        OBJECTIVES[name](target, draft).mean().backward()
        optimiser.step()
    assert acceptance(target, draft).mean() > max(0.9, before)


def test_acceptance_is_one_minus_total_variation(laws):
    torch.testing.assert_close(acceptance(*laws), 1 - total_variation(*laws))


def test_acceptance_by_hand():
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.1, 0.3, 0.6]]).log()
    assert acceptance(target, draft).item() == pytest.approx(0.1 + 0.3 + 0.2)
    assert OBJECTIVES["reverse-kl"](target, draft).item() == pytest.approx(
        OBJECTIVES["forward-kl"](draft, target).item()
    )


def test_the_hybrid_moves_from_kl_to_total_variation(laws):
    target, draft = laws
    close = target + 0.01 * draft
    weight = torch.exp(-3 * acceptance(target, close))
    assert weight.mean() < 0.06
    expected = weight * OBJECTIVES["forward-kl"](target, close) + (1 - weight) * total_variation(target, close)
    torch.testing.assert_close(hybrid(target, close), expected)


def test_tar_walks_the_runs():
    runs = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0, 0]])
    spread = torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0, 1, 0]])
    assert tar_from_runs(runs, 5) == 10 / 5
    assert tar_from_runs(spread, 5) == 10 / 5
    assert tar_from_runs(torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]), 5) == 8 / 3
    assert tar_from_runs(torch.ones(2, 12), 3) == 4
    assert tar_from_runs(torch.zeros(1, 7), 3) == 1
