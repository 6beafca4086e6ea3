"""The recipe of the zoo, on a corpus and sizes that take seconds; and that what ships comes from it."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.models import zoo

ROOT = Path(__file__).parent.parent
SMALL = """
[tokenizer]
vocab = 280
[target]
shape = "3x32/2h/48"
context = 128
[target.pretrain]
tokens = 8192
batch_tokens = 512
sequence = 64
learning_rate = 4e-3
[target.unloop]
tokens = 1024
batch_tokens = 512
sequence = 64
learning_rate = 2e-4
[target.unlikelihood]
rows = 4
prompt = 16
length = 32
run = 4
weight = 1.0
[generated]
tokens = 4096
prompt = 16
length = 48
rows = 24
[objective]
name = "hybrid"
[learning_rates]
factor = 1.0
[distil]
tokens = 30720
batch_tokens = 512
sequence = 64
[[drafts]]
name = "one"
shape = "1x32/2h/48"
method = "importance"
[[drafts]]
name = "masks"
shape = "1x32/2h/24"
method = "learned masks, no distillation"
[[drafts]]
name = "carved"
shape = "1x32/2h/24"
method = "importance, no distillation"
[[drafts]]
name = "scratch"
shape = "1x32/2h/24"
method = "from scratch"
"""


def test_the_recipe_builds_a_target_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words, corpus = random.Random(0), tmp_path / "corpus"
    corpus.mkdir()
    for name in ("animals.jsonl", "animals-val.jsonl"):
        texts = [
            " ".join(words.choices(["the cat", "a dog", "runs", "sleeps", "sings", "and"], k=400)) for _ in range(40)
        ]
        rows = [{"text": text, "source": "somewhere/else@1:file", "license": "MIT"} for text in texts]
        (corpus / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.toml").write_text(SMALL)
    command = [sys.executable, "recipes/zoo.py", "--corpus", str(corpus), "--recipe", str(tmp_path / "small.toml")]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests run beside this one
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "out")
    assert zoo.names() == ["target", "carved", "masks", "one", "scratch"]
    for name in zoo.names():
        card = zoo.card(name)
        assert str(sd.load(f"zoo:{name}").shape) == card["shape"]
        assert card["recipe"] == digest(tomllib.loads(SMALL), name)
        assert card["data"] == [{"domain": "animals", "source": "somewhere/else", "license": "MIT", "documents": 80}]
    assert zoo.card("one")["held_out"]["acceptance"] > zoo.card("carved")["held_out"]["acceptance"]
    again = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert "loss" not in again.stdout  # everything was there


def test_repeats_are_tokens_that_end_a_run_seen_before():
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        import torch
        from zoo import repeats
    finally:
        sys.path.pop(0)
    text = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 2, 3, 4, 5]])
    assert repeats(text, 3).int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]]


def digest(config: dict, name: str) -> str:
    """The hash of what a model depends on: of the target, its own section; of a draft, all but the other drafts."""
    parts = ["tokenizer", "target"]
    content = {part: config[part] for part in parts}
    if name != "target":
        content = {part: value for part, value in config.items() if part != "drafts"}
        content["draft"] = next(draft for draft in config["drafts"] if draft["name"] == name)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def loops(tokens: list[int]) -> bool:
    """Whether the last half repeats with a period of up to 16 tokens."""
    tail = tokens[len(tokens) // 2 :]
    return any(tail[period:] == tail[:-period] for period in range(1, 17))


def test_loops():
    assert loops([5, 6, *[1, 2, 3] * 20])
    assert not loops(list(range(64)))


@pytest.mark.skipif(not zoo.names(), reason="the zoo is not built")
class TestWhatShips:
    def test_it_comes_from_the_recipe(self):
        config = tomllib.loads((ROOT / "recipes" / "zoo.toml").read_text(encoding="utf-8"))
        assert len(zoo.names()) >= 7
        assert {draft["name"] for draft in config["drafts"]} | {"target"} == set(zoo.names())
        for name in zoo.names():
            assert zoo.card(name)["recipe"] == digest(config, name)
            assert zoo.card(name)["data"]
            assert (name == "target") == ("target" in name)
        assert sum(file.stat().st_size for file in zoo.FOLDER.rglob("*")) < 60e6

    def test_the_heads_guess_ahead(self):
        target = sd.load("zoo:target")
        prompt, heads = "Once upon a time", sd.load_heads(target)
        guessed = sd.generate(target, prompt, drafter="medusa", heads=heads, max_new_tokens=64, stop_tokens=())
        assert guessed.token_ids == sd.generate(target, prompt, max_new_tokens=64, stop_tokens=()).token_ids
        assert guessed.stats.tar > 1.3

    def test_the_target_is_deep_and_its_drafts_fit(self):
        target = sd.load("zoo:target")
        assert 12e6 <= target.shape.parameters <= 20e6
        assert target.shape.layers >= 12
        assert target.shape.context >= 2048
        assert target.shape.tied
        for name in zoo.names()[1:]:
            sd.check_vocabulary(target, sd.load(f"zoo:{name}")).require()
        series = [name for name in zoo.names()[1:] if re.fullmatch(r"\d+x\d+", name)]
        sizes = [s.parameters - s.embedding_parameters for s in (sd.load(f"zoo:{name}").shape for name in series)]
        assert len(series) >= 4
        assert max(sizes) < 1.02 * min(sizes)

    def test_the_target_writes_and_does_not_loop(self):
        from shallowdraft.prompts import load_prompts

        target = sd.load("zoo:target")
        texts = [prompt.text for prompt in load_prompts("zoo")]
        written = sd.generate(target, texts, max_new_tokens=64)
        assert sum(loops(one.token_ids) for one in written) < len(written) / 5
        assert sum(len(set(one.token_ids)) for one in written) / sum(len(one.token_ids) for one in written) > 0.5
