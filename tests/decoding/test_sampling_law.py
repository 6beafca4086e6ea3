"""Sampling losslessness as a joint law: 200,000 sequences through the real engine (draft, cache, rollback, bonus token)
against the target's exact probability of every sequence, by a chi-squared test. Each wrong rule below fails it.
"""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_heads
from scipy import stats

import shallowdraft as sd
from shallowdraft.decoding import verification
from shallowdraft.decoding.drafters.medusa import MedusaDrafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.drafters.ngram import NgramDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.random_streams import RandomStreams
from shallowdraft.decoding.state import new_source
from shallowdraft.decoding.verification import Proposal, Verdict
from shallowdraft.models.cache import KVCache
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.shape import ModelShape

SAMPLES = 200_000
ALPHA = 1e-3  # seeds are fixed: a rule that passes today passes always
CAUGHT = 1e-9
FEWER = 40_000  # samples: as many as catch every wrong rule

TARGET = ModelShape(2, 16, 2, 24, 4, kv_heads=1, head_dim=16, context=64)
DRAFT = ModelShape(1, 12, 1, 16, 4, head_dim=16, context=64)


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    return (
        sd.Model("target", random_decoder(TARGET, seed=11, scale=1.5).pack()),
        sd.Model("draft", random_decoder(DRAFT, seed=12, scale=1.5).pack()),
    )


def law(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """One token's law, written once more, one distribution at a time and in float64."""
    scores = logits.astype(np.float64) / temperature
    if top_k is not None:
        scores[scores < np.sort(scores)[-min(top_k, len(scores))]] = -np.inf
    p = np.exp(scores - scores.max())
    p /= p.sum()
    if top_p is not None:
        order = np.argsort(-p, kind="stable")
        kept = order[: 1 + int(np.sum(np.cumsum(p[order])[:-1] < top_p))]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0.0)
        p /= p.sum()
    return p


def exact_law(model: sd.Model, prompt: list[int], length: int, **sampling) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of the given length."""
    vocab = model.shape.vocab
    sequences = list(itertools.product(range(vocab), repeat=length))
    begun = [model.start_token] if model.shape.encoder else prompt
    tokens = torch.tensor([begun + list(sequence) for sequence in sequences])
    rows, total = tokens.shape
    with torch.inference_mode():
        cache = model.decoder.new_cache(rows, total)
        model.decoder.read_source(new_source([prompt] * rows, tokens.device), cache)
        hidden = model.decoder(tokens, torch.arange(total).expand(rows, -1), cache, total)
        logits = model.decoder.head(hidden).numpy()
    laws: dict[tuple[int, ...], np.ndarray] = {}
    result = {}
    for row, sequence in enumerate(sequences):
        p = 1.0
        for index, token in enumerate(sequence):
            if (prefix := sequence[:index]) not in laws:
                laws[prefix] = law(logits[row, len(begun) + index - 1], **sampling)
            p *= laws[prefix][token]
        result[sequence] = p
    assert sum(result.values()) == pytest.approx(1)
    return result


def p_value(
    models, prompts: list[list[int]], lookahead: int, batch: int, samples: int = SAMPLES, strategy=None, **sampling
) -> float:
    """The smallest chi-squared p-value over the prompts, which share a batch row by row."""
    target, draft = models
    length = lookahead + 3
    strategy = {"draft": draft} if strategy is None else strategy
    counts = [Counter[tuple[int, ...]]() for _ in prompts]
    for seed in range(-(-samples // batch)):
        rows = [prompts[row % len(prompts)] for row in range(batch)]
        options = strategy | sampling
        outs = sd.generate(target, rows, lookahead=lookahead, max_new_tokens=length, seed=seed, **options)
        for row, out in enumerate(outs):
            counts[row % len(prompts)][tuple(out.token_ids)] += 1
    found = []
    for prompt, seen in zip(prompts, counts, strict=True):
        exact = exact_law(target, prompt, length, **{"top_k": None, "top_p": None} | sampling)
        found.append(fit(seen, exact))
    return min(found)


def fit(seen: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-squared p-value; sequences expected fewer than 5 times are pooled, impossible ones must not occur."""
    total = seen.total()
    if any(exact[sequence] == 0 for sequence in seen):
        return 0.0
    rare = {sequence for sequence, p in exact.items() if p * total < 5}
    observed = [seen[sequence] for sequence in exact if sequence not in rare]
    expected = [p * total for sequence, p in exact.items() if sequence not in rare]
    if sum(exact[sequence] for sequence in rare) * total >= 5:
        observed.append(sum(seen[sequence] for sequence in rare))
        expected.append(sum(exact[sequence] for sequence in rare) * total)
    scale = sum(observed) / sum(expected)  # a pool too small to test is left out of both
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


ONE, MIXED = [[1, 2, 0]], [[3], [0, 1, 2, 3, 3, 1]]


@pytest.mark.parametrize(
    ("prompts", "lookahead", "batch", "sampling"),
    [
        (ONE, 1, 20_000, {"temperature": 1.0}),
        (ONE, 2, 500, {"temperature": 0.7}),
        pytest.param(MIXED, 2, 25_000, {"temperature": 1.3}, marks=pytest.mark.slow),
        pytest.param(ONE, 3, 20_000, {"temperature": 1.0, "top_k": 3}, marks=pytest.mark.slow),
        (MIXED, 2, 10_000, {"temperature": 1.0, "top_p": 0.8}),
        (ONE, 3, 20_000, {"temperature": 1.5, "top_k": 3, "top_p": 0.9}),
        (ONE, 4, 20_000, {"temperature": 0.8, "top_k": 2}),
    ],
)
def test_the_joint_law_is_the_targets(models, prompts, lookahead: int, batch: int, sampling: dict[str, float]):
    assert p_value(models, prompts, lookahead, batch, **sampling) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_joint_law_of_small_batches(models, batch: int):
    prompts = MIXED if batch == 2 else ONE
    assert p_value(models, prompts, 2, batch, samples=20_000, temperature=1.0, top_p=0.9) > ALPHA


def test_a_draft_that_is_the_target_keeps_the_law(models):
    assert p_value((models[0], models[0]), ONE, 2, 20_000, FEWER, temperature=1.0) > ALPHA


right = verification.verify_sampled


def wrong_row(p, q, proposed, coins, last):
    """Each proposal is judged by the law of the position after it."""
    return right(torch.cat((p[:, 1:], p[:, -1:]), 1), q, proposed, coins, last)


def no_residual(p, q, proposed, coins, last):
    """After a rejection the token is drawn from p itself."""
    verdict = right(p, q, proposed, coins, last)
    drawn = verification.draw(p[torch.arange(len(p)), verdict.accepted], last)
    tokens = verdict.tokens.scatter(1, verdict.accepted[:, None], drawn[:, None])
    return Verdict(tokens, verdict.accepted, verdict.finite)


def another_q(p, q, proposed, coins, last):
    """The q of the rule is not the one that was sampled from."""
    return right(p, q.square() / q.square().sum(-1, keepdim=True), proposed, coins, last)


def no_bonus(p, q, proposed, coins, last):
    """After a full acceptance the next token is left void."""
    verdict = right(p, q, proposed, coins, last)
    full = (verdict.accepted == proposed.shape[1]) & (proposed.shape[1] > 0)
    tokens = verdict.tokens.clone()
    tokens[:, -1] = torch.where(full, 0, tokens[:, -1])
    return Verdict(tokens, verdict.accepted, verdict.finite)


def bonus_from_the_draft(p, q, proposed, coins, last):
    """After a full acceptance the next token is drawn from the draft's last law."""
    if not proposed.shape[1]:
        return right(p, q, proposed, coins, last)
    return right(torch.cat((p[:, :-1], q[:, -1:]), 1), q, proposed, coins, last)


def reversed_test(p, q, proposed, coins, last):
    """Accepts with probability min(1, q / p)."""
    lookahead = proposed.shape[1]
    p_x = p[:, :lookahead].gather(2, proposed[..., None]).squeeze(2)
    q_x = q.gather(2, proposed[..., None]).squeeze(2)
    coins = torch.where(coins * p_x < q_x, 0.0, 1.0)
    return right(p, q.clone(), proposed, coins * 2, last)


@pytest.mark.parametrize(
    "rule", [wrong_row, no_residual, another_q, no_bonus, bonus_from_the_draft, reversed_test], ids=lambda r: r.__name__
)
def test_a_wrong_rule_is_caught(models, monkeypatch, rule):
    monkeypatch.setattr(verification, "verify_sampled", rule)
    assert p_value(models, ONE, 2, 20_000, FEWER, temperature=1.0) < CAUGHT


@pytest.mark.parametrize(
    ("prompts", "lookahead", "sampling"),
    [(ONE, 2, {"temperature": 1.0}), (ONE, 3, {"temperature": 1.5, "top_k": 3, "top_p": 0.9})],
)
def test_the_joint_law_of_block_verification(models, prompts, lookahead: int, sampling: dict[str, float]):
    strategy = {"draft": models[1], "rule": "block"}
    assert p_value(models, prompts, lookahead, 20_000, FEWER, strategy=strategy, **sampling) > ALPHA


def test_the_joint_law_of_a_target_that_drafts_for_itself(models):
    strategy = {"drafter": "skip", "skips": [1, 2]}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, temperature=1.0) > ALPHA


def test_the_joint_law_of_a_draft_that_stops_where_it_is_unsure(models, monkeypatch):
    """And that a token which was drawn must not be left out because it is unlikely."""
    strategy = {"draft": models[1], "min_confidence": 0.5}
    assert p_value(models, ONE, 2, 1, samples=2_500, strategy=strategy, temperature=1.0) > ALPHA
    propose = ModelDrafter.propose

    def dropping(self, state, uniforms, missed):
        found = propose(self, state, uniforms, missed)
        count = found.tokens.shape[1]
        count -= bool(found.q[0, -1, found.tokens[0, -1]] < self.min_confidence)
        return Proposal(found.tokens[:, :count], found.q[:, :count], found.largest[:, :count])

    monkeypatch.setattr(ModelDrafter, "propose", dropping)
    assert p_value(models, ONE, 2, 1, samples=4_000, strategy=strategy, temperature=1.0) < CAUGHT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_joint_law_of_copied_text(models, rule: str):
    strategy = {"drafter": "ngram", "rule": rule}
    assert p_value(models, [[1, 2, 0, 1, 2]], 3, 20_000, FEWER, strategy=strategy, temperature=1.0) > ALPHA


def test_copied_text_whose_length_no_other_row_sets_has_the_law(models, monkeypatch):
    """And that it is no draw: a law with any doubt in it is caught."""
    strategy = {"drafter": "ngram"}
    assert p_value(models, [[1, 2, 0, 1, 2]], 3, 1, samples=1_000, strategy=strategy, temperature=1.0) > ALPHA
    propose = NgramDrafter.propose

    def doubting(self, state, uniforms, missed):
        found = propose(self, state, uniforms, missed)
        return replace(found, q=(found.q + 0.25) / 2)

    monkeypatch.setattr(NgramDrafter, "propose", doubting)
    assert p_value(models, [[1, 2, 0, 1, 2]], 3, 4_000, 4_000, strategy=strategy, temperature=1.0) < CAUGHT


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [(ONE, {"temperature": 1.0}), ([[3]], {"temperature": 0.7, "top_k": 2})],  # fewer tokens than a node has children
)
def test_the_joint_law_of_trees(models, prompts, sampling: dict[str, float]):
    strategy = {"draft": models[1], "drafter": "tree", "nodes": 7}
    assert p_value(models, prompts, 2, 20_000, FEWER, strategy=strategy, **sampling) > ALPHA


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9}], ids=str)
def test_the_joint_law_of_heads(models, sampling: dict[str, float]):
    strategy = {"drafter": "medusa", "heads": random_heads(models[0], 2), "nodes": 7}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, **sampling) > ALPHA


def test_heads_that_are_not_what_was_drawn_from_are_caught(models, monkeypatch):
    propose = MedusaDrafter.propose

    def another_head(self, state, uniforms, missed):
        """The laws of the heads change places."""
        found = propose(self, state, uniforms, missed)
        return replace(found, q=found.q.flip(1))

    monkeypatch.setattr(MedusaDrafter, "propose", another_head)
    strategy = {"drafter": "medusa", "heads": random_heads(models[0], 2), "nodes": 7}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, temperature=1.0) < CAUGHT


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.4, "top_k": 3}], ids=str)
def test_the_joint_law_of_several_chains(models, sampling: dict[str, float]):
    strategy = {"draft": models[1], "drafter": "several", "nodes": 6}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, **sampling) > ALPHA


share = verification.k_seq


def as_if_alone(law, draft, count):
    """Each chain is judged as if it were the only one."""
    return share(law, draft, torch.ones_like(count))


def nothing_accounted_for(law, draft, count):
    """After all chains failed the token is drawn from p itself."""
    strictness, accepted = share(law, draft, count)
    return strictness, torch.zeros_like(accepted)


@pytest.mark.parametrize("wrong", [as_if_alone, nothing_accounted_for], ids=lambda w: w.__name__)
def test_a_wrong_selection_is_caught(models, monkeypatch, wrong):
    monkeypatch.setattr(verification, "k_seq", wrong)
    strategy = {"draft": models[1], "drafter": "several", "nodes": 6}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, temperature=1.0) < CAUGHT


walk = verification.reject_recursively


def laws_are_not_left(tree, p, q, tokens, coins, last, monkeypatch):
    """After a rejected child the next one is judged by the whole law."""
    monkeypatch.setattr(verification, "_residual", lambda target, _draft: target)
    return walk(tree, p, q, tokens, coins, last)


def drafts_come_again(tree, p, q, tokens, coins, last, monkeypatch):
    """A child is judged as if it might have been its sibling's token too."""
    monkeypatch.setattr(verification, "without", lambda law, _token: law)
    return walk(tree, p, q, tokens, coins, last)


def children_change_places(tree, p, q, tokens, coins, last, monkeypatch):
    """The coin of a node decides about another."""
    return walk(tree, p, q, tokens.roll(1, 1), coins, last)


@pytest.mark.parametrize(
    "wrong", [laws_are_not_left, drafts_come_again, children_change_places], ids=lambda w: w.__name__
)
def test_a_wrong_walk_is_caught(models, monkeypatch, wrong):
    monkeypatch.setattr(verification, "reject_recursively", functools.partial(wrong, monkeypatch=monkeypatch))
    strategy = {"draft": models[1], "drafter": "tree", "nodes": 7}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, temperature=1.0) < CAUGHT


blocks = verification.block_chances


def the_last_chance_for_all(p, q, proposed):
    """Every prefix is accepted with the chance that it or more is: what longer prefixes took is counted twice."""
    joint, _ = blocks(p, q, proposed)
    return joint, joint[:, 1:]


def unbounded(p, q, proposed):
    """The joint ratio is cut to 1 at the end only."""
    ratio = verification._probability_of(p[:, :-1], proposed) / verification._probability_of(q, proposed)
    joint = torch.cat((torch.ones_like(ratio[:, :1]), ratio.cumprod(1).clamp(max=1)), 1)
    return joint, torch.cat((blocks(p, q, proposed)[1][:, :-1], joint[:, -1:]), 1)


@pytest.mark.parametrize("chances", [the_last_chance_for_all, unbounded], ids=lambda c: c.__name__)
def test_a_wrong_block_rule_is_caught(models, monkeypatch, chances):
    monkeypatch.setattr(verification, "block_chances", chances)
    strategy = {"draft": models[1], "rule": "block"}
    assert p_value(models, ONE, 2, 20_000, FEWER, strategy=strategy, temperature=1.0) < CAUGHT


def joined_p_value(models, rows: int = 6_000, lookahead: int = 2) -> float:
    """As `p_value`: prompts that other prompts join after an iteration, in another order and when a third has left."""
    target, draft = models
    length = lookahead + 3
    laws = [{"temperature": 1.0, "top_k": None, "top_p": None}, {"temperature": 1.3, "top_k": 3, "top_p": 0.9}]
    engines = []
    for seed, (prompt, options) in enumerate(zip(MIXED, laws, strict=True)):
        sampling = Sampling(**options, seed=seed)
        drafter = ModelDrafter(draft.decoder, lookahead, sampling, target.shape.vocab)
        limits = [len(prompt) + length] * rows
        engine = Engine.for_prompts(target.decoder, drafter, sampling, [prompt] * rows, limits, slots=16)
        engine.random_streams.begin(seed, 1)
        engines.append(engine)
    emitted = [[engine.read(engine.prefill())] for engine in engines]
    emitted[0].append(engines[0].read(engines[0].iterate()))
    parts = [(which, row) for which in (0, 1) for row in range(rows) if which or row % 3]
    parts = [parts[index] for index in np.random.default_rng(0).permutation(len(parts))]
    batch = Engine.from_rows([(engines[which], row) for which, row in parts], 16)
    later = [batch.read(batch.iterate()) for _ in range(length)]
    counts = [Counter[tuple[int, ...]]() for _ in MIXED]
    for place, (which, row) in enumerate(parts):
        taken = [step[row] for step in emitted[which]] + [step[place] for step in later]
        tokens = [token for accepted, *found in taken for token in found[: accepted + 1]]
        counts[which][tuple(tokens[:length])] += 1
    return min(
        fit(seen, exact_law(target, prompt, length, **options))
        for seen, prompt, options in zip(counts, MIXED, laws, strict=True)
    )


def test_the_joint_law_of_a_batch_that_others_join(models):
    assert joined_p_value(models) > ALPHA


def another_cache(parts, lengths, slots, right=KVCache.of):
    """Rows are moved, what they hold of the text is not."""
    return right(parts[1:] + parts[:1], lengths, slots)


def numbers_again(parts, right=RandomStreams.from_rows):
    """A row that is moved uses again the numbers that it used before."""
    for random_streams in {random_streams for random_streams, _ in parts}:
        random_streams.begin(0, 1)
    return right(parts)


@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [(KVCache, "of", another_cache), (RandomStreams, "from_rows", numbers_again)],
)
def test_a_wrong_move_is_caught(models, monkeypatch, owner, method: str, wrong):
    monkeypatch.setattr(owner, method, wrong)
    assert joined_p_value(models, 3_000) < CAUGHT


def test_a_row_does_not_depend_on_its_neighbours(models):
    target, draft = models
    options = {"draft": draft, "lookahead": 3, "max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    alone = sd.generate(target, [[1, 2]], **options)[0]
    together = sd.generate(target, [[1, 2], [3, 3, 3, 0, 1], [2]], **options)
    assert together[0].token_ids == alone.token_ids
    assert len({tuple(out.token_ids) for out in sd.generate(target, [[1, 2]] * 8, **options)}) > 4


def test_seeds(models):
    target, draft = models
    options = {"draft": draft, "max_new_tokens": 20, "temperature": 1.0}
    first, again, other = (sd.generate(target, [1, 2], seed=seed, **options).token_ids for seed in (3, 3, 4))
    assert first == again != other
