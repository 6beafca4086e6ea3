"""A draft that learns while it serves."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import noisy

import shallowdraft as sd
from shallowdraft.building.online import CURRENT, OnlineDraft, OnlineOptions, corrections
from shallowdraft.cli import main
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.shape import ModelShape

SHAPE = ModelShape(2, 32, 2, 48, 24, head_dim=16, context=96)
OPTIONS = OnlineOptions(learning_rate=3e-3)


def pair() -> tuple[sd.Model, sd.Model]:
    target = sd.Model("target", random_decoder(SHAPE, seed=1, scale=1.5))
    return target, noisy(target, 0.5, pack=False)


def serve(online: OnlineDraft, prompts: range, lookahead: int = 3) -> float:
    """Acceptance over some prompts; each is decoded as without a draft."""
    accepted = drafted = 0
    for prompt in prompts:
        ids = [prompt % 24, (7 * prompt + prompt // 24) % 24]
        result = sd.generate(online.target, ids, draft=online.draft, lookahead=lookahead, max_new_tokens=40)
        assert result.token_ids == sd.generate(online.target, ids, max_new_tokens=40).token_ids
        online.remember(ids, result, lookahead)
        accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
    return accepted / drafted


def test_acceptance_rises_while_it_serves(tmp_path: Path):
    online = OnlineDraft(*pair(), tmp_path, OPTIONS)
    before = serve(online, range(24))
    for start in range(24, 120, 24):
        online.learn(3_000)
        serve(online, range(start, start + 24))
    assert serve(online, range(24)) > before + 0.1
    again = sd.load(tmp_path / CURRENT, "float32")
    torch.testing.assert_close(again.decoder.dense_state(), dict(online._student.dense_state()))


def test_corrections_are_what_the_target_said_instead():
    target, draft = pair()
    result = sd.generate(target, [5], draft=draft, lookahead=3, max_new_tokens=40)
    text = torch.tensor([[5, *result.token_ids]])
    ahead = draft.decoder.logits(text)[0].argmax(-1).tolist()
    for position in corrections(result, 3):
        assert ahead[position] != result.token_ids[position]
    kept = sum(result.accepted_by_iteration)
    assert len(corrections(result, 3)) <= len(result.token_ids) - 1 - kept
    assert sd.generate(target, [5], draft=target, lookahead=3, max_new_tokens=40)
    assert not corrections(sd.generate(target, [5], draft=target, lookahead=3, max_new_tokens=41), 3)


def test_a_step_that_is_no_number_changes_nothing(tmp_path: Path, monkeypatch):
    online = OnlineDraft(*pair(), tmp_path, OPTIONS)
    serve(online, range(8))
    served, nan = online.draft, torch.tensor(float("nan"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: nan)
    with pytest.raises(TrainingError, match="stays as it was"):
        online.learn(100)
    assert online.draft is served
    assert not (tmp_path / CURRENT).exists()


def test_what_is_remembered_is_bounded(tmp_path: Path):
    online = OnlineDraft(*pair(), tmp_path, OnlineOptions(memory_tokens=200, longest_text=20))
    serve(online, range(30))
    assert online._remembered_tokens == sum(len(text.tokens) for text in online._texts) <= 200
    assert all(min(text.corrected) > 0 and max(text.corrected) < 20 for text in online._texts)


def test_an_interrupted_update_changes_nothing(tmp_path: Path, monkeypatch):
    online = OnlineDraft(*pair(), tmp_path, OPTIONS)
    serve(online, range(24))
    online.learn(500)
    served, weights = online.draft, {name: tensor.clone() for name, tensor in online._student.state_dict().items()}
    on_disk = sd.load(tmp_path / CURRENT, "float32").decoder.dense_state()
    real, steps = torch.optim.AdamW.step, iter(range(100))

    def stopping(self, *args, **options):
        if next(steps) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        online.learn(2_000)
    assert online.draft is served
    assert all(parameter.grad is None for parameter in online._student.parameters())
    torch.testing.assert_close(dict(online._student.state_dict()), weights)
    torch.testing.assert_close(sd.load(tmp_path / CURRENT, "float32").decoder.dense_state(), on_disk)
    online.learn(500)
    assert online.draft is not served


LEARNING = """
import sys
from pathlib import Path
import shallowdraft as sd
from shallowdraft.building.online import OnlineDraft
from shallowdraft.models.synthetic import random_decoder
shape = sd.ModelShape(2, 32, 2, 48, 24, head_dim=16, context=96)
target, draft = (sd.Model("one", random_decoder(shape, seed=seed, scale=1.5)) for seed in (1, 2))
online = OnlineDraft(target, draft, Path(sys.argv[1]))
online.remember([1], sd.generate(target, [1], draft=online.draft, lookahead=3, max_new_tokens=40), 3)
online.learn(100)
print("ready", flush=True)
while True:
    online.learn(100)
"""


def test_killed_at_any_moment_a_whole_draft_is_there(tmp_path: Path):
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", LEARNING, str(tmp_path)], stdout=subprocess.PIPE) as run:
            assert run.stdout.readline() == b"ready\n"
            time.sleep(random.random())
            run.send_signal(signal.SIGKILL)
        assert sd.load(tmp_path / CURRENT, "float32").shape == SHAPE


def test_the_command(tmp_path: Path, capsys):
    out = str(tmp_path / "out")
    command = ["online", "--target", "zoo:target", "--draft", "zoo:2x192-carved", "--prompts", "zoo", "--out", out]
    options = ["--max-new-tokens", "16", "--every", "2", "--budget", "200"]
    assert main([*command, *options, "--limit", "4"]) == 0
    assert (Path(out) / CURRENT / "config.json").exists()
    assert main([*command, *options, "--limit", "6", "--json"]) == 0
    assert len((Path(out) / "outputs.jsonl").read_text().splitlines()) == 7
    assert main([*command, *options, "--lookahead", "2"]) == 2
    assert "another lookahead" in capsys.readouterr().err
    assert main([*command, "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


def test_a_packed_draft_cannot_learn(tmp_path: Path):
    target, draft = pair()
    with pytest.raises(OptionError, match="trainable"):
        OnlineDraft(target, sd.Model("packed", draft.decoder.pack()), tmp_path)
