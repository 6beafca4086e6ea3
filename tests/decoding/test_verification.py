import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shallowdraft.decoding import sampling
from shallowdraft.decoding.sampling import draw, probabilities
from shallowdraft.decoding.verification import (
    Proposal,
    block_chances,
    k_seq,
    reject_recursively,
    verify,
    verify_block,
    verify_greedy,
    verify_sampled,
)
from shallowdraft.errors import OptionError
from shallowdraft.models.tree import Tree
from shallowdraft.runs.sampling import Sampling


def one_hot(token: int, vocab: int = 5) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab).float()


def test_greedy_accepts_up_to_the_first_mismatch():
    logits = torch.stack([torch.stack([one_hot(t) for t in row]) for row in ([1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4])])
    verdict = verify_greedy(*logits.max(-1), torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3]]))
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert [row[: n + 1].tolist() for row, n in zip(verdict.tokens, verdict.accepted, strict=True)] == [
        [1, 2, 3, 4],
        [1, 2],
        [0],
    ]


def test_rows_have_their_own_laws():
    p = torch.stack([torch.stack([one_hot(1), one_hot(2)]), torch.stack([one_hot(3), one_hot(4)])])
    q = torch.stack([one_hot(1)[None], one_hot(1)[None]])
    verdict = verify_sampled(p, q, torch.tensor([[1], [1]]), torch.full((2, 1), 0.5), torch.full((2,), 0.5))
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.tokens.tolist() == [[1, 2], [3, 0]]


def test_equal_laws_are_never_rejected():
    p = torch.rand(50, 1, 7).softmax(-1)
    proposed = draw(p[:, 0], torch.rand(50, dtype=torch.float64))[:, None]
    coins = torch.full((50, 1), 1 - 2**-53, dtype=torch.float64)
    verdict = verify_sampled(p.repeat(1, 2, 1), p, proposed, coins, torch.rand(50, dtype=torch.float64))
    assert verdict.accepted.tolist() == [1] * 50


def test_an_impossible_token_is_never_accepted():
    p = torch.stack([one_hot(0), one_hot(0)])[None]
    verdict = verify_sampled(p, one_hot(2)[None, None], torch.tensor([[2]]), torch.zeros(1, 1), torch.zeros(1))
    assert verdict.accepted.item() == 0
    assert verdict.tokens[0, 0].item() == 0


LAWS = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(lambda w: [one / sum(w) for one in w])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data(), d=st.integers(1, 3))
def test_a_block_is_accepted_no_less_than_its_tokens(data: st.DataObject, d: int):
    """Expected acceptance by exact enumeration of what a draft may propose; laws depend on the whole prefix."""
    paths = list(itertools.product(range(3), repeat=d))
    laws = {path[:n]: data.draw(st.tuples(LAWS, LAWS)) for path in paths for n in range(d + 1)}
    p = torch.tensor([[laws[path[:n]][0] for n in range(d + 1)] for path in paths], dtype=torch.float64)
    q = torch.tensor([[laws[path[:n]][1] for n in range(d)] for path in paths], dtype=torch.float64)
    proposed = torch.tensor(paths)
    drawn = q.gather(2, proposed[..., None]).squeeze(2)
    weight = drawn.prod(1)
    by_token = (p[:, :-1].gather(2, proposed[..., None]).squeeze(2) / drawn).clamp(max=1).cumprod(1).sum(1)
    joint, chance = block_chances(p, q, proposed)
    longer = torch.cat(((1 - chance).flip(1).cumprod(1).flip(1)[:, 1:], torch.ones(len(paths), 1)), 1)  # not accepted
    by_block = (torch.arange(1, d + 1) * chance * longer).sum(1)
    assert float(weight @ by_block) >= float(weight @ by_token) - 1e-12
    assert float(weight @ by_block) == pytest.approx(float(weight @ joint[:, 1:].sum(1)))


def test_a_block_of_one_is_a_token():
    draws = torch.Generator().manual_seed(0)
    p, q = (torch.rand(200, n, 5, generator=draws).softmax(-1) for n in (2, 1))
    proposed = draw(q[:, 0], torch.rand(200, generator=draws, dtype=torch.float64))[:, None]
    coins, last = torch.rand(200, 1, generator=draws), torch.rand(200, generator=draws)
    one, other = (rule(p, q, proposed, coins, last) for rule in (verify_sampled, verify_block))
    assert one.accepted.tolist() == other.accepted.tolist()
    assert one.tokens.tolist() == other.tokens.tolist()


@settings(deadline=None, derandomize=True, max_examples=30)
@given(p=LAWS, q=LAWS)
def test_a_second_child_only_adds(p: list[float], q: list[float]):
    """One level, two children drawn from q, none twice: acceptance over all coins against exact enumeration."""
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    tree = Tree((0, 0)).on(torch.device("cpu"))
    coins = torch.cartesian_prod(grid, grid)
    count, total, exact = len(coins), 0.0, 0.0
    laws = torch.tensor([p] * 3, dtype=torch.float64).expand(count, -1, -1)
    drafts = torch.tensor([q] * 3, dtype=torch.float64).expand(count, -1, -1)
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    for first, second in itertools.permutations(range(3), 2):
        weight = q[first] * q[second] / (1 - q[first])
        tokens = torch.tensor([[first, second]]).expand(count, -1)
        node, _ = reject_recursively(tree, laws, drafts, tokens, coins, torch.full((count,), 0.5))
        total += weight * float((node > 0).double().mean())
        one = min(1.0, p[first] / q[first])
        rest = left[second] / sum(left) if sum(left) > 0 else p[second]
        exact += weight * (one + (1 - one) * min(1.0, rest * (1 - q[first]) / q[second]))
    assert total == pytest.approx(exact, abs=0.03)
    assert exact >= sum(map(min, p, q)) - 1e-12


@settings(deadline=None, derandomize=True, max_examples=60)
@given(p=LAWS, q=LAWS, count=st.integers(1, 6))
def test_more_chains_accept_more(p: list[float], q: list[float], count: int):
    """k-SEQ accepts at least as much as one chain, no token more often than p has it; alone it is the usual rule."""
    law, draft = torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    strictness, accepted = k_seq(law, draft, torch.tensor([count]))
    single = sum(map(min, p, q))
    assert float(accepted.sum()) >= single - 1e-4
    assert bool((accepted <= law + 1e-9).all())
    assert 1 <= float(strictness) <= count
    one = float(torch.minimum(law / strictness, draft).sum())
    assert float(accepted.sum()) == pytest.approx(1 - (1 - one) ** count)
    if count == 1:
        assert accepted[0].tolist() == pytest.approx([*map(min, p, q)])


def test_a_toy_case_of_k_seq():
    """p = (0.5, 0.5), q = (1, 0), two chains: both offer the first token, which p has half of the time.

    One passes with x = 0.5 / r, any of two with 1 - (1 - x)^2 = 0.5: x = 1 - sqrt(0.5).
    """
    strictness, accepted = k_seq(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]), torch.tensor([2]))
    assert float(strictness) == pytest.approx(0.5 / (1 - 0.5**0.5), rel=1e-3)
    assert accepted[0].tolist() == pytest.approx([0.5, 0.0], rel=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_a_row_with_nan_is_not_finite(poison: float, sampling: Sampling):
    logits = torch.zeros(2, 2, 4)
    logits[1, 0, 2] = poison
    proposal = Proposal(torch.tensor([[0], [0]]), torch.full((2, 1, 4), 0.25))
    assert verify(logits, proposal, sampling, torch.zeros(2, 1), torch.zeros(2)).finite.tolist() == [True, False]


@settings(deadline=None, derandomize=True)
@given(weights=st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20), uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_cumulative_sum(weights: list[float], uniform: float):
    if sum(weights) <= 0:
        return
    index = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[index] > 0
    below, total = sum(weights[:index]), sum(weights)
    assert below - 1e-6 * total <= uniform * total <= below + weights[index] + 1e-6 * total


def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """By its definition: all are sorted, equals in order; the one that crosses top_p stays."""
    order = np.argsort(-p, kind="stable")
    kept = order[: 1 + int(np.sum(np.cumsum(p[order])[:-1] < top_p))]
    law = np.zeros_like(p)
    law[kept] = p[kept] / p[kept].sum()
    return law


def nuclei_differ() -> bool:
    """From laws with and without equals, of one token to hundreds; also if another row beside needs more looks."""
    flat = torch.zeros(1, 2000)
    for number, (scale, top_p) in enumerate(itertools.product((1.0, 6.0, 30.0), (1e-9, 0.3, 0.9, 0.999))):
        logits = scale * torch.randn(2, 2000, generator=torch.Generator().manual_seed(number))
        logits[1] = logits[1].round()
        found = probabilities(logits, Sampling(1.0, top_p=top_p))
        beside = probabilities(torch.cat((logits, flat)), Sampling(1.0, top_p=top_p))
        exact = np.stack([nucleus(one, top_p) for one in logits.softmax(-1).double().numpy()])
        if ((found > 0).numpy() != (exact > 0)).any() or not np.allclose(found, exact, atol=1e-6):
            return True
        if (beside[:2] != found).any():
            return True
    return False


def test_nuclei(monkeypatch):
    assert not nuclei_differ()
    with monkeypatch.context() as changed:
        changed.setattr(sampling, "_host_may_read", lambda _: False)
        assert not nuclei_differ()
    monkeypatch.setattr(sampling, "NUCLEUS_TOKENS", 1)
    assert not nuclei_differ()

    def too_few(top_p: float, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        likeliest = p.topk(128, -1).values
        return likeliest, likeliest.cumsum(-1)

    monkeypatch.setattr(sampling, "_likeliest_until", too_few)
    assert nuclei_differ()


def test_temperature_top_k_and_top_p():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert probabilities(logits, Sampling(0.5)).tolist()[0] == pytest.approx((logits * 2).softmax(-1)[0].tolist())
    top_2 = probabilities(logits, Sampling(1.0, top_k=2))[0]
    assert (top_2 > 0).tolist() == [True, True, False, False]
    assert top_2.sum().item() == pytest.approx(1)
    p = logits.softmax(-1)[0]
    assert (probabilities(logits, Sampling(1.0, top_p=float(p[0]) - 0.01))[0] > 0).sum() == 1
    assert (probabilities(logits, Sampling(1.0, top_p=float(p[0]) + 0.01))[0] > 0).sum() == 2
    assert probabilities(logits, Sampling(1.0, top_p=1.0, top_k=9))[0].tolist() == pytest.approx(p.tolist())


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]):
    with pytest.raises(OptionError):
        Sampling(**wrong)
