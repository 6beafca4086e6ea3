"""Chat templates are rendered as by transformers, in a process that survives or ends with a bad one."""

import copy
import time
from collections.abc import Iterator

import pytest

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import PromptError
from shallowdraft.models import templates
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.shapes.shape import ModelShape

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "é"\n<b>漢</b>'},
    {"role": "assistant", "content": "é"},
    {"role": "user", "content": " Again. "},
]
WRITTEN = {
    "chatml": """{% for m in messages %}
    <|im_start|>{{ m['role'] }}
{{ m.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "tojson": "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "namespace": "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "generation": "{% generation %}{{ messages[2].content }}{% endgeneration %}",
    "the year": "{{ strftime_now('%Y') }}",
    "nothing": "",
}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model() -> sd.Model:
    tokenizer = byte_tokenizer(400)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "<end>"})
    return sd.Model("m", None, tokenizer)


def encoded(model: sd.Model, template: object) -> list[int]:
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = template
    return sd.Model("m", None, tokenizer).encode_chat(CHAT)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversation_is_what_transformers_makes_of_it(model, name: str):
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = model.tokenizer.apply_chat_template(CHAT, chat_template=WRITTEN[name], **options)
    assert encoded(model, WRITTEN[name] or "{{ '' }}") == expected


def test_one_of_several_templates(model):
    assert model.decode(encoded(model, {"default": "hello", "tool_use": "bye"})) == "hello"
    with pytest.raises(PromptError, match="no default"):
        encoded(model, {"tool_use": "bye"})


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    renderer = templates.Renderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "LONGEST_S", 1.0)
        patch.setattr(templates, "MEMORY_BYTES", 2**26)
        patch.setattr(templates, "_renderer", lambda: renderer)
        yield
    renderer.stop()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' * 10 ** 12 }}", "64 MiB of memory"),
        ("{{ [0] * 10 ** 12 }}", "64 MiB of memory"),
        ("{{ '%0999999999d' % 1 }}", "64 MiB of memory"),
        ("{{ 'a'.center(10 ** 12) }}", "64 MiB of memory"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "64 MiB"),
        ("{{ 'a' * 5000000 }}", "writes more than 4,194,304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{" + "(" * 9999 + ")" * 9999 + "}}", "recursion"),
        ("{{ raise_exception('no\n system') }}", "no system"),
        ("{{ messages[0].content.x.y }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ '\\ud800' }}", "not valid Unicode"),
        (ENDLESS, "longer than 1 s"),
        ("{{ (10 ** 9) ** (10 ** 7) }}", "longer than 1 s"),
    ],
)
def test_no_template_takes_more_than_its_share(model, impatient, template: str, said: str):
    begin_s = time.perf_counter()
    with pytest.raises(PromptError) as error:
        encoded(model, template)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - begin_s < 20  # of a busy machine
    assert model.decode(encoded(model, "hello")) == "hello"  # the next is rendered


def test_a_checkpoints_template_takes_one_line(tmp_path, capsys, impatient):
    shape = ModelShape(1, 32, 2, 48, 400)
    for template, said in (("{{ 1 / 0 }}", "division by zero"), (ENDLESS, "longer than 1 s")):
        tokenizer = byte_tokenizer(400)
        tokenizer.chat_template = template
        sd.Model("m", random_decoder(shape), tokenizer).save(tmp_path / "target")
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
        record = ["record", "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "trace.jsonl")]
        for command in (["generate", "--prompt", "hello"], record):
            assert main([*command, "--target", str(tmp_path / "target"), "--chat"]) == 2
            error = capsys.readouterr().err
            assert (said in error, error.count("\n")) == (True, 1)
