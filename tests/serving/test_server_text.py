"""What a server answers is what the decoded whole has beyond the prompt, with every kind of tokenizer."""

import json
from dataclasses import replace

import httpx2 as httpx
import pytest
from running import LOOKAHEAD, in_thread
from tokenizer_kinds import tokenizer_of

import shallowdraft as sd
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes import parse


@pytest.mark.parametrize("kind", ["llama", "unigram", "byte-level"])
def test_answers_begin_with_their_space(kind: str):
    tokenizer = tokenizer_of(kind)
    shape = replace(parse("2x32/2h/48", vocab=len(tokenizer)), context=300)
    target = sd.Model("m", random_decoder(shape, seed=2, scale=2.0), tokenizer)
    ids = tokenizer.encode("She was called Lily.", add_special_tokens=False)
    with in_thread(target, target, longest=200, prompt_tokens=60, tokens=40) as (_, url):
        for seed in range(4):
            options = {"max_tokens": 30, "temperature": 1.0, "seed": seed, "ignore_eos": True}
            asked = {"model": "m", "prompt": ids} | options
            whole = httpx.post(f"{url}/v1/completions", json=asked).json()["choices"][0]["text"]
            events = httpx.post(f"{url}/v1/completions", json=asked | {"stream": True}).text.split("\n\n")[:-2]
            pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
            alone = sd.generate(
                target, ids, draft=target, lookahead=LOOKAHEAD, max_new_tokens=30, temperature=1.0, seed=seed,
                stop_tokens=[],
            )  # fmt: skip
            assert "".join(pieces) == whole == alone.text
            assert target.decode(ids) + whole == target.decode(ids + alone.token_ids)
        assert 'vllm:generation_tokens_total{model_name="m"} 240.0' in httpx.get(f"{url}/metrics").text
