"""T5 against transformers: random configs, passes of any size, sources of different lengths, saved folders."""

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import PACKINGS
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

import shallowdraft as sd
from shallowdraft.decoding.state import new_source
from shallowdraft.errors import CheckpointError, OptionError, UnsupportedModelError
from shallowdraft.models import seq2seq
from shallowdraft.models.cache import CrossCache
from shallowdraft.models.checkpoint import check_folder, load_decoder
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.tree import Tree, TreePass
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape, child_shape
from shallowdraft.shapes.t5 import EncoderShape

TOLERANCE = 1e-4
CPU = torch.device("cpu")
SEEDS = range(6)
SOURCES = [[5, 17, 3, 88, 41, 9, 1], [60, 1], [(7 * n) % 90 + 2 for n in range(40)]]
PASSES = ([50], [1] * 50, [20, 1, 2, 7, 1, 19])


def random_config(seed: int) -> T5Config:
    """Return a random config: T5 1.0 for even seeds, 1.1 for odd ones."""
    draw = random.Random(seed)
    first = {"feed_forward_proj": draw.choice(["relu", "gelu"])}
    later = {"feed_forward_proj": draw.choice(["gated-gelu", "gated-silu"]), "tie_word_embeddings": False}
    return T5Config(
        vocab_size=97,
        d_model=draw.choice([32, 48, 64]),
        d_kv=draw.choice([8, 16, 24, 32]),
        d_ff=draw.choice([40, 96, 112]),
        num_layers=draw.randint(1, 3),
        num_decoder_layers=draw.randint(1, 3),
        num_heads=draw.choice([1, 3, 4]),
        relative_attention_num_buckets=draw.choice([4, 8, 32]),
        relative_attention_max_distance=draw.choice([17, 30, 128]),
        decoder_start_token_id=draw.choice([0, 5]),
        eos_token_id=1,
        **(later if seed % 2 else first),
    )


def random_t5(seed: int, *, untied: bool = False) -> T5ForConditionalGeneration:
    """Return a T5 with random norms and biases; transformers 5 ties every head, but published 1.1 models are untied."""
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(random_config(seed)).eval()
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "relative_attention_bias" in name:
                parameter += torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 1.0)
    return model


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function from a seed to a folder saved by transformers; odd seeds have an untied head."""
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            made[seed] = tmp_path_factory.mktemp(f"t5-{seed}")
            random_t5(seed, untied=bool(seed % 2)).save_pretrained(made[seed])
        return made[seed]

    return make


@pytest.fixture(scope="module")
def written() -> torch.Tensor:
    return torch.randint(0, 97, (3, 50), generator=torch.Generator().manual_seed(3))


def reference_logits(model: T5ForConditionalGeneration, written: torch.Tensor) -> torch.Tensor:
    source = new_source(SOURCES, CPU)
    mask = (torch.arange(source.tokens.shape[1]) < source.length[:, None]).long()
    with torch.inference_mode():
        return model(input_ids=source.tokens, attention_mask=mask, decoder_input_ids=written).logits


def logits_in_passes(decoder: Decoder, sources: list[list[int]], written: torch.Tensor, sizes) -> torch.Tensor:
    rows, length = written.shape
    cache, results, start = decoder.new_cache(rows, length + 5), [], 0
    with torch.inference_mode():
        decoder.read_source(new_source(sources, CPU), cache)
        for size in sizes:
            positions = torch.arange(start, start + size).expand(rows, -1)
            results.append(decoder.head(decoder(written[:, start : start + size], positions, cache, start + size)))
            start += size
    return torch.cat(results, 1)


def load_packed(folder: Path, packing: str = "none"):
    return load_decoder(folder, dtype=torch.float32, device=CPU).pack(packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_at_every_position(seed: int, packing: str, t5_folder, written: torch.Tensor):
    expected = reference_logits(random_t5(seed, untied=bool(seed % 2)), written)
    decoder = load_packed(t5_folder(seed), packing)
    for sizes in PASSES:
        actual = logits_in_passes(decoder, SOURCES, written, sizes)
        assert (actual - expected).abs().max() < TOLERANCE, sizes


def test_a_head_that_transformers_tied_is_tied(tmp_path: Path, written: torch.Tensor):
    """Transformers 5 makes a T5 1.1 without an untied head from a config alone."""
    random_t5(1).save_pretrained(tmp_path)
    decoder = load_packed(tmp_path)
    assert decoder.shape.tied
    assert not decoder.shape.encoder.scaled
    actual = logits_in_passes(decoder, SOURCES, written, [50])
    assert (actual - reference_logits(random_t5(1), written)).abs().max() < TOLERANCE


def wrong_buckets(away: torch.Tensor, count: int, farthest: int) -> torch.Tensor:
    return away.clamp(max=count - 1)


def no_mask(cache: CrossCache, kv: torch.Tensor, mask: torch.Tensor) -> None:
    cache.source = kv, torch.zeros_like(mask)


@pytest.mark.parametrize(
    ("where", "name", "wrong"), [(seq2seq, "_buckets", wrong_buckets), (CrossCache, "write_source", no_mask)]
)
def test_wrong_buckets_and_unmasked_sources_are_caught(where, name: str, wrong, t5_folder, written, monkeypatch):
    monkeypatch.setattr(where, name, wrong)
    actual = logits_in_passes(load_packed(t5_folder(0)), SOURCES, written, [50])
    assert (actual - reference_logits(random_t5(0), written)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (4, 17), (8, 30), (64, 500)])
def test_every_distance_falls_into_transformers_bucket(buckets: int, farthest: int):
    away = torch.arange(3000)
    expected = T5Attention._relative_position_bucket(-away, False, buckets, farthest)
    assert torch.equal(seq2seq._buckets(away, buckets, farthest), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_40_greedy_tokens(seed: int, t5_folder):
    reference = random_t5(seed, untied=bool(seed % 2))
    source = new_source(SOURCES, CPU)
    mask = (torch.arange(source.tokens.shape[1]) < source.length[:, None]).long()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    options["use_cache"] = False  # transformers' has a layer for each of the encoder's, even where the decoder has more
    expected = reference.generate(source.tokens, attention_mask=mask, **options)
    outs = sd.generate(sd.load(t5_folder(seed)), SOURCES, max_new_tokens=40, stop_tokens=())
    assert [out.token_ids for out in outs] == expected[:, 1:].tolist()


def test_a_source_does_not_depend_on_its_neighbours(t5_folder):
    model = sd.load(t5_folder(3))
    together = sd.generate(model, SOURCES, max_new_tokens=20)
    assert [sd.generate(model, source, max_new_tokens=20).token_ids for source in SOURCES] == [
        out.token_ids for out in together
    ]
    assert len({tuple(out.token_ids) for out in together}) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_folder_we_saved_gives_transformers_the_same_logits(seed: int, t5_folder, written, tmp_path: Path):
    model = sd.load(t5_folder(seed))
    assert (model.start_token, model.stop_tokens) == (random_config(seed).decoder_start_token_id, (1,))
    model.save(tmp_path)
    again = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    expected = reference_logits(random_t5(seed, untied=bool(seed % 2)), written)
    assert (reference_logits(again, written) - expected).abs().max() < 1e-6
    ours = sd.load(tmp_path)
    assert (ours.shape, ours.start_token, ours.stop_tokens) == (model.shape, model.start_token, (1,))


@pytest.mark.parametrize("seed", [0, 1])
def test_old_files_hold_some_tensors_more(seed: int, t5_folder, tmp_path: Path):
    """Published T5s hold the embeddings twice, a bias that nothing reads, and for 1.1 a config that says untied."""
    model, bias = random_t5(seed, untied=bool(seed % 2)), "EncDecAttention.relative_attention_bias.weight"
    state = model.state_dict() | {f"decoder.block.0.layer.1.{bias}": torch.ones(3, 4)}
    assert "encoder.embed_tokens.weight" in state
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = model.config.to_dict() | {"tie_word_embeddings": seed == 0, "n_positions": 300}
    del config["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    actual, expected = (load_packed(folder).dense_state() for folder in (tmp_path, t5_folder(seed)))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert check_folder(tmp_path).encoder.context == 300


def test_a_tensor_too_many_is_still_an_error(t5_folder, tmp_path: Path):
    tensors = load_file(t5_folder(0) / "model.safetensors")
    save_file(tensors | {"lora_A": torch.ones(9)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((t5_folder(0) / "config.json").read_text())
    with pytest.raises(CheckpointError, match="lora_A not part of a t5 model"):
        sd.load(tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_shapes_are_those_of_transformers(seed: int):
    model = random_t5(seed)
    shape = ModelShape.from_config(json.loads(json.dumps(model.config.to_dict(), default=str)))
    assert shape.parameters == model.num_parameters()
    spare = shape.spare()
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in spare}
    assert {part.name: part.size for part in shape.stored()} == names
    assert ModelShape.from_config(shape.to_config()) == shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("flan-t5-small", 76_961_152),
        ("flan-t5-base", 247_577_856),
        ("flan-t5-large", 783_150_080),
        ("flan-t5-xl", 2_849_757_184),
        ("flan-t5-xxl", 11_135_332_352),
    ],
)
def test_published_parameter_counts(name: str, parameters: int):
    assert NAMED[name].parameters == parameters


def test_costs_leave_out_what_only_a_source_passes_through():
    shape = parse_shape("3+2x8/2h/16", vocab=10)
    ffn, matrix, norm, biases = 3 * 8 * 16, 64, 8, 32 * 2
    encoder = 3 * (4 * matrix + ffn + 2 * norm) + norm + biases
    decoder = 2 * (8 * matrix + ffn + 3 * norm) + norm + biases
    assert str(shape) == "3+2x8/2h/16"
    assert shape.parameters == 2 * 80 + encoder + decoder
    assert shape.pass_parameters == 80 + decoder - 2 * 2 * matrix
    assert shape.kv_bytes_per_token() == 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "umt5"}, "'umt5' is another architecture; supported are .* T5"),
        ({"model_type": "mt5"}, "'mt5' is another architecture"),
        ({"feed_forward_proj": "gated-gelu-fast"}, "'gated-gelu-fast' is not supported"),
        ({"feed_forward_proj": "gated-swish2"}, "activation 'swish2'"),
        ({"num_layers": 2.0}, "wrong type"),
        ({"d_model": "64"}, "wrong type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], said: str):
    with pytest.raises(UnsupportedModelError, match=said):
        ModelShape.from_config(NAMED["flan-t5-small"].to_config() | change)


@pytest.mark.parametrize("notation", ["0+2x32/2h/48", "2+2x32/4h/2kv/48", "2+x32/2h/48"])
def test_a_wrong_shape_is_refused(notation: str):
    with pytest.raises(OptionError):
        parse_shape(notation)


def test_an_encoder_decoder_cannot_be_pruned_to_a_shape_without_one():
    with pytest.raises(OptionError, match="one has an encoder"):
        child_shape(NAMED["llama-7b"], NAMED["t5-small"])
    with pytest.raises(OptionError, match="4 buckets"):
        EncoderShape(2, buckets=2)


@pytest.mark.parametrize("seed", [0, 3])
def test_packing_only_permutes(seed: int, t5_folder):
    plain = load_packed(t5_folder(seed)).dense_state()
    for packing in PACKINGS:
        actual = load_packed(t5_folder(seed), packing).dense_state()
        assert actual.keys() == plain.keys()
        assert all(torch.equal(actual[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_weights_stay_close(t5_folder, written: torch.Tensor, dtype: str):
    seed = next(seed for seed in SEEDS if random_config(seed).d_kv % 16 == 0)  # for the kernel
    if dtype == "int8" and "panels" not in PACKINGS:
        pytest.skip("no C compiler on this machine")
    exact, rounded = (
        logits_in_passes(sd.load(t5_folder(seed), dtype=one).decoder, SOURCES, written, [50]).float()
        for one in (None, dtype)
    )
    assert (rounded - exact).norm() / exact.norm() < 0.1


TREE = Tree((0, 0, 0, 1, 1, 2, 3, 4, 8))


def tree_error(model: sd.Model) -> float:
    """Return the largest difference between logits after the nodes of a tree and those of their paths read alone."""
    draws = torch.Generator().manual_seed(0)
    text, nodes = torch.randint(0, 97, (11,), generator=draws), torch.randint(0, 97, (9,), generator=draws)
    decoder, part = model.decoder, TREE.on(CPU).part(torch.tensor([10]), 0, 10)
    cache = decoder.new_cache(1, 40)
    alone = []
    with torch.inference_mode():
        decoder.read_source(new_source(SOURCES[:1], CPU), cache)
        decoder(text[None], torch.arange(11)[None], cache, 11)
        results = decoder.head(decoder(torch.cat((text[-1:], nodes))[None], part.positions, cache, 40, part))[0]
    for path in TREE.paths:
        tokens = torch.cat((text, nodes[[node - 1 for node in path]]))[None]
        alone.append(logits_in_passes(decoder, SOURCES[:1], tokens, [tokens.shape[1]])[0, -1])
    return float((results - torch.stack(alone)).abs().max())


def test_every_path_of_a_tree_is_as_if_it_were_alone(t5_folder, monkeypatch):
    model = sd.load(t5_folder(4))
    assert tree_error(model) < TOLERANCE
    slots = lambda self, span: torch.arange(span).expand(1, 1, -1)  # noqa: E731
    monkeypatch.setattr(TreePass, "slot_positions", slots)  # wrong: as if nodes stood where they lie
    assert tree_error(model) > 100 * TOLERANCE
