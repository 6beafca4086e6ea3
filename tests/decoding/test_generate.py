import dataclasses
import time

import numpy as np
import pytest
import torch
from tokenizer_kinds import KINDS, tokenizer_of

import shallowdraft as sd
from shallowdraft.decoding.generate import BatchRun
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.statistics import PhaseTimes, Statistics
from shallowdraft.decoding.verification import verify_greedy, verify_sampled
from shallowdraft.errors import NumericsError, OptionError, PromptError, VocabularyError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.synthetic import byte_tokenizer, make_pair, random_decoder
from shallowdraft.shapes.shape import ModelShape

SHAPE = ModelShape(2, 32, 2, 48, 400, context=96)


@pytest.fixture(scope="module")
def synthetic():
    return make_pair(SHAPE, ModelShape(1, 24, 2, 32, 400, context=96), 0.7, seed=3)


@pytest.fixture(scope="module")
def writer() -> sd.Model:
    """A random model that writes words and bytes."""
    return sd.Model("writer", random_decoder(SHAPE, seed=2, scale=2.0), byte_tokenizer(SHAPE.vocab))


def both_ways(target: sd.Model, draft: sd.Model, prompt, **options) -> tuple[sd.Generation, sd.Generation]:
    return (
        sd.generate(target, prompt, **options),
        sd.generate(target, prompt, draft=draft, lookahead=6, **options),
    )


def test_text_ids_and_lists_of_either(synthetic):
    one = sd.generate(synthetic.target, "ab", max_new_tokens=5)
    ids = synthetic.target.encode("ab")
    assert sd.generate(synthetic.target, ids, max_new_tokens=5).token_ids == one.token_ids
    both = sd.generate(synthetic.target, ["ab", ids], max_new_tokens=5)
    assert [out.token_ids for out in both] == [one.token_ids] * 2
    assert one.token_ids == synthetic.walk(ids[-1], 5)
    assert one.text == synthetic.target.decode(one.token_ids)
    assert sd.generate(synthetic.target, ["ab"], max_new_tokens=5)[0].token_ids == one.token_ids


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20, 64])
def test_max_new_tokens_is_never_overshot(synthetic, count: int):
    for out in both_ways(synthetic.target, synthetic.draft, "abc", max_new_tokens=count):
        assert len(out.token_ids) == count
        assert out.finish_reason == "length"


def test_a_stop_token_is_kept_and_ends_the_text(synthetic):
    walk = synthetic.walk(synthetic.target.encode("x")[-1], 40)
    for out in both_ways(synthetic.target, synthetic.draft, "x", max_new_tokens=60, stop_tokens=[walk[17]]):
        assert out.token_ids == walk[:18]
        assert out.finish_reason == "stop"


def test_the_models_own_stop_token_is_the_default(synthetic):
    walk = synthetic.walk(5, 10)
    target = dataclasses.replace(synthetic.target, stop_tokens=(walk[4],))
    assert sd.generate(target, [5], max_new_tokens=10).token_ids == walk[:5]
    assert len(sd.generate(target, [5], max_new_tokens=10, stop_tokens=()).token_ids) == 10


def test_a_stop_string_may_span_tokens(synthetic):
    full = sd.generate(synthetic.target, "x", max_new_tokens=40)
    middle = len(full.text) // 2
    stop = full.text[middle - 3 : middle + 4]
    cut = full.text.index(stop)
    for out in both_ways(synthetic.target, synthetic.draft, "x", max_new_tokens=60, stop=["never there", stop]):
        assert out.text == full.text[:cut]
        assert out.finish_reason == "stop"
        assert out.token_ids == full.token_ids[: len(out.token_ids)]
        assert stop in synthetic.target.decode(out.token_ids)
        assert stop not in synthetic.target.decode(out.token_ids[:-1])


def test_the_context_limits_new_tokens(synthetic):
    prompt = list(range(90))
    for out in both_ways(synthetic.target, synthetic.draft, prompt, max_new_tokens=50):
        assert len(out.token_ids) == 6
        assert out.finish_reason == "context"


def test_beyond_the_drafts_context_decoding_goes_on_plainly():
    shape = dataclasses.replace(SHAPE, context=90)
    target = sd.Model("target", random_decoder(shape, seed=1, scale=2.0))
    draft = sd.Model("draft", random_decoder(dataclasses.replace(shape, context=40), seed=1, scale=2.0))
    plain, speculative = both_ways(target, draft, [1, 2, 3], max_new_tokens=80)
    assert speculative.token_ids == plain.token_ids
    assert speculative.stats.drafted < 6 * speculative.stats.iterations
    long = [7] * 60
    assert sd.generate(target, long, draft=draft, max_new_tokens=9).stats.drafted == 0
    both = sd.generate(target, [[1, 2, 3], long], draft=draft, max_new_tokens=20)
    assert both[0].stats.accepted > 0  # one long row does not end speculation for the others
    assert both[1].token_ids == sd.generate(target, long, max_new_tokens=20).token_ids


def test_statistics_count_what_was_kept(synthetic):
    stops = synthetic.walk(5, 30)
    out = sd.generate(
        synthetic.target, [5], draft=synthetic.draft, lookahead=4, max_new_tokens=60, stop_tokens=[stops[20]]
    )
    stats = out.stats
    assert stats.tokens == len(out.token_ids) == 21
    assert stats.emitted == 20
    assert stats.iterations == len(out.accepted_by_iteration)
    assert stats.drafted == 4 * stats.iterations
    assert stats.accepted == sum(out.accepted_by_iteration)
    assert stats.tar == stats.emitted / stats.iterations
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert sum(stats.acceptance_histogram) == stats.iterations
    assert stats.acceptance_by_position[0] == sum(n >= 1 for n in out.accepted_by_iteration) / stats.iterations
    assert len(stats.acceptance_by_position) == 4
    # every iteration but the last emits its accepted tokens and one of the target's
    assert (
        sum(out.accepted_by_iteration[:-1]) + stats.iterations - 1 < stats.emitted <= stats.accepted + stats.iterations
    )
    assert stats.total_s == pytest.approx(stats.prefill_s + stats.draft_s + stats.verify_s + stats.other_s)
    assert stats.tokens_per_s == pytest.approx(stats.tokens / stats.total_s)
    assert stats.to_json()["mean_acceptance_length"] == stats.tar


def test_iterations_that_proposed_less_say_nothing_of_later_positions(synthetic):
    """A draft whose context ends half-way, and lookaheads that change."""
    model = synthetic.draft.decoder
    short = dataclasses.replace(
        synthetic.draft, decoder=assemble(dataclasses.replace(model.shape, context=40), model.dense_state())
    )
    whole, ended = (
        sd.generate(synthetic.target, [5], draft=draft, lookahead=3, max_new_tokens=80)
        for draft in (synthetic.draft, short)
    )
    silent, _, _, drafting = ended.stats.proposal_histogram
    assert min(silent, drafting) > 9
    assert ended.stats.drafted == 3 * drafting
    kept = whole.accepted_by_iteration[:drafting]
    assert list(ended.stats.acceptance_by_position) == [sum(n > at for n in kept) / drafting for at in range(3)]
    changing = sd.generate(synthetic.target, [5], draft=synthetic.draft, lookahead="auto", max_new_tokens=80).stats
    proposed = changing.proposal_histogram
    assert sum(proposed) == changing.iterations
    assert sum(depth * count for depth, count in enumerate(proposed)) == changing.drafted
    assert changing.acceptance_by_position[0] == sum(changing.acceptance_histogram[1:]) / sum(proposed[1:])


def test_the_pairs_own_tar_is_what_the_engine_counts(synthetic):
    """Walk the cycle from token 0; only the iteration cut by max_new_tokens may differ."""
    out = sd.generate(synthetic.target, [0], draft=synthetic.draft, lookahead=3, max_new_tokens=90)
    agrees = [bool(synthetic.agrees[token]) for token in [0, *out.token_ids]]
    position, expected = 1, []
    while position < 90:
        run = next((n for n in range(3) if not agrees[position + n]), 3)
        expected.append(min(run, 90 - position))
        position += run + 1
    assert out.accepted_by_iteration == expected


def test_prefills_token_belongs_to_prefill(synthetic):
    stats = sd.generate(synthetic.target, [5], draft=synthetic.draft, max_new_tokens=1).stats
    assert (stats.tokens, stats.emitted, stats.iterations, stats.tar) == (1, 0, 0, 0.0)


def test_several_prompts_are_the_quotient_of_sums():
    times = PhaseTimes(1.0, 2.0, 3.0, 7.0)
    a = Statistics.derive(tokens=11, emitted=10, drafted=20, histogram=[1, 1, 3], proposed=[1, 0, 4], times=times)
    b = Statistics.derive(tokens=3, emitted=2, drafted=2, histogram=[0, 1], proposed=[0, 1], times=times)
    both = sd.total([a, b], one_batch=False)
    assert both.tar == 12 / 6
    assert both.acceptance_histogram == (1, 2, 3)
    assert both.proposal_histogram == (1, 1, 4)
    assert both.acceptance_by_position == (5 / 5, 3 / 4)  # the iteration that proposed nothing says nothing
    assert (both.total_s, both.other_s) == (14.0, 2.0)
    assert sd.total([a, b], one_batch=True).total_s == 7.0


def test_streamed_pieces_make_up_the_result(writer, synthetic):
    for target, draft in ((writer, writer), (synthetic.target, synthetic.draft)):
        for options in ({}, {"stop": ["ba"]}, {"stop": ["\ufffd\ufffd"], "temperature": 1.0}):
            pieces = sd.stream(target, "über", draft=draft, max_new_tokens=60, **options)
            seen = list(pieces)
            assert "".join(piece.text for piece in seen) == pieces.result.text
            assert [piece.token_id for piece in seen if piece.token_id is not None] == pieces.result.token_ids
            assert sum(piece.drafted for piece in seen) == pieces.result.stats.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_the_decoded_whole_has_beyond_the_prompt(kind: str):
    """With its leading space, as transformers decodes the whole; generated, streamed, drafted, and up to a stop."""
    shape = dataclasses.replace(SHAPE, vocab=len(tokenizer_of(kind)))
    target = sd.Model("m", random_decoder(shape, seed=2, scale=2.0), tokenizer_of(kind))
    options = {"max_new_tokens": 30, "temperature": 1.0}
    for seed, prompt in enumerate(["She was called Lily.", "Lily", "a café"]):
        ids = target.tokenizer.encode(prompt, add_special_tokens=False)
        before = target.decode(ids)
        alone = sd.generate(target, ids, seed=seed, **options)
        assert before + alone.text == target.decode(ids + alone.token_ids)
        pieces = sd.stream(target, ids, draft=target, seed=seed, **options)
        assert "".join(piece.text for piece in pieces) == pieces.result.text
        assert before + pieces.result.text == target.decode(ids + pieces.result.token_ids)
        cut = sd.generate(target, ids, seed=seed, stop=["e", " "], **options)
        whole = target.decode(ids + cut.token_ids)
        assert cut.text == min(whole[len(before) :].split("e")[0], whole[len(before) :].split(" ")[0], key=len)


def test_a_stream_is_an_iterator_and_stops_its_clock_for_the_reader(synthetic):
    pieces = sd.stream(synthetic.target, "x", draft=synthetic.draft, max_new_tokens=30)
    assert isinstance(next(pieces), sd.Piece)
    with pytest.raises(OptionError, match="not ended"):
        _ = pieces.result
    time.sleep(0.5)
    assert len(list(pieces)) == 29
    assert pieces.result.stats.total_s < 0.5


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]])
def test_ids_may_be_arrays(synthetic, make):
    expected = sd.generate(synthetic.target, [1, 2, 3], max_new_tokens=4).token_ids
    assert sd.generate(synthetic.target, make([1, 2, 3]), max_new_tokens=4).token_ids == expected
    assert sd.generate(synthetic.target, [make([1, 2, 3])], max_new_tokens=4)[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "options", "error", "said"),
    [
        ("", {}, PromptError, "empty"),
        ([], {}, PromptError, "no prompt"),
        ([[]], {}, PromptError, "empty"),
        ([1, 400], {}, PromptError, "token id 400"),
        ([1] * 96, {}, PromptError, "96 tokens.*context of 96"),
        ("a", {"lookahead": 0}, OptionError, "lookahead is 0; it must be a whole number from 1 to 32"),
        ("a", {"lookahead": 99}, OptionError, "lookahead is 99"),
        ("a", {"max_new_tokens": 0}, OptionError, "max_new_tokens"),
        ("a", {"temperature": -1.0}, OptionError, "temperature"),
        ("a", {"stop": [""]}, OptionError, "stop"),
        ("a", {"lookahead": 2.5}, OptionError, "lookahead is 2.5"),
        ("a", {"temperature": 1e-40}, OptionError, "temperature"),
        ("\udcff", {}, PromptError, "not valid Unicode"),
    ],
)
def test_bad_input(synthetic, prompt, options, error, said):
    with pytest.raises(error, match=said):
        sd.generate(synthetic.target, prompt, draft=synthetic.draft, **options)


def test_wrong_types_are_said(synthetic):
    with pytest.raises(OptionError, match="the target is 'folder'; give a model"):
        sd.generate("folder", "hi")
    with pytest.raises(OptionError, match="the draft is 'folder'"):
        sd.generate(synthetic.target, "hi", draft="folder")
    with pytest.raises(PromptError, match="stream takes one prompt"):
        sd.stream(synthetic.target, ["a", "b"])
    with pytest.raises(PromptError, match="the prompt is None"):
        sd.generate(synthetic.target, None)


def test_unknown_options_are_errors(synthetic):
    with pytest.raises(TypeError, match="lookahed"):
        sd.generate(synthetic.target, "a", lookahed=3)


def test_the_smallest_top_p_leaves_the_likeliest_token(synthetic):
    for out in both_ways(synthetic.target, synthetic.draft, "ab", max_new_tokens=9, temperature=1.0, top_p=5e-324):
        assert out.token_ids == sd.generate(synthetic.target, "ab", max_new_tokens=9).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poisoned", ["target", "draft"])
def test_nan_logits_are_an_error(synthetic, temperature: float, poisoned: str):
    broken = random_decoder(SHAPE)
    broken.norm.weight.data.fill_(float("nan"))
    models = {"target": synthetic.target, "draft": synthetic.draft} | {
        poisoned: sd.Model("broken", broken, synthetic.target.tokenizer)
    }
    with pytest.raises(NumericsError, match="NaN"):
        sd.generate(models["target"], [5], draft=models["draft"], max_new_tokens=9, temperature=temperature)


def test_nan_where_nothing_is_emitted_is_no_error(synthetic):
    """Logits behind a rejected token are void, and so is a row that has ended."""
    logits = torch.zeros(1, 3, 4)
    logits[0, 2] = float("nan")
    assert verify_greedy(*logits.max(-1), torch.tensor([[1, 1]])).finite.tolist() == [True]
    p = torch.full((1, 3, 4), 0.25)
    p[0, 2] = float("nan")
    rejected = verify_sampled(
        p, torch.eye(4)[None, :2], torch.tensor([[0, 1]]), torch.full((1, 2), 0.9), torch.zeros(1)
    )
    assert (rejected.accepted.item(), rejected.finite.tolist()) == (0, [True])
    row = synthetic.walk(5, 4)
    decoder = random_decoder(SHAPE, seed=8)
    out = sd.generate(sd.Model("m", decoder), [[1], [2]], max_new_tokens=3, stop_tokens=[row[0]])
    assert len(out) == 2


def test_a_prompt_of_text_needs_a_tokenizer():
    with pytest.raises(VocabularyError, match="no tokenizer"):
        sd.generate(sd.Model("bare", random_decoder(SHAPE)), "text")


def test_padded_vocabularies(synthetic):
    """A target with more rows than tokens, a draft with fewer or more: the tail is never proposed, output unchanged."""
    target = synthetic.target
    plain = sd.generate(target, [5], max_new_tokens=40)
    for vocab in (390, 416):
        shape = dataclasses.replace(SHAPE, vocab=vocab)
        draft = sd.Model("padded", random_decoder(shape, seed=4, scale=2.0), byte_tokenizer(380))
        target = sd.Model("target", synthetic.target.decoder, byte_tokenizer(380))
        assert sd.check_vocabulary(target, draft).relation == "padded"
        for temperature in (0.0, 1.0):
            out = sd.generate(target, [5], draft=draft, max_new_tokens=40, temperature=temperature)
            if temperature == 0:
                assert out.token_ids == plain.token_ids
            assert max(out.token_ids) < 400


def test_models_on_two_devices_are_refused(synthetic):
    with torch.device("meta"):
        from shallowdraft.models.decoder import Decoder

        elsewhere = sd.Model("meta", Decoder(SHAPE), synthetic.target.tokenizer)
    with pytest.raises(OptionError, match="one device"):
        sd.generate(synthetic.target, [5], draft=elsewhere)


def test_rewinding_brings_back_the_state_after_the_prompt(synthetic):
    """Both caches are overwritten from there on; without that what follows would be another text."""
    settings = Settings(draft=synthetic.draft, lookahead=3, max_new_tokens=60)
    run = BatchRun(synthetic.target, ["a prompt"], settings)
    steps = run.iterations()
    next(steps)

    def few() -> list[int]:
        for _ in range(5):
            next(steps)
        return list(run.rows[0].tokens)

    first = few()[1:]
    run.rewind()
    assert few() == first
    assert few()[: len(first)] == first  # goes on from there
    wrong = BatchRun(synthetic.target, ["a prompt"], settings)
    wrong.engine.rewind = lambda: None
    steps, run = wrong.iterations(), wrong
    next(steps)
    few()
    run.rewind()
    assert few() != first
