"""A drawn trace follows from its seed, prompts and samples alone: not from batches, breaks or other prompts."""

from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.prompts import Prompt
from shallowdraft.replaying.recording import record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, read_trace
from shallowdraft.shapes.shape import ModelShape

SHAPE = ModelShape(2, 32, 2, 48, 320, context=96)
PROMPTS = [("a", Prompt(name, "words", "A word or two" * (1 + len(name)))) for name in ("1", "2", "three")]
PROMPTS += [("b", Prompt("1", "words", "A word or two" * 2))]  # the id and the text of another set's
SAMPLES = 4


@pytest.fixture(scope="module")
def target() -> sd.Model:
    return sd.Model("target", random_decoder(SHAPE, seed=3, scale=1.5).pack(), byte_tokenizer(SHAPE.vocab))


def recorded(
    target: sd.Model, path: Path, prompts: list[tuple[str, Prompt]], batch: int, seed: int = 5
) -> dict[tuple[str, str, int], Output]:
    sampling = Sampling(1.0, top_p=0.98, seed=seed)
    for _ in record(target, prompts, path, max_new_tokens=12, sampling=sampling, samples=SAMPLES, batch=batch):
        pass
    outputs = read_trace(path).outputs
    assert len(outputs) == len(prompts) * SAMPLES
    return {output.key: output for output in outputs}


def test_a_drawn_trace_does_not_depend_on_batches_breaks_or_other_prompts(target: sd.Model, tmp_path: Path):
    whole = recorded(target, tmp_path / "whole.jsonl", PROMPTS, 3)
    assert len({tuple(output.output) for output in whole.values()}) == len(whole)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    for batch in (1, 8):
        assert recorded(target, tmp_path / f"{batch}.jsonl", PROMPTS, batch) == whole
    for count in range(1, len(lines)):
        stopped = tmp_path / f"stopped after {count}.jsonl"
        stopped.write_text("".join(lines[:count]) + lines[count][:20])  # as a kill leaves it
        assert recorded(target, stopped, PROMPTS, 1 + count % 5) == whole
    some = recorded(target, tmp_path / "some.jsonl", PROMPTS[1:3], 8)
    assert some == {key: output for key, output in whole.items() if key in some}
    other = recorded(target, tmp_path / "other.jsonl", PROMPTS, 3, seed=6)
    assert not {tuple(output.output) for output in other.values()} & {tuple(one.output) for one in whole.values()}
