"""Text that proposes its own continuation."""

import pytest
import torch

import shallowdraft as sd
from shallowdraft.decoding.drafters.ngram import (
    LONGEST_MATCH,
    NgramDrafter,
    continuation,
    copy_length,
    copy_on_device,
    longest_match,
    to_text,
)
from shallowdraft.decoding.state import new_state
from shallowdraft.errors import OptionError
from shallowdraft.models.synthetic import make_pair, random_decoder
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.shape import ModelShape


@pytest.mark.parametrize(
    ("text", "matching", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4, 1, 2, 3]),  # goes round once it has caught up
        ([1, 2, 9, 7, 2, 8, 1, 2], 2, [9, 7, 2, 8, 1]),  # two tokens match there, one later on
        ([2, 5, 2, 6, 2], 1, [6, 2, 6, 2, 6]),  # of equal matches the latest
        ([5] * 4, 3, [5] * 5),
        ([*range(17)] * 3, LONGEST_MATCH, [0, 1, 2, 3, 4]),  # looks no further
        ([1, 2, 3], 0, [3, 3, 3, 3, 3]),  # none
        ([7], 0, [7, 7, 7, 7, 7]),
    ],
)
def test_what_followed_the_last_time(text: list[int], matching: int, wanted: list[int]):
    start, matched = longest_match(to_text(text))
    assert matched == matching
    assert continuation(to_text(text), start, 5) == wanted
    padded = torch.tensor([[*text, *[2] * 6], [2] * (len(text) + 6)])  # what lies behind the text is not part of it
    found = copy_on_device(padded, torch.tensor([len(text), 4]), 5)
    assert found.tolist() == [wanted, [2] * 5]


def test_greedy_text_is_the_same(pair):
    target, _ = pair("llama")
    prompts = [[5, 17, 3, 88, 41, 9] * 4, [60], [8] * 30]
    plain = sd.generate(target, prompts, max_new_tokens=60)
    for lookahead in (1, 4, "auto"):
        copying = sd.generate(target, prompts, drafter="ngram", lookahead=lookahead, max_new_tokens=60)
        assert [out.token_ids for out in copying] == [out.token_ids for out in plain]


def test_a_text_that_goes_round_is_copied():
    """A target that walks a cycle of 320 tokens, from the second time round."""
    target = make_pair(ModelShape(1, 64, 2, 64, 320, context=1000), ModelShape(1, 64, 2, 64, 320), 1.0).target
    out = sd.generate(target, [9], drafter="ngram", lookahead=4, max_new_tokens=900)
    assert out.stats.tar > 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ([1, 2, 3, 1], 2),  # one token matches, and nothing speaks against it
        ([1, 2, 3, 1, 2], 4),
        ([1, 2, 3, 4, 1, 2, 3], 6),
        ([1, 2, 4, 1, 2, 4, 1, 2], 12),  # five match, and the same followed once before
        ([1, 3, 1, 2, 1], 1),  # once it did, once it did not
        ([1, 2, 4, 9, 1, 2, 3, 9, 1, 2], 3),  # three match, the last two were also followed by something else
        ([*(token for other in range(2, 14) for token in (1, other)), 50, 1], 0),  # it went on otherwise 12 times
        ([1, 2, 3], 0),
        ([7], 0),
    ],
)
def test_how_many_are_worth_copying(text: list[int], count: int):
    assert copy_length(to_text(text), *longest_match(to_text(text))) == count


@pytest.mark.parametrize(("lookahead", "most"), [(4, 4), (6, 6), (12, 6)])
def test_no_more_is_copied_than_is_worth_it(lookahead: int, most: int):
    """In a batch than in the row with most."""
    repeating, new = [8, 9, 10] * 2, [1, 2, 3]

    def proposed(*prompts: list[int]) -> list[list[int]]:
        state = new_state(list(prompts), [60] * len(prompts), lookahead, torch.device("cpu"))
        drafter = NgramDrafter(lookahead, Sampling(), 97)
        return drafter.propose(state, torch.zeros(len(prompts), lookahead), 0).tokens.tolist()

    assert proposed(new) == [[]]
    assert proposed(repeating) == [repeating[:most]]
    assert proposed(new, repeating) == [[3] * most, repeating[:most]]


def test_a_text_that_grows_or_is_cut():
    """As when a generation goes on, or an engine is rewound to its prompt."""
    state = new_state([[4, 5, 6, 4, 5]], [60], 4, torch.device("cpu"))
    drafter, uniforms = NgramDrafter(4, Sampling(), 97), torch.zeros(1, 4)
    assert drafter.propose(state, uniforms, 0).tokens.tolist() == [[6, 4, 5, 6]]
    state.tokens[0, 5:7] = torch.tensor([7, 5])
    state.length += 2
    assert drafter.propose(state, uniforms, 0).tokens.tolist() == [[7]]
    state.length -= 3
    assert drafter.propose(state, uniforms, 0).tokens.tolist() == [[5, 6]]
    state.tokens[0, 4] = 9
    state.length += 1
    assert drafter.propose(state, uniforms, 0).tokens.tolist() == [[]]


def test_statistics_count_what_was_copied(pair):
    target, _ = pair("llama")
    out = sd.generate(target, [1, 2, 3], drafter="ngram", lookahead=8, max_new_tokens=3).stats
    assert (out.iterations, out.drafted) == (2, 0)  # nothing comes twice


def test_a_draft_beside_it_is_refused(pair):
    target, draft = pair("llama")
    with pytest.raises(OptionError, match="no draft model"):
        sd.generate(target, [1], draft=draft, drafter="ngram")
    with pytest.raises(OptionError, match="ngram"):
        sd.generate(target, [1], drafter="other")


@pytest.mark.parametrize(
    "options", [{"nodes": 3}, {"nodes": 64}, {"lookahead": "auto"}, {"rule": "block"}, {"nodes": 2.5}], ids=str
)
def test_trees_that_cannot_be(options: dict[str, object], pair):
    target, draft = pair("llama")
    with pytest.raises(OptionError, match="tree"):
        sd.generate(target, [1], draft=draft, drafter="tree", **{"lookahead": 4} | options)


@pytest.mark.parametrize(
    "options",
    [{"min_confidence": 1.5}, {"min_confidence": 0.9, "lookahead": "auto"}, {"min_confidence": 0.5, "drafter": "tree"}],
    ids=str,
)
def test_confidences_that_cannot_be(options: dict[str, object], pair):
    target, draft = pair("llama")
    with pytest.raises(OptionError, match="min_confidence"):
        sd.generate(target, [1], draft=draft, **options)


def test_a_tree_has_no_more_children_than_there_are_tokens():
    target = sd.Model("target", random_decoder(ModelShape(2, 16, 2, 24, 3, context=64)))
    plain = sd.generate(target, [1], max_new_tokens=20)
    tree = sd.generate(target, [1], draft=target, drafter="tree", lookahead=3, nodes=30, max_new_tokens=20)
    assert tree.token_ids == plain.token_ids
