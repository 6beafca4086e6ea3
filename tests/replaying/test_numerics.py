"""Models that produce no numbers are an error wherever a trace or a question is read, as they are for the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_heads

import shallowdraft as sd
from shallowdraft.errors import NumericsError
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.replaying.medusa import replay_medusa
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.skip import replay_skip
from shallowdraft.replaying.tree import replay_tree
from shallowdraft.replaying.vocabulary import vocabulary
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, Trace
from shallowdraft.shapes.shape import ModelShape
from shallowdraft.studying.accuracy import Question, score

SHAPE = ModelShape(2, 32, 2, 48, 320, context=96)
OUTPUTS = [Output(str(row), "words", 0, [5, 6, 7 + row], list(range(9, 29)), [-1.0] * 20) for row in range(2)]


def of_question(model: sd.Model, trace: Trace, folder: Path) -> None:
    list(score(model, [Question("Which one?", (" ox", " bee"), 0)]))


READERS: dict[str, Callable[[sd.Model, Trace, Path], object]] = {
    "acceptance": lambda model, trace, _: replay_model(model, trace),
    "drawn acceptance": lambda model, trace, _: replay_model(
        model, Trace(trace.target, trace.vocabulary, Sampling(1.0), trace.outputs)
    ),
    "trees": lambda model, trace, _: replay_tree(model, trace, (4,)),
    "heads": lambda model, trace, _: replay_medusa(model, random_heads(model, 2), "heads", trace, (4,)),
    "skip": lambda model, trace, folder: replay_skip(model, (0, 1), trace, (3,), folder / "skips.jsonl"),
    "accuracy": of_question,
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("reader", READERS)
def test_weights_that_are_no_numbers(reader: str, poison: float, tmp_path: Path):
    for dtype in ("float32", "int8") if reader == "acceptance" else ("float32",):
        model = sd.Model("broken", random_decoder(SHAPE), byte_tokenizer(SHAPE.vocab))
        trace = Trace("target", vocabulary(model.tokenizer, SHAPE.vocab), Sampling(), OUTPUTS)
        model.save(tmp_path / f"sound {dtype}")
        READERS[reader](sd.load(tmp_path / f"sound {dtype}", dtype), trace, tmp_path)
        with torch.no_grad():
            model.decoder.get_parameter("blocks.0.down.weight")[3, 5] = poison
        model.save(tmp_path / dtype)
        with pytest.raises(NumericsError, match="NaN or infinite logits; check the weights"):
            READERS[reader](sd.load(tmp_path / dtype, dtype), trace, tmp_path / dtype)


def test_heads_that_are_no_numbers(tmp_path: Path):
    model = sd.Model("target", random_decoder(SHAPE).pack(), byte_tokenizer(SHAPE.vocab))
    trace = Trace("target", vocabulary(model.tokenizer, SHAPE.vocab), Sampling(), OUTPUTS)
    heads = random_heads(model, 2)
    heads.outer.data[0] = float("nan")
    with pytest.raises(NumericsError, match="target target or its heads"):
        replay_medusa(model, heads, "heads", trace, (4,))
