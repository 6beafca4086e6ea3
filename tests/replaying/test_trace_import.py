"""Traces of other engines: what is taken, and what is refused with why."""

import json
from pathlib import Path

import pytest

from shallowdraft.cli import main
from shallowdraft.models.synthetic import make_pair
from shallowdraft.runs.trace import read_trace
from shallowdraft.shapes.notation import parse_shape


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_pair(parse_shape("3x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8).save(folder)
    return folder


def completion(**request) -> dict:
    logprobs = {"token_logprobs": [-0.5, -1.0, -0.1]}
    choice = {"token_ids": [5, 6, 7], "text": "…", "logprobs": logprobs if request else None}
    return {"id": "a", "prompt_token_ids": [1, 2], "choices": [choice], "request": request}


def run(pair: Path, tmp_path: Path, rows: list[dict], *more: str) -> int:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["record", "--target", str(pair / "target"), "--import", str(tmp_path / "in.jsonl")]
    return main([*given, "--out", str(tmp_path / "trace.jsonl"), *more])


def test_greedy_completions(pair: Path, tmp_path: Path, capsys):
    assert run(pair, tmp_path, [completion(), completion() | {"id": "b"}]) == 0
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.sampling.greedy
    assert [(one.prompt, one.output) for one in trace.outputs] == [([1, 2], [5, 6, 7])] * 2
    capsys.readouterr()
    replay = ["replay", "--trace", str(tmp_path / "trace.jsonl"), "--drafts", str(pair / "draft"), "--json"]
    assert main(replay) == 0
    assert json.loads(capsys.readouterr().out)["drafts"][0]["tar"]["1"] >= 1
    assert run(pair, tmp_path, [completion()]) == 2  # nothing is overwritten
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "request_", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "processed_logprobs"}]
)
def test_sampled_completions_with_the_right_logprobs(pair: Path, tmp_path: Path, request_: dict):
    assert run(pair, tmp_path, [completion(**request_)]) == 0
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.sampling.temperature == request_["temperature"]
    assert trace.outputs[0].logprobs == [-0.5, -1.0, -0.1]


def test_chat_completions(pair: Path, tmp_path: Path):
    row = completion(temperature=1.0)
    row["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}] * 3}
    assert run(pair, tmp_path, [{"request": row.pop("request"), "response": {"body": row}}]) == 0
    assert read_trace(tmp_path / "trace.jsonl").outputs[0].logprobs == [-0.5] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"request": {"temperature": 0.7}}, "from before these"),
        ({"request": {"temperature": 1.0, "top_k": 20}}, "from before these"),
        ({"prompt_token_ids": None}, "ask the server to return them"),
        ({"prompt_token_ids": [600]}, "not in"),
        ({"choices": []}, "holds no completion"),
    ],
)
def test_what_cannot_be_used_is_refused_with_why(pair: Path, tmp_path: Path, change: dict, said: str, capsys):
    assert run(pair, tmp_path, [completion() | change]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "trace.jsonl").exists()


def test_sampled_text_without_logprobs(pair: Path, tmp_path: Path, capsys):
    row = completion(temperature=1.0)
    row["choices"][0]["logprobs"] = None
    assert run(pair, tmp_path, [row]) == 2
    assert "one for each token" in capsys.readouterr().err


def test_the_authors_tensors(pair: Path, tmp_path: Path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "in.txt").write_text(
        "tensor([[  18, 79, 56,\\n          75, 2]])\ntensor([[  51, 10]], device='cuda:0')\n"
    )
    given = [
        "record",
        "--target",
        str(pair / "target"),
        "--import",
        str(tmp_path / "in.txt"),
        "--import-format",
        "tensors",
    ]
    out = ["--out", str(tmp_path / "trace.jsonl")]
    assert main([*given, *out]) == 2
    assert "--prompts" in capsys.readouterr().err
    assert main([*given, *out, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    assert [one.output for one in read_trace(tmp_path / "trace.jsonl").outputs] == [[18, 79, 56, 75, 2], [51, 10]]
    (tmp_path / "in.txt").write_text("tensor([[1]])\n" * 3)
    again = [*given, "--out", str(tmp_path / "other.jsonl"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main(again) == 2
    assert "3 outputs" in capsys.readouterr().err
