"""Drafts whose context is shorter than their target's: where they are silent, decoding is plain, and is said to be."""

import copy
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shallowdraft as sd
from shallowdraft import cost
from shallowdraft.cli import main
from shallowdraft.cost import Silence
from shallowdraft.decoding.candidate import draft_options, options_of
from shallowdraft.decoding.timing import time_beside_plain
from shallowdraft.errors import RecordError
from shallowdraft.exporting.advice import advise
from shallowdraft.models.synthetic import make_pair
from shallowdraft.profiling import measure as measuring
from shallowdraft.profiling.measure import all_points, measure
from shallowdraft.records import Records
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.result import Replay
from shallowdraft.replaying.tree import replay_tree
from shallowdraft.reporting.page import page_of
from shallowdraft.reporting.reading import read_run
from shallowdraft.runs.candidate import Candidate
from shallowdraft.runs.machine_state import MachineState
from shallowdraft.runs.profile import KIND, Profile, read_profile
from shallowdraft.runs.trace import Trace, read_trace
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.studying.forecast import forecast, forecast_in_states

CONTEXTS = {"target": 512, "draft": 256, "tiny": 20}
LENGTHS = (30, 180, 232, 300, 400)  # tokens of prompts: far from 256, before it, across, behind
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts that are the target with noise and shorter contexts; written by transformers."""
    folder = tmp_path_factory.mktemp("contexts")
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    tokenizer = make_pair(
        parse_shape("1x32/2h/48", vocab=512), parse_shape("1x32/2h/48", vocab=512), 0.8
    ).target.tokenizer
    for name, context in CONTEXTS.items():
        own = copy.deepcopy(config)
        own.max_position_embeddings = context
        model = LlamaForCausalLM(own)
        noise = 0.0 if name == "target" else 0.02
        model.load_state_dict({key: one + noise * one.std() * torch.randn_like(one) for key, one in weights.items()})
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [{"prompt": f"{number}" * length, "id": f"{number}"} for number, length in enumerate(LENGTHS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["record", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    assert main([*given, "--max-new-tokens", str(NEW_TOKENS), "--out", str(folder / "trace.jsonl")]) == 0
    return folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    trace = read_trace(folder / "trace.jsonl")
    assert [len(output.prompt) for output in trace.outputs] == list(LENGTHS)
    return trace


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, sd.Model]:
    return {name: sd.load(folder / name) for name in CONTEXTS}


def live(target: sd.Model, draft: sd.Model, found: Replay, size: int) -> list[sd.Generation]:
    options = options_of(found.candidate(size), {(found.candidate(size).drafter, found.draft): {"draft": draft}})
    options["drafter"] = found.candidate(size).drafter
    outputs = found.trace.outputs
    runs = [sd.generate(target, output.prompt, max_new_tokens=NEW_TOKENS, **options) for output in outputs]
    assert [run.token_ids for run in runs] == [output.output for output in outputs]
    return runs


@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize("size", [3, 8])
def test_replay_knows_the_iterations_in_which_a_draft_is_silent(
    models: dict[str, sd.Model], trace: Trace, drafter: str, size: int
):
    draft = models["draft"]
    found = replay_model(draft, trace) if drafter == "model" else replay_tree(draft, trace, [size])
    depth, nodes = found.candidate(size).lookahead, size
    runs = live(models["target"], draft, found, size)
    assert found.iterations_by_length(size).keys() == {depth, 0}
    drafting = [run.stats.drafted / nodes for run in runs]
    assert found.iterations_by_length(size)[depth].tolist() == drafting
    assert found.iterations_by_length(size)[0].tolist() == [
        run.stats.iterations - drafted for run, drafted in zip(runs, drafting, strict=True)
    ]
    assert drafting[0] > 0 < drafting[2] < runs[2].stats.iterations
    assert drafting[-1] == 0 < runs[-1].stats.iterations
    for row, run in enumerate(runs):
        assert [kept for kept, _ in found.greedy_iterations(row, size)] == run.accepted_by_iteration
        assert [proposed for _, proposed in found.greedy_iterations(row, size)].count(0) == found.iterations_by_length(
            size
        )[0][row]
    assert found.tar()[size] == pytest.approx(sd.total([run.stats for run in runs], one_batch=False).tar)
    silent = found.iterations_by_length(size)[0].sum()
    assert found.silence(size) == Silence(
        256 - depth + 1, silent / found.counts.at(size).sum(), silent / (len(runs) * (NEW_TOKENS - 1))
    )
    assert found.record("model").silence[size] == found.silence(size)


def test_a_draft_that_has_room_is_never_silent(models: dict[str, sd.Model], trace: Trace):
    found = replay_model(models["target"], trace)
    assert found.silence(5) is None
    assert found.record("model").silence == {}


SPEEDS = {64: 1.0, 256: 2.0}  # seconds a token of plain decoding, by context


def written(path: Path, draft: str, contexts: tuple[int, ...] = (64, 256), **row: float) -> Profile:
    """A machine on which an iteration takes so many plain tokens at each context."""
    file = Records.open(path, KIND, {"target": "t", "device": "d"})
    for context in contexts:
        for lookahead in (1, 8):
            place = {"draft": draft, "lookahead": lookahead, "context": context, "batch": 1, "round": 0, "turn": 0}
            state = {"plain_s": SPEEDS[context], "handover_s": 0.0, "arithmetic_s": 0.0}
            parts = {"draft_s": 0.5, "target_s": 1.2, "rest_s": 0.1} | row
            times = {name: value * SPEEDS[context] for name, value in parts.items()}
            file.append(place | state | times | {"pass_s": times["target_s"]})
    return read_profile(path)


def plain_s(context: float) -> float:
    return min(2.0, max(1.0, 1 + (context - 64) / 192))


def test_where_a_draft_is_silent_plain_decoding_is_predicted(models: dict[str, sd.Model], trace: Trace, tmp_path: Path):
    """Time by time what live iterations would take: 1.8 plain tokens each that drafts, and one each that does not."""
    draft, size = models["draft"], 4
    found = replay_model(draft, trace)
    profile = written(tmp_path / "profile", draft.name)
    spent = usual = 0.0
    for output, run in zip(trace.outputs, live(models["target"], draft, found, size), strict=True):
        length = len(output.prompt) + 1
        for kept in run.accepted_by_iteration:
            spent += plain_s(length) * (1.8 if length + size <= 256 else 1.0)
            usual += sum(plain_s(length + at) for at in range(min(kept + 1, len(output.prompt) + NEW_TOKENS - length)))
            length += kept + 1
    made = forecast(found, profile, [size])[size]
    assert made.speed_up == pytest.approx(usual / spent, rel=0.02)
    assert made.silence == found.silence(size)
    states = {output.key[:2]: [MachineState(plain_s(len(output.prompt) + NEW_TOKENS / 2))] for output in trace.outputs}
    beside = forecast_in_states(found, profile, size, states)
    assert beside.speed_up == pytest.approx(usual / spent, rel=0.02)
    assert beside.tar == pytest.approx(made.tar)


def test_a_draft_that_is_silent_everywhere_changes_nothing(models: dict[str, sd.Model], trace: Trace, tmp_path: Path):
    draft = models["tiny"]
    made = forecast(replay_model(draft, trace), written(tmp_path / "profile", draft.name), [4])[4]
    assert made.speed_up == pytest.approx(1.0)
    assert made.verdict == "makes no difference at lookahead 4; break-even is at TAR 1.00, it has 1.00"
    assert made.silence == Silence(17, 1.0, 1.0)


def test_a_slow_draft_cannot_pay_where_it_drafts_however_much_it_is_silent(
    models: dict[str, sd.Model], trace: Trace, tmp_path: Path
):
    """Each iteration that drafts takes 5.8 plain tokens and yields 5 at most."""
    profile = written(tmp_path / "profile", "slow", draft_s=4.5)
    made = forecast(replay_model(sd.Model("slow", models["draft"].decoder), trace, fits=True), profile, [4])[4]
    assert made.break_even_tar < 5
    assert not made.reachable
    assert made.verdict.startswith("cannot pay")


def test_samples_in_which_a_draft_was_silent_are_no_times(models: dict[str, sd.Model], trace: Trace, tmp_path: Path):
    """As earlier versions wrote them."""
    path, draft = tmp_path / "profile", models["draft"]
    wanted = written(tmp_path / "right", draft.name, (64,))
    written(path, draft.name, (64,))
    found = written(path, draft.name, (256,), draft_s=0.0, target_s=1.0)
    assert {point.context for point in found.samples} == {64}
    assert found.notes == [
        f"{path}: 2 samples at contexts 256 are left out: {draft.name} drafted nothing there, as its own "
        f"context was full; time it at shorter ones: profile --drafts {draft.name} --contexts"
    ]
    speeds = [forecast(replay_model(draft, trace), one, [4])[4].speed_up for one in (found, wanted)]
    assert speeds[0] == speeds[1]
    with pytest.raises(RecordError, match=r"holds no measurement; .*drafted nothing"):
        written(tmp_path / "nothing", draft.name, (256,), draft_s=0.0)


def test_every_iteration_that_is_timed_drafts(models: dict[str, sd.Model]):
    """Up to the last place where there is room for one proposal, and in a target without any room behind it."""
    candidates = [{"draft": models["draft"], "lookahead": lookahead} for lookahead in (1, 16)]
    prompt = torch.arange(256 - 16 - 1).tolist()
    found = time_beside_plain(models["target"], [prompt], candidates, warm_up=2, count=6, turns=1)
    assert all(times.draft_s > 0 for (_, times, _) in found[0])
    full = time_beside_plain(models["draft"], [prompt], candidates, warm_up=2, count=6, turns=1)
    assert all(times.draft_s > 0 for (_, times, _) in full[0])


def test_a_profile_is_taken_where_models_have_room(folder: Path, tmp_path: Path, capsys):
    target, draft, out = str(folder / "target"), str(folder / "draft"), str(tmp_path / "profile")
    given = ["profile", "--drafts", draft, "--rounds", "1", "--lookaheads", "1,8"]
    assert main([*given, "--target", target, "--out", out]) == 0
    said = capsys.readouterr().err
    assert f"{draft} is timed at contexts 64 247: it has one of 256 tokens" in said
    profile = read_profile(Path(out))
    candidates = [Candidate.with_draft(sd.load_draft(draft), lookahead) for lookahead in (1, 8)]
    assert set(profile.samples) == set(all_points(candidates, [64, 247], [1]))
    assert profile.notes == []
    assert all(row["draft_s"] > 0 for rows in profile.samples.values() for row in rows)
    assert main(["predict", "--trace", str(folder / "trace.jsonl"), "--profile", out, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    assert found["silence"]["begins"] == 257 - found["lookahead"]
    assert main(["predict", "--trace", str(folder / "trace.jsonl"), "--profile", out]) == 0
    said = capsys.readouterr().out
    assert (
        f"{draft} is silent from {found['silence']['begins']} tokens of text on, where its context has no room" in said
    )
    assert f" for a proposal: {found['silence']['tokens']:.0%} of the new tokens\n" in said
    assert main(["replay", "--trace", str(folder / "trace.jsonl"), "--drafts", draft]) == 0
    assert f"at lookahead 5 {draft} is silent from 252 tokens of text on" in capsys.readouterr().out


def test_a_target_whose_context_is_short_is_timed_where_it_has_room(folder: Path, tmp_path: Path, capsys):
    """Nobody gave a prompt that could be shortened."""
    short = str(folder / "draft")
    given = ["profile", "--target", short, "--drafts", short, "--rounds", "1", "--lookaheads", "1,32"]
    assert main([*given, "--out", str(tmp_path / "profile")]) == 0
    assert f"{short} is timed at contexts 64 223: the target has one of 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--contexts", "64", "256"],
            "draft has a context of 256 tokens, no room for 8 draft tokens behind 256; contexts up to 247 fit",
        ),
        (["--contexts", "600"], "no room for 8 draft tokens behind 600; contexts up to 247 fit"),
        (
            ["--drafts", "tiny", "--lookaheads", "24"],
            "tiny has a context of 20 tokens, no room for 24 draft tokens behind 1; lookaheads up to 18 fit",
        ),
        (["--shapes", "1x32/4h/2kv/56", "--contexts", "505"], "contexts up to 503 fit"),
    ],
)
def test_contexts_that_do_not_fit_are_refused_before_any_work(
    folder: Path, tmp_path: Path, capsys, monkeypatch, more: list[str], said: str
):
    monkeypatch.chdir(folder)
    given = ["profile", "--target", "target", "--lookaheads", "1,8", "--out", str(tmp_path / "profile")]
    drafts = [] if {"--drafts", "--shapes"} & set(more) else ["--drafts", "draft"]
    assert main([*given, *drafts, *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "profile").exists()


def test_an_interrupted_profile_says_so_until_it_is_whole(
    folder: Path, models: dict[str, sd.Model], tmp_path: Path, capsys, monkeypatch
):
    target, draft, path = models["target"], models["draft"], tmp_path / "profile"
    name = str(folder / "draft")
    monkeypatch.setattr(sys, "argv", ["shallowdraft", "profile", "--drafts", name])
    wanted = all_points([Candidate(name, d) for d in (1, 4)], [64], [1])
    steps = measure(target, draft_options({name: draft}), wanted, path, 2)
    list(islice(steps, 1))  # of two rounds
    steps.close()
    (note,) = read_profile(path).notes
    assert note == (
        f"{path} is incomplete: 6 of 12 samples are missing, as the command that takes them was interrupted; "
        f"it goes on if it is run again: shallowdraft profile --drafts {name}"
    )
    assert main(["predict", "--trace", str(folder / "trace.jsonl"), "--profile", str(path)]) == 0
    assert "6 of 12 samples are missing" in capsys.readouterr().err
    lines = path.read_text()
    list(measure(target, draft_options({name: draft}), wanted, path, 2))
    assert path.read_text().startswith(lines)
    assert read_profile(path).notes == []
    assert {len(rows) for rows in read_profile(path).samples.values()} == {2 * measuring.TURNS}


def test_a_study_its_report_and_what_is_exported_know_of_silence(folder: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    run = tmp_path / "run"
    given = ["study", "--target", "target", "--drafts", "draft", "--drafters", "model", "tree", "--node-counts", "3"]
    given += ["--prompts", "prompts.jsonl", "--lookaheads", "2:3", "--max-new-tokens", str(NEW_TOKENS), "--rounds", "1"]
    assert main([*given, "--out", str(run)]) == 0
    told = capsys.readouterr().out
    found = json.loads((run / "study.json").read_text())
    assert {row["drafter"] for row in found["rows"]} == {"model", "tree"}
    for row in found["rows"]:
        silence = row["prediction"]["silence"]
        assert silence["begins"] == 257 - row["lookahead"]
        assert f"{row['name']} is silent from {silence['begins']} tokens of text on" in told
        assert row["live"]["tar"] == pytest.approx(row["prediction"]["tar"])
        assert all(one["silence"] for one in row["curve"])
    profile = read_profile(run / "profile.jsonl")
    assert all(row["draft_s"] > 0 for rows in profile.samples.values() for row in rows)
    inside = [json.loads(line) for line in (run / "tokens.jsonl").read_text().splitlines()[1:]]
    behind = [row for row in inside if row["id"] == "4"]
    assert behind
    assert all(source == "own" for row in behind for _, source, _ in row["tokens"])
    page = page_of(read_run(run))
    assert sum("is silent from" in warning for warning in page.warnings) == 2
    more = ["profile", "--target", "target", "--drafts", "draft", "--lookaheads", "1,3", "--rounds", "1"]
    assert main([*more, "--batches", "2", "--out", str(run / "profile.jsonl")]) == 0
    assert set(advise(run, "target", "draft").by_batch) == {1, 2}


def test_inspect_says_where_a_draft_is_silent(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["inspect", "target", "draft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["silent_from"] == 256
    assert main(["inspect", "target", "draft"]) == 0
    assert "beyond 256 tokens of text draft proposes nothing" in capsys.readouterr().out
    assert main(["inspect", "draft", "target"]) == 0
    assert "proposes nothing" not in capsys.readouterr().out


def test_silence_is_taken_into_the_highest_tar():
    times, silence = cost.Iteration(1.0, 1.0), Silence(200, 0.25, 0.1)
    assert cost.Prediction(4, 2.5, times, 1.0).most_tar == 5
    assert cost.Prediction(4, 2.5, times, 1.0, silence=silence).most_tar == 4
    assert (
        str(silence)
        == "silent from 200 tokens of text on, where its context has no room for a proposal: 10% of the new tokens"
    )
