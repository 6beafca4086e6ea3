"""Sets of prompts that ship with the package, and from files."""

import json
import sys
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import PromptError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import load_prompts, names
from shallowdraft.prompts.published import few_shot, hellaswag
from shallowdraft.shapes.notation import parse_shape


def test_shipped_sets_have_unique_prompts_sources_and_licences():
    assert names() == ["arena", "gsm8k", "hellaswag", "humaneval", "mmlu", "mt-bench", "spec-bench", "zoo"]
    for name in names():
        prompts = load_prompts(name)
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        assert all(prompt.text.strip() and prompt.task for prompt in prompts)
        text = Path(sd.__file__).with_name("prompts").joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        assert all(row["source"] and row["license"] for row in rows)
        assert name == "zoo" or {row["license"] for row in rows} <= {"MIT", "Apache-2.0"}


def test_shipped_hellaswag_equals_the_formatted_published_rows():
    """The sentence that the choices complete is `ctx_b`; in the published rows it has no capital."""
    unfinished = 0
    for prompt in load_prompts("hellaswag"):
        activity, context = prompt.text.split(": ", 1)
        start = max(context.rfind(f"{end} ") for end in ".!?") + 2
        row = {"activity_label": activity, "ctx_a": context, "ctx_b": ""}
        if context[-1] not in ".!?\"')":
            unfinished += 1
            row |= {"ctx_a": context[:start].rstrip(), "ctx_b": context[start:].lower()}
        assert hellaswag(row) == prompt.text
    assert unfinished == 59


def test_the_shipped_part_of_spec_bench_is_as_documented():
    assert {prompt.task for prompt in load_prompts("spec-bench")} == {
        "spec_bench/multi_turn_conversation",
        "spec_bench/math_reasoning",
    }
    page = " ".join((Path(__file__).parent.parent / "docs" / "speculating.md").read_text(encoding="utf-8").split())
    assert "summaries (Spec-Bench) ¹" in page
    assert "¹ Not among the prompts that ship" in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}', ':1: not a JSON object with a "prompt" field'),
        ('{"prompt": 3}', "field that holds text"),
        ('{"ids": []}', 'or "ids" that holds token ids'),
        ('{"ids": [1, "2"]}', 'or "ids" that holds token ids'),
        ("[1]", ":1: not a JSON object"),
        ("\n", "holds no prompt"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, message: str):
    (tmp_path / "file.jsonl").write_text(content)
    with pytest.raises(PromptError, match=message):
        load_prompts(tmp_path / "file.jsonl")


PUBLISHED = {  # a row of each set, as its authors publish it
    "mt-bench": ({"prompt_id": 7, "prompt": ["Write a poem.", "Shorter."], "category": "writing"}, "Write a poem."),
    "arena": ({"question_id": "x", "turns": [{"content": "Explain DNS."}]}, "Explain DNS."),
    "spec-bench": ({"question_id": 81, "category": "qa", "turns": ["Who is it?", "And why?"]}, "Who is it?"),
    "gsm8k": ({"question": "Two and two?", "answer": "#### 4"}, "Two and two?"),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():"),
    "hellaswag": (
        {
            "activity_label": "Canoeing",
            "ctx_a": "Two women are shown. [title] More",
            "ctx_b": "the child",
            "ctx": "Two women are shown. the child",
            "endings": ["a", "b"],
        },
        "Canoeing: Two women are shown.. More The child",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_give_their_prompt(name: str, tmp_path: Path):
    row, text = PUBLISHED[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    first, second = load_prompts(tmp_path)
    assert first.text == second.text == text
    assert first.id != second.id


def test_mmlu_prompts_begin_with_five_solved_questions_of_the_subject():
    """A shipped prompt, which others formatted, is taken apart and formatted again."""
    whole = load_prompts("mmlu")[0].text
    head, *blocks = whole.split("\n\n")
    subject = head.removesuffix(".").split(" about ")[1].replace(" ", "_")
    rows = []
    for block in blocks:
        question, a, b, c, rest = block.rsplit("\n", 4)[0], *block.rsplit("\n", 4)[1:]
        question, first = question.rsplit("\n", 1)
        choices = [line[3:] for line in (first, a, b, c)]
        answer = rest.removeprefix("Answer:").strip()
        rows.append(
            {"question": question, "choices": choices, "subject": subject, "answer": "ABCD".find(answer or "A")}
        )
    *solved, question = rows
    assert few_shot([*solved, {**question, "subject": subject}])(question) == whole


def test_a_full_set_needs_its_library_or_a_known_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match="pip install datasets"):
        load_prompts("mmlu:full")
    with pytest.raises(PromptError, match=r"zoo:full is unknown; there are mmlu:full"):
        load_prompts("zoo:full")


def test_an_empty_folder(tmp_path: Path):
    with pytest.raises(PromptError, match=r"no \*\.jsonl files"):
        load_prompts(tmp_path)


def test_unknown_sets():
    with pytest.raises(PromptError, match=r"no set of that name; there are .*zoo"):
        load_prompts("zooo")


def test_generate_takes_a_file_of_prompts(tmp_path: Path, capsys):
    pair = make_pair(parse_shape("3x32/2h/48", vocab=320), parse_shape("1x32/2h/48", vocab=320), 0.7)
    target, draft = pair.save(tmp_path)
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "One two", "id": "a"}\n\n{"prompt": "Three"}\n')
    options = ["generate", "--target", str(target), "--draft", str(draft), "--prompts", str(file)]
    assert main([*options, "--max-new-tokens", "12", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    generations = printed["generations"]
    assert [generation["id"] for generation in generations] == ["a", "3"]
    assert printed["stats"]["tokens"] == sum(generation["stats"]["tokens"] for generation in generations) == 24
    assert main([*options, "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("One two")
    assert "2 prompts: 24 tokens" in printed.err


@pytest.mark.parametrize("options", [[], ["--prompt", "a", "--prompts", "zoo"]])
def test_one_prompt_or_several(options: list[str], capsys):
    assert main(["generate", "--target", "nowhere", *options]) == 2
    assert "give --prompt with a text, or --prompts" in capsys.readouterr().err
