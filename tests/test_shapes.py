import json
from dataclasses import replace

import pytest
from conftest import CONFIGS, random_reference

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.shapes.llama import Rope
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_tensors_are_those_of_transformers(kind: str):
    model = random_reference(kind)
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.parameters == model.num_parameters()
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shape.tied:
        del names["lm_head.weight"]
    assert {part.name: part.size for part in shape.stored()} == names


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_survives_the_round_trip(kind: str):
    shape = ModelShape.from_config(CONFIGS[kind].to_dict())
    assert ModelShape.from_config(json.loads(json.dumps(shape.to_config()))) == shape


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("noft-wide-796m", 796.3),
        ("noft-wide-543m", 543.3),
        ("noft-wide-290m", 290.3),
        ("noft-1.3b", 1345.4),
        ("noft-wide-1.3b", 1333.7),
        ("sheared-llama-1.3b", 1345.4),
        ("tiny-llama-1.1b", 1100.0),
        ("llama-7b", 6738.4),
        ("llama-13b", 13015.9),
        ("llama-65b", 65285.7),
        ("llama-2-70b", 68976.6),
        ("llama-3.1-8b", 8030.3),
        ("opt-125m", 125.2),
        ("opt-350m", 331.2),
        ("opt-1.3b", 1315.8),
        ("opt-2.7b", 2651.6),
        ("opt-6.7b", 6658.5),
        ("opt-66b", 65719.7),
    ],
)
def test_the_papers_shapes_have_the_published_parameter_counts(name: str, millions: float):
    assert NAMED[name].parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_table_6_spreads_the_same_parameters_over_fewer_layers():
    counts = [NAMED[name].parameters for name in NAMED if name.startswith("opt-350m")]
    assert len(counts) == 6
    assert max(counts) / min(counts) < 1.04


def test_costs_follow_from_the_shape():
    shape = ModelShape(2, 8, 4, 16, 10, kv_heads=2, head_dim=4)
    layer = 8 * (16 + 8 + 8) + 16 * 8 + 3 * 8 * 16 + 2 * 8
    assert shape.parameters == 2 * layer + 8 + 2 * 80
    assert shape.weight_bytes("bfloat16") == 2 * shape.parameters
    assert shape.pass_bytes() == 4 * (shape.parameters - 80)
    assert replace(shape, tied=True).pass_bytes() == shape.pass_bytes()
    assert shape.kv_bytes_per_token() == 2 * 2 * 2 * 4 * 4
    assert shape.flops_per_token(100) - shape.flops_per_token(0) == 2 * 4 * 16 * 100
    assert replace(shape, window=10, full_layers=1).flops_per_token(100) - shape.flops_per_token(0) == 4 * 16 * 110


def test_old_and_new_rope_fields_mean_the_same():
    old = CONFIGS["llama3-rope"].to_dict()
    scaling = old.pop("rope_parameters")
    old["rope_theta"] = scaling.pop("rope_theta")
    assert ModelShape.from_config(old | {"rope_scaling": scaling}).rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


def test_shapes_can_be_written_briefly():
    assert parse_shape("5x2560/32h/128hd/11008", context=4096) == NAMED["noft-wide-796m"]
    assert str(parse_shape("32x4096/32h/8kv/14336")) == "32x4096/32h/8kv/14336"
    assert parse_shape("OPT-125M") == NAMED["opt-125m"]


@pytest.mark.parametrize(
    "notation", ["", "2x640", "2x640/10h", "0x640/10h/1728", "2x641/10h/1728", "2x640/10h/3kv/1728", "2x33/11h/48"]
)
def test_a_wrong_shape_is_refused(notation: str):
    with pytest.raises(OptionError):
        parse_shape(notation)


LLAMA = CONFIGS["llama"].to_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "'gemma2'.*supported are Llama"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral' is a mixture of 8 experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe' is a mixture of 128 experts"),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"hidden_act": "swiglu_oai"}, "activation 'swiglu_oai'"),
        ({"hidden_size": "64"}, "wrong type"),
        ({"num_hidden_layers": 2.0}, "wrong type"),
        ({"rms_norm_eps": "1e-6"}, "wrong type"),
        ({"rope_parameters": "linear"}, "wrong type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "wrong type"),
        ({"model_type": ["llama"]}, "no model_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], said: str):
    with pytest.raises(UnsupportedModelError, match=said):
        ModelShape.from_config(LLAMA | change)


def test_left_out_fields_have_transformers_defaults():
    config = {
        k: v for k, v in CONFIGS["mistral"].to_dict().items() if k not in ("sliding_window", "max_position_embeddings")
    }
    shape = ModelShape.from_config(config)
    assert (shape.window, shape.context) == (4096, 131072)


def test_named_shapes_take_another_vocabulary():
    assert parse_shape("opt-125m", vocab=400, context=64).vocab == 400
    assert parse_shape("opt-125m").vocab == 50272


def test_a_missing_field_is_named():
    with pytest.raises(UnsupportedModelError, match="lacks 'hidden_size'"):
        ModelShape.from_config({k: v for k, v in LLAMA.items() if k != "hidden_size"})
