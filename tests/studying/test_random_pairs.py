"""From random small checkpoints to a verdict, as a user would: what is replayed is what happens live, and no draft that
is slower is said to pay.

Checkpoints of every family are written by transformers: targets and drafts with contexts of their own, short ones among
them, heads of width 4 to 64, vocabularies padded or not.
"""

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shallowdraft.cli import main
from shallowdraft.models.synthetic import byte_tokenizer

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
}
TOKENS = 300
PROMPT_LENGTHS = (5, 20, 40, 60, 90, 120)


@dataclass(frozen=True)
class Sizes:
    """A random checkpoint's config, as far as all families have it."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int


@st.composite
def sizes(draw: st.DrawFn, family: str | None = None, contexts: tuple[int, ...] = (160, 256, 512)) -> Sizes:
    heads = draw(st.sampled_from((1, 2, 4, 8)))
    return Sizes(
        family or draw(st.sampled_from(sorted(FAMILIES))),
        draw(st.integers(1, 3)),
        heads,
        draw(st.sampled_from([count for count in (1, 2, 4, 8) if count <= heads])),
        draw(st.sampled_from((4, 8, 16, 24, 32, 64))),
        draw(st.sampled_from((16, 48, 96, 176))),
        draw(st.sampled_from((TOKENS, 304, 320, 384))),
        draw(st.sampled_from(contexts)),
    )


@dataclass(frozen=True)
class PairOfCheckpoints:
    """A target and a draft, and how the draft came about."""

    target: Sizes
    draft: Sizes
    related: bool
    """Whether the draft is the target with some noise, so that much of what it proposes is accepted."""


@st.composite
def pairs(draw: st.DrawFn) -> PairOfCheckpoints:
    target = draw(sizes())
    short = (64, 96, 128, 256, 512)
    if draw(st.booleans()):
        draft = draw(sizes(contexts=short))
        return PairOfCheckpoints(target, draft, related=False)
    changed = {"context": draw(st.sampled_from(short)), "vocab": target.vocab}
    return PairOfCheckpoints(target, Sizes(**{**vars(target), **changed}), related=True)


def config(one: Sizes) -> dict:
    width = one.heads * one.head_dim
    return {
        "vocab_size": one.vocab,
        "hidden_size": width,
        "num_hidden_layers": one.layers,
        "num_attention_heads": one.heads,
        "max_position_embeddings": one.context,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | (
        {"ffn_dim": one.ffn, "init_std": 0.3, "word_embed_proj_dim": width}
        if one.family == "opt"
        else {
            "intermediate_size": one.ffn,
            "num_key_value_heads": one.kv_heads,
            "head_dim": one.head_dim,
            "initializer_range": 0.3,
        }
    )


def fresh(one: Sizes, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    kind, model = FAMILIES[one.family]
    return model(kind(**config(one))).eval()


def noisy_copy(target: PreTrainedModel, context: int) -> PreTrainedModel:
    draft = copy.deepcopy(target)
    draft.config.max_position_embeddings = context
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter += torch.randn_like(parameter) * parameter.std() * 0.03
        if isinstance(draft, OPTForCausalLM):  # positions are learned: as many as the context, and two before them
            places = draft.model.decoder.embed_positions
            learned = places.weight[: context + 2]
            places.weight = torch.nn.Parameter(torch.nn.functional.pad(learned, (0, 0, 0, context + 2 - len(learned))))
    return draft


def save(pair: PairOfCheckpoints, folder: Path) -> None:
    target = fresh(pair.target, 0)
    draft = noisy_copy(target, pair.draft.context) if pair.related else fresh(pair.draft, 1)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        byte_tokenizer(TOKENS).save_pretrained(folder / name)
    texts = ["ab, cd. "[: 3 + number] * 40 for number in range(len(PROMPT_LENGTHS))]
    lines = [
        json.dumps({"id": str(number), "prompt": text[:length]})
        for number, (text, length) in enumerate(zip(texts, PROMPT_LENGTHS, strict=True))
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def judged(pair: PairOfCheckpoints, capsys: pytest.CaptureFixture[str], new_tokens: int) -> tuple[float, float] | None:
    """Predicted and measured speed-up where both intervals leave 1 out; everything else is checked here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(pair, folder)
        target, draft, trace = str(folder / "target"), str(folder / "draft"), str(folder / "trace.jsonl")
        prompts = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", str(new_tokens)]

        def run(*arguments: str) -> dict:
            capsys.readouterr()
            status = main(list(arguments))
            said = capsys.readouterr()
            assert status == 0, f"{arguments}: {said.err}"
            assert "Traceback" not in said.err
            return json.loads(said.out) if "--json" in arguments else {}

        run("record", "--target", target, *prompts, "--out", trace)
        replayed = run("replay", "--trace", trace, "--drafts", draft, "--json")["drafts"][0]
        profile = ["--lookaheads", "1,3", "--rounds", "1", "--out", str(folder / "profile.jsonl")]
        run("profile", "--target", target, "--drafts", draft, *profile)
        predicted = run("predict", "--trace", trace, "--profile", str(folder / "profile.jsonl"), "--json")
        assert predicted["predictions"][0]["verdict"]
        study = ["--lookaheads", "1:3", "--rounds", "2", "--out", str(folder / "run")]
        (row,) = run("study", "--target", target, "--drafts", draft, *prompts, *study, "--json")["rows"]
    live = row["live"]
    if live is None:
        return None
    assert live["lossless"]
    tar = row["prediction"]["tar"]
    if tar == pytest.approx(replayed["tar"][str(row["lookahead"])]):  # no prompt was left out for a stall
        assert live["tar"] == pytest.approx(tar, abs=1e-9)
    low, high = row["predicted_interval"]
    if low <= 1 <= high or live["interval"][0] <= 1 <= live["interval"][1]:
        return None
    return row["prediction"]["speed_up"], live["speed_up"]


def check(pair: PairOfCheckpoints, capsys: pytest.CaptureFixture[str], new_tokens: int = 32) -> None:
    speeds = judged(pair, capsys, new_tokens)
    if speeds:
        predicted, measured = speeds
        assert not (predicted > 1 > measured), f"said to pay {predicted:.2f}x, is {measured:.2f}x"


@given(pair=pairs(), new_tokens=st.sampled_from((24, 40, 64)))
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_few_random_pairs(capsys: pytest.CaptureFixture[str], pair: PairOfCheckpoints, new_tokens: int):
    check(pair, capsys, new_tokens)


@pytest.mark.slow
@given(pair=pairs(), new_tokens=st.sampled_from((24, 40, 64)))
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_two_hundred_random_pairs(capsys: pytest.CaptureFixture[str], pair: PairOfCheckpoints, new_tokens: int):
    check(pair, capsys, new_tokens)
