"""Checkpoints that transformers itself wrote from random configs, one for each supported kind of model."""

import copy
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import transformers
from transformers import (
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import shallowdraft as sd
from shallowdraft.kernels import cpu
from shallowdraft.models.heads import Heads, fresh_heads

PACKINGS = ["none", "onednn", "panels"] if cpu.library() else ["none", "onednn"]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GATED = SIZES | {"intermediate_size": 112, "initializer_range": 0.2}
OPT = SIZES | {"ffn_dim": 112, "init_std": 0.2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GATED),
    "llama-gqa-tied-head_dim": LlamaConfig(**GATED, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**GATED, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "llama-biases-linear-rope": LlamaConfig(**GATED, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR_ROPE),
    "mistral": MistralConfig(**GATED, num_key_value_heads=2, sliding_window=None),
    "mistral-window": MistralConfig(**GATED, num_key_value_heads=2, sliding_window=16),
    "qwen2": Qwen2Config(**GATED, num_key_value_heads=2),
    "qwen2-window": Qwen2Config(
        **GATED, num_key_value_heads=1, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**GATED, num_key_value_heads=2, head_dim=32),
    "qwen3-tied": Qwen3Config(**GATED, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True),
    "opt": OPTConfig(**OPT),
    "opt-untied": OPTConfig(**OPT, tie_word_embeddings=False),
    "opt-350m": OPTConfig(**OPT, do_layer_norm_before=False, word_embed_proj_dim=32),
}


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    """One thread a worker: the models are tiny and the workers fill the cores."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def random_reference(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: anything but ones and zeros
                parameter += torch.randn_like(parameter) * 0.1
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A function from a kind to the folder that transformers saved it to."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            random_reference(kind).save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def pair(folder):
    """A function from a kind to a target and a draft: the target plus noise, so that they agree about half the time."""
    made: dict[tuple[str, float], tuple[sd.Model, sd.Model]] = {}

    def make(kind: str, noise: float = 0.05) -> tuple[sd.Model, sd.Model]:
        if (kind, noise) not in made:
            made[kind, noise] = sd.load(folder(kind)), noisy(sd.load(folder(kind)), noise)
        return made[kind, noise]

    return make


def noisy(model: sd.Model, noise: float, *, pack: bool = True) -> sd.Model:
    """The model with every matrix moved by a share of its own spread."""
    from shallowdraft.models.checkpoint import assemble

    random = torch.Generator().manual_seed(1)
    state = {name: tensor.clone() for name, tensor in model.decoder.dense_state().items()}
    for tensor in state.values():
        if tensor.dim() > 1:
            tensor += torch.randn(tensor.shape, generator=random) * tensor.std() * noise
    decoder = assemble(model.shape, state)
    return sd.Model(f"{model.name} with noise", decoder.pack() if pack else decoder, model.tokenizer)


def random_heads(target: sd.Model, count: int) -> Heads:
    """Heads that have learned nothing, and guess something else each."""
    heads = fresh_heads(target.decoder, count)
    random = torch.Generator().manual_seed(2)
    torch.nn.init.normal_(heads.outer, std=0.1, generator=random)
    return heads.requires_grad_(False)
