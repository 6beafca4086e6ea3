"""Every shape that `design` and `profile --shapes auto` propose, for any parent of our families, is one that the parent
can be pruned to, that transformers takes, and that engines take by what their code asks for; some are built.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shallowdraft as sd
from shallowdraft.building.importance import measure_importance
from shallowdraft.building.pruning import carve, choose_parts, layer_candidates, require_reachable
from shallowdraft.building.tokenizer import train_tokenizer
from shallowdraft.exporting.advice import Advice
from shallowdraft.exporting.engines import FAMILIES
from shallowdraft.exporting.export import export
from shallowdraft.models.checkpoint import read_shape
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.profiling.latency_model import shape_of, trial_shapes
from shallowdraft.records import RANDOM
from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.design import enumerate_shapes

VOCABULARY, CONTEXT = 320, 64
TOKENS = torch.arange(80).view(2, 40) * 3 + 7
OPT = {"rope": None, "qkv_bias": True, "out_bias": True, "ffn_bias": True, "activation": "relu", "norm_eps": 1e-5}


@st.composite
def parents(draw: st.DrawFn, *, deepest: int = 13) -> ModelShape:
    """Heads of width 4 to 64, grouped or not, sizes even and odd; only OPT and Qwen2 fix d_model by them."""
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "opt"]))
    layers, kv_heads = draw(st.integers(1, deepest)), draw(st.integers(1, 8))
    head_dim = 2 * draw(st.integers(2, 32))
    heads = kv_heads * (1 if family == "opt" else draw(st.integers(1, 5)))
    d_model = heads * head_dim
    if family not in ("opt", "qwen2"):
        d_model = draw(st.one_of(st.just(d_model), st.integers(1, 40).map(lambda times: times * heads)))
    more: dict[str, Any] = {"tied": draw(st.booleans())}
    if family == "opt":
        more |= OPT | draw(st.sampled_from([{}, {"post_norm": True, "final_norm": False}]))
        more["embed_dim"] = draw(st.one_of(st.just(0), st.integers(1, d_model)))
    elif family == "llama":
        ropes = [Rope(), Rope(500000.0, "llama3", 8.0), Rope(kind="linear", factor=2.0)]
        more["rope"] = draw(st.sampled_from(ropes))
    else:
        more |= {
            "qkv_bias": family == "qwen2",
            "qk_norm": family == "qwen3",
            "window": draw(st.sampled_from([None, 9])),
        }
        if family != "mistral" and more["window"]:
            more["full_layers"] = draw(st.integers(0, layers))
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "context": CONTEXT, "family": family}
    return ModelShape(layers, d_model, heads, draw(st.integers(1, 200)), VOCABULARY, **sizes, **more)


def require_everywhere(parent: ModelShape, shape: ModelShape) -> None:
    """What pruning, our notation, transformers and engines ask of a shape."""
    require_reachable(parent, shape)
    assert shape_of(f"{RANDOM}{shape}", parent) == shape
    assert shape.d_model % shape.heads == 0  # Llama in transformers
    assert shape.heads % shape.kv_heads == 0
    if shape.family in ("opt", "qwen2"):  # vLLM, and transformers for OPT
        assert shape.heads * shape.head_dim == shape.d_model
    config = shape.to_config()
    transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def require_transformers(shape: ModelShape) -> None:
    """Transformers makes the tensors that we write."""
    config = shape.to_config()
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForCausalLM.from_config(made)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {part.name: part.size for part in shape.stored()} == {
        name: size for name, size in tensors.items() if not (shape.tied and name == "lm_head.weight")
    }


def check_proposals(parent: ModelShape, choose_one: Callable[[list[ModelShape]], ModelShape]) -> None:
    proposed = dict.fromkeys([*enumerate_shapes(parent), *trial_shapes(parent)])
    assert parent in proposed
    for shape in proposed:
        require_everywhere(parent, shape)
    require_transformers(choose_one([*proposed]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_proposals_are_loaded_everywhere(data: st.DataObject):
    check_proposals(data.draw(parents()), lambda proposed: data.draw(st.sampled_from(proposed)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_proposals_of_many_parents_are_loaded_everywhere(data: st.DataObject):
    check_proposals(data.draw(parents(deepest=40)), lambda proposed: data.draw(st.sampled_from(proposed)))


@cache
def tokenizer() -> Any:
    syllables = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"]
    words = (f"{first}{second} " for first in syllables for second in syllables)
    return train_tokenizer(iter(["".join(words)]), VOCABULARY)


def check_built(parent: ModelShape, shape: ModelShape) -> None:
    """Prune, save, load by us and by transformers, export."""
    decoder = random_decoder(parent)
    importance = measure_importance(decoder, [TOKENS])
    layers = layer_candidates(importance, shape.layers)[-1]
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        sd.Model("target", decoder, tokenizer()).save(target)
        sd.Model("draft", carve(decoder, shape, choose_parts(parent, shape, importance, layers)), tokenizer()).save(
            draft
        )
        reference = transformers.AutoModelForCausalLM.from_pretrained(draft)
        with torch.inference_mode():
            ours = sd.load(draft, trainable=True).decoder.logits(TOKENS)
            torch.testing.assert_close(ours, reference(TOKENS).logits, rtol=1e-3, atol=1e-3)
        drafting = {"draft": sd.load_draft(draft), "lookahead": 2}
        sd.generate(sd.load(target), TOKENS[0].tolist(), max_new_tokens=4, **drafting)
        for engine in ("vllm", "llama.cpp"):
            windowed = engine == "llama.cpp" and shape.window is not None
            if shape.family in FAMILIES[engine] and not windowed:
                export(str(draft), str(target), engine, Advice(2), Path(name) / engine)
        if (Path(name) / "vllm").exists():
            assert read_shape(Path(name) / "vllm" / "draft") == read_shape(draft)
        if (Path(name) / "llama.cpp").exists():
            tensors = gguf.GGUFReader(Path(name) / "llama.cpp" / "draft.gguf").tensors
            written = sum(int(tensor.n_elements) for tensor in tensors if tensor.name != "rope_freqs.weight")
            assert written == shape.parameters


def draw_built(data: st.DataObject) -> None:
    parent = data.draw(parents(deepest=5))
    proposed = dict.fromkeys([*enumerate_shapes(parent), *trial_shapes(parent)])
    check_built(parent, data.draw(st.sampled_from([*proposed])))


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_proposals_are_pruned_saved_loaded_and_exported(data: st.DataObject):
    draw_built(data)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_proposals_are_pruned_saved_loaded_and_exported(data: st.DataObject):
    draw_built(data)
