"""The text of an answer continues the text of the prompt exactly, with every kind of tokenizer."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2 as httpx
import pytest
from running import LOOKAHEAD, in_thread
from tokenizer_kinds import tokenizer_of

import shallowdraft as sd
from shallowdraft.models import templates
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape


@pytest.mark.parametrize("kind", ["llama", "unigram", "byte-level"])
def test_answers_begin_with_the_space_after_the_prompt(kind: str):
    tokenizer = tokenizer_of(kind)
    shape = replace(parse_shape("2x32/2h/48", vocab=len(tokenizer)), context=300)
    target = sd.Model("m", random_decoder(shape, seed=2, scale=2.0), tokenizer)
    ids = tokenizer.encode("She was called Lily.", add_special_tokens=False)
    with in_thread(target, target, max_model_len=200, max_prompt_tokens=60, max_new_tokens=40) as (_, url):
        for seed in range(4):
            options = {"max_tokens": 30, "temperature": 1.0, "seed": seed, "ignore_eos": True}
            body = {"model": "m", "prompt": ids} | options
            whole = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
            events = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
            pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
            alone = sd.generate(
                target, ids, draft=target, lookahead=LOOKAHEAD, max_new_tokens=30, temperature=1.0, seed=seed,
                stop_tokens=[],
            )  # fmt: skip
            assert "".join(pieces) == whole == alone.text
            assert target.decode(ids) + whole == target.decode(ids + alone.token_ids)
        assert 'vllm:generation_tokens_total{model_name="m"} 240.0' in httpx.get(f"{url}/metrics").text


def test_a_template_that_never_ends_does_not_block_other_requests(monkeypatch):
    """The chat gets an error in OpenAI's format after a while; completions are answered meanwhile."""
    ends = "{% if messages[0].content == 'end' %}{{ 1 / 0 }}{% endif %}"
    tokenizer = copy.copy(tokenizer_of("byte-level"))
    tokenizer.chat_template = ends + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    target = sd.Model("m", random_decoder(parse_shape("1x32/2h/48", vocab=len(tokenizer))), tokenizer)
    renderer = templates.Renderer()
    monkeypatch.setattr(templates, "LONGEST_S", 4.0)
    monkeypatch.setattr(templates, "_renderer", lambda: renderer)
    limits = httpx.Limits(max_connections=None)
    with (
        in_thread(target, None) as (_, url),
        httpx.Client(base_url=f"{url}/v1", timeout=60, limits=limits) as client,
        ThreadPoolExecutor(50) as pool,
    ):

        def chat(content: str) -> httpx.Response:
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            return client.post("/chat/completions", json=body)

        assert "division by zero" in chat("end").text
        endless = pool.submit(chat, "never")
        others = [pool.submit(chat, "end") for _ in range(45)]  # more than there are threads
        body = {"model": "m", "prompt": [5], "max_tokens": 3}
        assert client.post("/completions", json=body).status_code == 200
        assert not endless.done()
        refused = endless.result()
        assert all(other.result().status_code == 400 for other in others)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "longer than 4 s" in refused.json()["error"]["message"]
    renderer.stop()
