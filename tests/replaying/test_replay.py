"""Replay against the live engine: the same counts under greedy decoding, the same expectation under sampling."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import shallowdraft as sd
from shallowdraft import cost
from shallowdraft.models.synthetic import make_pair, random_decoder
from shallowdraft.models.tree import Tree
from shallowdraft.models.vocabulary import compare
from shallowdraft.prompts import Prompt
from shallowdraft.replaying.iterations import kept_by_iteration
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.recording import record
from shallowdraft.replaying.tree import replay_tree
from shallowdraft.replaying.vocabulary import fits, vocabulary
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace, read_trace
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape


def trace_of(target: sd.Model, prompts: list[Prompt], path: Path, **options) -> Trace:
    options = {"max_new_tokens": 24, "sampling": Sampling()} | options
    for _ in record(target, [("words", prompt) for prompt in prompts], path, **options):
        pass
    return read_trace(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[sd.Model, sd.Model]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512)
    target, draft = (sd.load(path) for path in make_pair(target, draft, 0.8).save(folder))
    return target, draft


PROMPTS = [Prompt(str(number), "words", f"Prompt {number} is about {7 * number}") for number in range(10)]


@pytest.mark.parametrize("draft_context", [2048, 40, 30])
def test_greedy_replay_is_the_engines_count_iteration_by_iteration(
    pair: tuple[sd.Model, sd.Model], tmp_path: Path, draft_context: int
):
    target, draft = pair
    decoder = random_decoder(replace(draft.shape, context=draft_context), seed=0)
    decoder.load_state_dict(random_state(draft))
    draft = replace(draft, decoder=decoder.pack())
    trace = trace_of(target, PROMPTS, tmp_path / "trace.jsonl", max_new_tokens=40)
    replay = replay_model(draft, trace)
    for lookahead in range(1, 13):
        live = [
            sd.generate(target, output.prompt, draft=draft, lookahead=lookahead, max_new_tokens=40)
            for output in trace.outputs
        ]
        assert [run.token_ids for run in live] == [output.output for output in trace.outputs]
        counts = [
            kept_by_iteration(accepted > 0.5, lookahead, room)
            for accepted, room in zip(replay.acceptance, replay.room, strict=True)
        ]
        assert [run.accepted_by_iteration for run in live] == counts
        whole = sd.total([run.stats for run in live], one_batch=False)
        assert replay.tar()[lookahead] == pytest.approx(whole.tar)
        assert replay.counts.acceptance_by_position(lookahead).tolist() == pytest.approx(
            list(whole.acceptance_by_position)
        )
    trees = replay_tree(draft, trace, (6,))
    options = {"draft": draft, "drafter": "tree", "tree": Tree(trees.candidate(6).tree), "max_new_tokens": 40}
    live = [sd.generate(target, output.prompt, **options) for output in trace.outputs]
    assert [run.accepted_by_iteration for run in live] == trees.kept_by_iteration(6)
    shares = sd.total([run.stats for run in live], one_batch=False).acceptance_by_position
    assert trees.counts.acceptance_by_position(trees.candidate(6).lookahead).tolist() == pytest.approx(list(shares))


def random_state(model: sd.Model) -> dict[str, torch.Tensor]:
    return model.decoder.dense_state()


TARGET = ModelShape(2, 16, 2, 24, 12, kv_heads=1, context=64)
DRAFT = ModelShape(1, 12, 2, 16, 12, context=64)
LENGTH, LIVE, RECORDED = 13, 2000, 2000


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (0.6, None, None), (1.3, 6, 0.9), (0.8, None, 0.7)]
)
def test_sampled_replay_is_what_live_runs_give_on_average(
    tmp_path: Path, temperature: float, top_k: int | None, top_p: float | None
):
    target = sd.Model("target", random_decoder(TARGET, seed=11, scale=1.5).pack())
    draft = sd.Model("draft", random_decoder(DRAFT, seed=12, scale=1.5).pack())
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    outputs = sd.generate(target, [[1, 2, 3]] * RECORDED, max_new_tokens=LENGTH, **sampling, seed=7)
    # through a file, as a user would
    trace = recorded(target, [run.token_ids for run in outputs], Sampling(**sampling), tmp_path)
    replay = replay_model(draft, trace)
    inverted = replace(replay, acceptance=[inverse(row) for row in replay.acceptance])  # as if p and q had been swapped
    for lookahead in (1, 3, 6):
        runs = sd.generate(
            target, [[1, 2, 3]] * LIVE, draft=draft, lookahead=lookahead, max_new_tokens=LENGTH, **sampling, seed=99
        )
        iterations = np.array([run.stats.iterations for run in runs])
        expected = (LENGTH - 1) / replay.tar()[lookahead]
        spread = iterations.std() / np.sqrt(LIVE) + replay.counts.iterations[:, 0].std() / np.sqrt(RECORDED)
        assert abs(iterations.mean() - expected) < 2.58 * spread
        # what must be caught: rates multiplied as if tokens were independent, and the ratio upside down
        rate = np.concatenate(replay.acceptance).mean()
        assert lookahead == 1 or abs((LENGTH - 1) / cost.independent_tar(rate, lookahead) - iterations.mean()) > spread
        assert abs((LENGTH - 1) / inverted.tar()[lookahead] - iterations.mean()) > 2.58 * spread


def inverse(accepted: np.ndarray) -> np.ndarray:
    return np.where(accepted < 1, 1.0, 0.5)


def recorded(target: sd.Model, outputs: list[list[int]], sampling: Sampling, folder: Path) -> Trace:
    from dataclasses import asdict

    from shallowdraft.records import Records
    from shallowdraft.replaying.recording import _likelihoods
    from shallowdraft.replaying.vocabulary import vocabulary
    from shallowdraft.runs.trace import KIND, Output

    about = {
        "target": "t",
        "vocabulary": vocabulary(None, target.shape.vocab),
        "sampling": asdict(sampling),
        "max_new_tokens": LENGTH,
    }
    file = Records.open(folder / "trace.jsonl", KIND, about)
    rows = [Output(str(number), "s", 0, [1, 2, 3], tokens) for number, tokens in enumerate(outputs)]
    lines = []
    for row in rows[:5]:  # the file's own way for a few, in memory for the rest: fsync takes its time
        p = torch.cat(list(_likelihoods(target, row, sampling)))
        file.append(asdict(replace(row, logprobs=p.log().tolist())))
    trace = read_trace(folder / "trace.jsonl")
    lines = [replace(row, logprobs=torch.cat(list(_likelihoods(target, row, sampling))).log().tolist()) for row in rows]
    assert trace.outputs == lines[:5]
    return replace(trace, outputs=lines)


def test_a_draft_without_the_tokens_that_were_added_to_its_target_fits(tmp_path: Path):
    """Transformers adds a token to the tokenizer of a Qwen2; a draft with another token in its place does not fit."""
    words = {f"w{index}": index for index in range(30)}

    def tokenizer(*added: str) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
        tokenizer.add_tokens(list(added))
        return tokenizer

    decoder = random_decoder(parse_shape("1x32/2h/48", vocab=40))
    recorded = vocabulary(tokenizer("<end>"), 40)
    for added, expected in (((), True), (("<end>",), True), (("<end>", "<more>"), True), (("<other>",), False)):
        draft = sd.Model("draft", decoder, tokenizer(*added))
        assert fits(recorded, draft) == expected
        relation = compare(words | {"<end>": 30}, draft.tokenizer.get_vocab(), 40, 40).relation
        assert (relation != "different") == expected  # what live decoding says of the pair
