"""Encoder–decoders through the engine: lossless greedily and as a joint law, each test shown able to fail."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import noisy
from test_engine import assert_never_waits
from test_greedy import SMALLEST_GAP, StaleCache
from test_sampling_law import ALPHA, CAUGHT, no_residual, p_value
from tokenizer_kinds import tokenizer_of

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.decoding import verification
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.state import new_source
from shallowdraft.errors import OptionError, PromptError
from shallowdraft.models.cache import CrossCache, EncoderInput
from shallowdraft.models.seq2seq import Seq2Seq
from shallowdraft.models.synthetic import byte_tokenizer, make_pair, random_decoder
from shallowdraft.models.tree import TreePass
from shallowdraft.runs.sampling import Sampling
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.shapes.t5 import EncoderShape

FIRST = replace(
    parse_shape("2+3x48/3h/64", vocab=97),
    activation="relu",
    encoder=EncoderShape(2, buckets=8, farthest=30, gated=False, scaled=True),
)
LATER = parse_shape("3+2x48/3h/80", vocab=97)
SOURCES = [[5, 17, 3, 88, 41, 9], [60], [8] * 30, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def models_of(shape: ModelShape, noise: float = 0.1, *, pack: bool = True) -> tuple[sd.Model, sd.Model]:
    decoder = random_decoder(shape, seed=4)
    target = sd.Model("target", decoder.pack() if pack else decoder)
    return target, noisy(target, noise, pack=pack)


def smallest_top_gap(model: sd.Model, source: list[int], continuation: list[int]) -> float:
    tokens = torch.tensor([[model.start_token, *continuation]])
    length = tokens.shape[1]
    cache = model.decoder.new_cache(1, length)
    with torch.inference_mode():
        model.decoder.read_source(new_source([source], tokens.device), cache)
        hidden = model.decoder(tokens, torch.arange(length)[None], cache, length)
        top = model.decoder.head(hidden[0, :-1]).topk(2, -1).values
    return float((top[:, 0] - top[:, 1]).min())


def assert_lossless(target: sd.Model, draft: sd.Model | None, **strategy) -> float:
    options = {"max_new_tokens": 32, "stop_tokens": ()}
    plain = sd.generate(target, SOURCES, **options)
    speculative = sd.generate(target, SOURCES, draft=draft, **strategy, **options)
    for source, one, two in zip(SOURCES, plain, speculative, strict=True):
        assert smallest_top_gap(target, source, one.token_ids) > SMALLEST_GAP
        assert two.token_ids == one.token_ids
    assert len({tuple(out.token_ids) for out in plain}) == len(SOURCES)
    return sum(out.stats.accepted for out in speculative) / sum(out.stats.drafted for out in speculative)


@pytest.mark.parametrize("shape", [FIRST, LATER], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        {"lookahead": 3},
        {"lookahead": 8},
        {"lookahead": 6, "min_confidence": 0.1},
        {"lookahead": "auto"},
        {"drafter": "tree", "lookahead": 4, "nodes": 12},
        {"drafter": "skip", "lookahead": 3},
        {"drafter": "skip", "lookahead": 3, "skips": [0, 3]},
        {"drafter": "ngram", "lookahead": 3},
    ],
    ids=str,
)
def test_greedy_is_what_it_is_without_a_draft(shape: ModelShape, strategy: dict):
    target, draft = models_of(shape)
    own = strategy.get("drafter") in ("skip", "ngram")
    rate = assert_lossless(target, None if own else draft, **strategy)
    assert rate < 0.98
    assert own or rate > 0.02  # both acceptance and rejection took place


def test_the_same_model_as_draft_accepts_everything():
    target, _ = models_of(LATER)
    for out in sd.generate(target, SOURCES, draft=target, lookahead=4, max_new_tokens=40):
        assert set(out.accepted_by_iteration[:-1]) == {4}


class StaleCrossCache(CrossCache):
    """Wrong: rejected tokens stay."""

    write = StaleCache.write


def test_a_wrong_rollback_is_caught(monkeypatch):
    target, draft = models_of(FIRST)
    monkeypatch.setattr("shallowdraft.models.seq2seq.CrossCache", StaleCrossCache)
    with pytest.raises(AssertionError):
        assert_lossless(target, draft, lookahead=4)


def test_a_tree_at_wrong_distances_is_caught(monkeypatch):
    target, draft = models_of(FIRST)
    assert_lossless(target, draft, drafter="tree", lookahead=6, nodes=40)
    monkeypatch.setattr(TreePass, "slot_positions", lambda self, span: torch.arange(span).expand(1, 1, -1))
    with pytest.raises(AssertionError):
        assert_lossless(target, draft, drafter="tree", lookahead=6, nodes=40)


def test_a_draft_that_reads_another_source_is_still_lossless(monkeypatch):
    """What a drafter does can cost speed only."""
    target, draft = models_of(LATER, 0.0)
    good, read = assert_lossless(target, draft, lookahead=4), Seq2Seq.read_source

    def other(self, source, cache):
        read(
            self,
            EncoderInput(source.tokens.roll(1, 0), source.length.roll(1)) if self is draft.decoder else source,
            cache,
        )

    monkeypatch.setattr(Seq2Seq, "read_source", other)
    assert assert_lossless(target, draft, lookahead=4) < good - 0.2


SMALL = replace(parse_shape("1+2x16/2h/24", vocab=4), encoder=EncoderShape(1, buckets=8, farthest=20))
SMALLER = replace(parse_shape("1+1x12/1h/16", vocab=4), encoder=EncoderShape(1, buckets=8, farthest=20))
ONE, MIXED = [[1, 2, 0]], [[3], [0, 1, 2, 3, 3, 1]]
SAMPLES = 5_000  # of each source: as many as catch every wrong variant


@pytest.fixture(scope="module")
def four_tokens() -> tuple[sd.Model, sd.Model]:
    return (
        sd.Model("target", random_decoder(SMALL, seed=11).pack(), start_token=2),
        sd.Model("draft", random_decoder(SMALLER, seed=12).pack(), start_token=2),
    )


@pytest.mark.parametrize(
    ("sources", "strategy", "sampling"),
    [
        (ONE, {}, {"temperature": 1.0}),
        (MIXED, {}, {"temperature": 1.3, "top_p": 0.9}),
        (ONE, {"drafter": "tree", "nodes": 7}, {"temperature": 1.0}),
        (ONE, {"drafter": "several", "nodes": 6}, {"temperature": 1.0}),
    ],
)
def test_the_joint_law_is_the_targets(four_tokens, sources, strategy, sampling: dict[str, float]):
    strategy = {"draft": four_tokens[1]} | strategy
    assert p_value(four_tokens, sources, 2, SAMPLES, SAMPLES, strategy=strategy, **sampling) > ALPHA


def test_a_wrong_rule_is_caught(four_tokens, monkeypatch):
    monkeypatch.setattr(verification, "verify_sampled", no_residual)
    assert p_value(four_tokens, ONE, 2, SAMPLES, SAMPLES, temperature=1.0) < CAUGHT


def test_a_neighbours_source_is_caught(four_tokens, monkeypatch):
    read = Engine.prefill

    def wrong(self):
        self.state.source = EncoderInput(self.state.source.tokens.roll(1, 0), self.state.source.length.roll(1))
        return read(self)

    monkeypatch.setattr(Engine, "prefill", wrong)
    assert p_value(four_tokens, MIXED, 2, SAMPLES, SAMPLES, temperature=1.0) < CAUGHT


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5, top_p=0.9)], ids=["greedy", "drawn"])
def test_an_iteration_synchronises_nowhere(sampling: Sampling):
    target, draft = models_of(LATER, pack=False)
    drafter = ModelDrafter(draft.decoder, 4, sampling, target.shape.vocab)
    running = Engine.for_prompts(target.decoder, drafter, sampling, [[0]] * 4, [60] * 4, sources=SOURCES)
    assert_never_waits(running)


def test_an_engine_takes_other_sources():
    """As on a GPU, where captured iterations are used again."""
    target, draft = models_of(LATER)
    drafter = ModelDrafter(draft.decoder, 3, Sampling(), target.shape.vocab)
    running = Engine.for_prompts(target.decoder, drafter, Sampling(), [[0]] * 2, [30] * 2, sources=SOURCES[2:])
    for _ in zip(range(9), running.run(), strict=False):
        pass
    kept = running.cache.source[0].data_ptr()
    running.restart([[0]] * 2, [30] * 2, Sampling(), None, SOURCES[:2])
    found = [[], []]
    for _, emitted in zip(range(20), running.run(), strict=False):
        for row, (accepted, *tokens) in zip(found, emitted, strict=True):
            row.extend(tokens[: accepted + 1])
    plain = sd.generate(target, SOURCES[:2], max_new_tokens=20, stop_tokens=())
    assert [row[:20] for row in found] == [out.token_ids for out in plain]
    assert running.cache.source[0].data_ptr() == kept


@pytest.fixture(scope="module")
def synthetic():
    return make_pair(parse_shape("2+2x48/2h/64", vocab=400), parse_shape("1+1x32/2h/48", vocab=400), 0.7, seed=3)


def test_a_synthetic_pairs_output_and_tar_are_known(synthetic, tmp_path):
    target, draft = (sd.load(folder) for folder in synthetic.save(tmp_path))
    out = sd.generate(target, "any source", draft=draft, lookahead=3, max_new_tokens=390)
    assert out.token_ids == synthetic.walk(0, 390)
    assert out.stats.tar == pytest.approx(synthetic.tar(3), rel=0.05)
    rounded = sd.load_draft(tmp_path / "draft")
    assert sd.generate(target, "any source", draft=rounded, max_new_tokens=390).token_ids == out.token_ids


def test_a_pair_of_the_first_t5_is_scaled():
    pair = make_pair(replace(FIRST, vocab=400), replace(FIRST, vocab=400, layers=1), 0.5)
    assert pair.target.shape.encoder.scaled
    assert sd.generate(pair.target, [9], draft=pair.draft, max_new_tokens=99).token_ids == pair.walk(0, 99)


def test_text_and_stop_tokens(synthetic):
    walk, tokenizer = synthetic.walk(0, 30), byte_tokenizer(400)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    target = replace(synthetic.target, stop_tokens=(walk[10],))
    for draft in (None, synthetic.draft):
        out = sd.generate(target, "read me", draft=draft, max_new_tokens=30)
        assert (out.token_ids, out.finish_reason) == (walk[:11], "stop")
        assert out.text == target.decode(walk[:11])
    began = replace(synthetic.target, start_token=walk[4])
    assert sd.generate(began, "read me", max_new_tokens=9).token_ids == walk[5:14]
    pieces = sd.stream(target, "read me", draft=synthetic.draft)
    assert "".join(piece.text for piece in pieces) == pieces.result.text


def test_the_decoders_context_limits_new_tokens(synthetic):
    short = make_pair(parse_shape("1+1x48/2h/64", vocab=400, context=20), parse_shape("1+1x32/2h/48", vocab=400), 0.7)
    out = sd.generate(short.target, [5] * 100, draft=short.draft, max_new_tokens=50)
    assert (len(out.token_ids), out.finish_reason) == (19, "context")


def test_what_cannot_be_done_is_refused(synthetic):
    with pytest.raises(PromptError, match="513 tokens and synthetic target reads 512; shorten"):
        sd.generate(synthetic.target, [5] * 513)
    plain = make_pair(ModelShape(1, 32, 2, 48, 400), ModelShape(1, 32, 2, 48, 400), 0.5)
    with pytest.raises(OptionError, match="the target is an encoder–decoder and the draft is not"):
        sd.generate(synthetic.target, "a", draft=plain.draft)
    with pytest.raises(OptionError, match="the draft is an encoder–decoder and the target is not"):
        sd.generate(plain.target, "a", draft=synthetic.draft)
    with pytest.raises(OptionError, match="the draft is not; give two models of one kind"):
        make_pair(synthetic.target.shape, plain.draft.shape, 0.5)


@pytest.fixture(scope="module")
def folders(synthetic, tmp_path_factory) -> tuple[str, str]:
    target, draft = synthetic.save(tmp_path_factory.mktemp("t5"))
    return str(target), str(draft)


def test_generate_and_inspect(folders, synthetic, capsys):
    asked = ["generate", "--target", folders[0], "--prompt", "hello", "--max-new-tokens", "20", "--json"]
    assert main([*asked, "--draft", folders[1]]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == synthetic.walk(0, 20)
    assert main([*asked, "--draft", "zoo:2x192"]) == 2
    assert "give two models of one kind" in capsys.readouterr().err
    assert main(["inspect", *folders]) == 0
    assert "2+2x48/2h/64" in capsys.readouterr().out
    assert main(["inspect", "flan-t5-small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["parameters"] == 76_961_152


def test_a_pair_can_be_made(tmp_path, capsys):
    shapes = ["--target-shape", "2+2x32/2h/48", "--draft-shape", "1+1x32/2h/48", "--vocab", "400"]
    assert main(["pair", *shapes, "--out", str(tmp_path / "pair")]) == 0
    assert sd.load(tmp_path / "pair" / "draft").shape.encoder == EncoderShape(1)


COMMANDS = {
    "record": ["--target", "T5", "--prompts", "zoo", "--out", "OUT"],
    "profile": ["--target", "zoo:target", "--drafts", "T5", "--out", "OUT"],
    "study": ["--target", "T5", "--drafts", "T5", "--prompts", "zoo", "--out", "OUT"],
    "accuracy": ["--drafts", "T5", "--limit", "1"],
    "prune": ["--parent", "T5", "--shape", "1x16/2h/16", "--corpus", "OUT", "--tokens", "9", "--out", "OUT"],
    "distill": ["--target", "T5", "--draft", "T5", "--corpus", "OUT", "--tokens", "9", "--out", "OUT"],
    "heads": ["--target", "T5", "--corpus", "OUT", "--tokens", "9", "--out", "OUT"],
    "online": ["--target", "T5", "--draft", "T5", "--prompts", "zoo", "--out", "OUT"],
    "pretrain": ["--shape", "t5-small", "--corpus", "OUT", "--tokens", "9", "--out", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_refuse_it_in_one_line_before_any_work(command: str, folders, tmp_path, capsys):
    out = tmp_path / "out"
    names = {"T5": folders[0], "OUT": str(out)}
    assert main([command, *(names.get(word, word) for word in COMMANDS[command])]) == 2
    said = capsys.readouterr().err
    assert "encoder–decoder" in said
    assert said.count("\n") == 1
    assert "decoder-only model" in said
    assert not out.exists()


def test_commands_that_take_a_trace_refuse_it_too(folders, tmp_path, capsys):
    trace = str(tmp_path / "trace.jsonl")
    asked = ["--target", "zoo:2x192", "--prompts", "zoo", "--limit", "1", "--max-new-tokens", "2", "--out", trace]
    assert main(["record", *asked]) == 0
    for command in (["replay", "--drafts", folders[0]], ["skip-search", "--target", folders[0], "--out", "none.jsonl"]):
        capsys.readouterr()
        assert main([*command, "--trace", trace]) == 2
        assert "encoder–decoder, which only generate and inspect take" in capsys.readouterr().err


def test_text_begins_anew_behind_a_source(synthetic):
    """What the encoder read is not before it, so there is no space to begin with."""
    tokenizer = tokenizer_of("unigram")
    word = next(token for token in tokenizer.get_vocab() if token.startswith("▁") and token[1:])
    start = synthetic.successor.tolist().index(tokenizer.convert_tokens_to_ids(word))
    target = replace(synthetic.target, tokenizer=tokenizer, start_token=start)
    out = sd.generate(target, [9], max_new_tokens=3)
    assert out.text == target.decode(out.token_ids)
    assert out.text.startswith(word[1:])
