"""What a least confidence would keep, by replay, is what it keeps live: token for token."""

import json
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.models import zoo
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import load_prompts
from shallowdraft.replaying.confidence import replay_confidences
from shallowdraft.replaying.recording import record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace, read_trace
from shallowdraft.shapes.notation import parse_shape

CONFIDENCES = (0.0, 0.15, 0.4, 0.7, 1.0)


def recorded(target: sd.Model, count: int, new: int, path: Path) -> Trace:
    prompts = load_prompts("zoo")
    chosen = [("zoo", prompts[index * len(prompts) // count]) for index in range(count)]
    for _ in record(target, chosen, path, max_new_tokens=new, sampling=Sampling()):
        pass
    return read_trace(path)


def compare(target: sd.Model, draft: sd.Model, trace: Trace, lookahead: int) -> list[float]:
    """Replay against live runs; the share that was kept at each confidence."""
    shares = []
    for replayed in replay_confidences(draft, trace, lookahead, CONFIDENCES):
        stats = []
        for row, output in enumerate(trace.outputs):
            options = {"lookahead": lookahead, "min_confidence": replayed.min_confidence}
            live = sd.generate(target, output.prompt, draft=draft, max_new_tokens=len(output.output), **options)
            assert live.token_ids == output.output
            assert live.accepted_by_iteration == replayed.replay.kept_by_iteration(lookahead)[row]
            stats.append(live.stats)
        whole = sd.total(stats, one_batch=False)
        assert whole.acceptance_rate == pytest.approx(replayed.acceptance_rate)
        assert whole.drafted / whole.iterations == pytest.approx(replayed.drafted)
        assert whole.tar == pytest.approx(replayed.tar)
        shares.append(replayed.acceptance_rate)
    return shares


def test_a_pair_whose_draft_has_a_shorter_context(tmp_path: Path):
    shapes = parse_shape("3x64/2h/96", vocab=512, context=256), parse_shape("1x64/2h/96", vocab=512, context=64)
    target, draft = (sd.load(path) for path in make_pair(*shapes, 0.7).save(tmp_path))
    compare(target, draft, recorded(target, 3, 60, tmp_path / "trace.jsonl"), 4)


@pytest.mark.skipif(not zoo.names(), reason="the zoo is not built")
@pytest.mark.parametrize(("prompts", "new"), [(3, 40), pytest.param(40, 128, marks=pytest.mark.slow)])
def test_trained_models(prompts: int, new: int, tmp_path: Path):
    target, draft = sd.load("zoo:target"), sd.load_draft("zoo:4x128")
    shares = compare(target, draft, recorded(target, prompts, new, tmp_path / "trace.jsonl"), 8)
    assert shares[0] < 0.3  # all eight, however unsure
    assert shares[3] > shares[0] + 0.2


def test_the_commands_agree(tmp_path: Path, capsys):
    shapes = parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512)
    target, draft = map(str, make_pair(*shapes, 0.7).save(tmp_path))
    trace = str(tmp_path / "trace.jsonl")
    recorded(sd.load(target), 2, 40, Path(trace))
    given = ["replay", "--trace", trace, "--drafts", draft, "--lookahead", "6"]
    assert main([*given, "--min-confidence", "0.2", "0.9", "--json"]) == 0
    (lenient, strict) = json.loads(capsys.readouterr().out)["drafts"][0]["confidence"]
    assert lenient["drafted"] > strict["drafted"] >= 1
    prompts = tmp_path / "prompts.jsonl"
    chosen = [load_prompts("zoo")[0], load_prompts("zoo")[len(load_prompts("zoo")) // 2]]
    prompts.write_text("".join(json.dumps({"prompt": one.text}) + "\n" for one in chosen))
    live = ["generate", "--target", target, "--draft", draft, "--prompts", str(prompts), "--max-new-tokens", "40"]
    assert main([*live, "--lookahead", "6", "--min-confidence", "0.9", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["acceptance_rate"] == pytest.approx(strict["acceptance_rate"])
    assert main([*given, "--min-confidence", "0.2", "0.9"]) == 0
    assert "min confidence" in capsys.readouterr().out
    assert main([*given, "--min-confidence", "1.2"]) == 2
    assert "--min-confidence is 1.2" in capsys.readouterr().err
