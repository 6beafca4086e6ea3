"""Sets of prompts, shipped and from files."""

import json
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import PromptError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import load_prompts, names
from shallowdraft.shapes import parse


def test_shipped_sets_are_whole_and_say_where_they_come_from():
    assert names() == ["arena", "gsm8k", "hellaswag", "humaneval", "mmlu", "mt-bench", "spec-bench", "zoo"]
    for name in names():
        prompts = load_prompts(name)
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        assert all(prompt.text.strip() and prompt.task for prompt in prompts)
        text = Path(sd.__file__).with_name("prompts").joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        assert all(row["source"] and row["license"] for row in rows)
        assert name == "zoo" or {row["license"] for row in rows} <= {"MIT", "Apache-2.0"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}', ':1: no JSON object with a "prompt" field'),
        ('{"prompt": 3}', "is no text"),
        ("\n", "holds no prompt"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, said: str):
    (tmp_path / "file.jsonl").write_text(content)
    with pytest.raises(PromptError, match=said):
        load_prompts(tmp_path / "file.jsonl")


def test_unknown_sets():
    with pytest.raises(PromptError, match=r"no set of that name; there are .*zoo"):
        load_prompts("zooo")


def test_generate_takes_a_file_of_prompts(tmp_path: Path, capsys):
    pair = make_pair(parse("3x32/2h/48", vocab=320), parse("1x32/2h/48", vocab=320), 0.7)
    target, draft = pair.save(tmp_path)
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "One two", "id": "a"}\n\n{"prompt": "Three"}\n')
    options = ["generate", "--target", str(target), "--draft", str(draft), "--prompts", str(file)]
    assert main([*options, "--max-new-tokens", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found["generations"]] == ["a", "3"]
    assert found["stats"]["tokens"] == sum(one["stats"]["tokens"] for one in found["generations"]) == 24
    assert main([*options, "--max-new-tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("One two")
    assert "2 prompts: 24 tokens" in shown.err


@pytest.mark.parametrize("given", [[], ["--prompt", "a", "--prompts", "zoo"]])
def test_one_prompt_or_several(given: list[str], capsys):
    assert main(["generate", "--target", "nowhere", *given]) == 2
    assert "give --prompt with a text, or --prompts" in capsys.readouterr().err
