"""OpenAI's client against a server process: its answers are those of `generate`."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from running import LOOKAHEAD, ServerProcess

import shallowdraft as sd

KEY = "a key for tests"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SECRET = "zanzibar"  # in prompts, never in a log


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    return sd.load("zoo:target", device="cpu"), sd.load_draft("zoo:4x128", device="cpu")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "template").write_text(TEMPLATE)
    process = ServerProcess(folder, "--chat-template", str(folder / "template"), "--rows", "3", api_key=KEY)
    yield process
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.log.count("\n") == 1  # the address
    assert SECRET not in process.log


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


OPTIONS = [
    {"max_tokens": 20, "temperature": 0},
    {"max_tokens": 12, "temperature": 1.0, "seed": 5},
    {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 8, "stop": [" of", " and"]},
    {"max_tokens": 15, "temperature": 1.2, "seed": 9, "extra_body": {"top_k": 8}},
]


def generated(models, prompt, **options) -> sd.Generation:
    """Generate the same completion in this process."""
    mapped = {"max_new_tokens": options.pop("max_tokens")} | options.pop("extra_body", {}) | options
    return sd.generate(models[0], prompt, draft=models[1], lookahead=LOOKAHEAD, **mapped)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "drawn", "stops", "top-k"])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, models, options, stream: bool):
    alone = generated(models, f"Once upon a time in {SECRET}", **options)
    ids = models[0].encode(f"Once upon a time in {SECRET}")
    request = {"model": "zoo:target", "prompt": ids if stream else f"Once upon a time in {SECRET}", **options}
    if not stream:
        whole = client.completions.create(**request)
        choice, usage, text = whole.choices[0], whole.usage, whole.choices[0].text
    else:
        *chunks, last = client.completions.create(**request, stream=True, stream_options={"include_usage": True})
        choice, usage = chunks[-1].choices[0], last.usage
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert len(chunks) > 1
    assert (text, choice.finish_reason) == (alone.text, alone.finish_reason)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(alone.token_ids))


@pytest.mark.parametrize("stream", [False, True])
def test_chats(client, models, stream: bool):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
    ]
    prompt = f"system: Be brief.\nuser: {SECRET}\nassistant:"
    alone = generated(models, prompt, max_tokens=20, temperature=1.0, seed=2)
    request = {"model": "zoo:target", "messages": messages, "max_completion_tokens": 20, "seed": 2}
    if stream:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
        assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        text = "".join(delta.content for delta in deltas)
    else:
        text = client.chat.completions.create(**request).choices[0].message.content
    assert text == alone.text


def test_an_answer_can_be_sent_back_in_the_next_turn(client):
    """Its null fields are ignored, a developer is a system, and fields may have the value that has no effect."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    nothing = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me"}
    more = {"extra_body": {"repetition_penalty": 1.0, "min_p": 0, "tools": None}}
    for turn in range(2):
        request = {"model": "zoo:target", "messages": messages, "max_completion_tokens": 5, "temperature": 0}
        answer = client.chat.completions.create(**request, **nothing, **more)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"And {turn}?"}]


def test_two_limits_that_differ_are_refused(client):
    request = {"model": "zoo:target", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    assert client.chat.completions.create(**request, max_completion_tokens=5).usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="differ; send one"):
        client.chat.completions.create(**request, max_completion_tokens=6)


def test_each_of_several_prompts_gets_a_choice(client, models):
    prompts = ["The river", "The river", "A house"]
    options = {"max_tokens": 10, "temperature": 1.0, "seed": 4}
    choices = client.completions.create(model="zoo:target", prompt=prompts, **options).choices
    alone = generated(models, prompts, **options)
    assert [(choice.index, choice.text) for choice in choices] == [(i, out.text) for i, out in enumerate(alone)]


def test_requests_that_arrive_while_others_run(client, models):
    """There are more than rows, each with its own options."""
    requests = [(f"{SECRET} {number}", OPTIONS[number % 4]) for number in range(6)]
    barrier = threading.Barrier(len(requests))

    def ask(request):
        barrier.wait()
        prompt, options = request
        return client.completions.create(model="zoo:target", prompt=prompt, **options).choices[0].text

    with ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(ask, requests))
    assert texts == [generated(models, prompt, **options).text for prompt, options in requests]


def test_metrics_count_what_generate_counts(client, server, models):
    def counts() -> dict[str, float]:
        page = httpx.get(server.url.replace("/v1", "/metrics"), headers={"Authorization": f"Bearer {KEY}"}).text
        lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name.replace('model_name="zoo:target"', ""): float(value) for name, _, value in lines}

    before = counts()
    client.completions.create(model="zoo:target", prompt="The river", max_tokens=25, temperature=0)
    gained = {name: value - before.get(name, 0) for name, value in counts().items()}
    stats = generated(models, "The river", max_tokens=25, temperature=0).stats
    assert gained["vllm:generation_tokens_total{}"] == stats.tokens
    assert gained["vllm:prompt_tokens_total{}"] == len(models[0].encode("The river"))
    assert gained["vllm:spec_decode_num_drafts_total{}"] == stats.iterations
    assert gained["vllm:spec_decode_num_draft_tokens_total{}"] == stats.drafted
    assert gained["vllm:spec_decode_num_accepted_tokens_total{}"] == stats.accepted
    by_position = [gained[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{,position="{i}"}}'] for i in (0, 1)]
    assert by_position == [share * stats.iterations for share in stats.acceptance_by_position]
    assert gained["vllm:num_requests_running{}"] == 0


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model": "another"}, openai.NotFoundError),
        ({"logit_bias": {"1": 5}}, openai.BadRequestError),
        ({"n": 2}, openai.BadRequestError),
        ({"echo": True}, openai.BadRequestError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"temperature": 1e-9}, openai.BadRequestError),
        ({"prompt": ""}, openai.BadRequestError),
        ({"prompt": [99_999]}, openai.BadRequestError),
        ({"prompt": "\ud800"}, openai.BadRequestError),
        ({"max_tokens": 9_999}, openai.BadRequestError),
        ({"prompt": "a " * 3_000}, openai.BadRequestError),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError),
    ],
    ids=str,
)
def test_unsupported_requests_are_refused(server, changed, error):
    body = json.dumps({"model": "zoo:target", "prompt": "x"} | changed)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/completions", content=body, headers=headers)
    assert answer.status_code == error(message="", response=answer, body=None).status_code
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", ["\ud800", [{"type": "text", "text": "\ud800"}]])
def test_a_chat_that_is_not_unicode_is_refused(server, content):
    body = json.dumps({"model": "zoo:target", "messages": [{"role": "user", "content": content}]})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/chat/completions", content=body, headers=headers)
    assert (answer.status_code, "not valid Unicode" in answer.text) == (400, True)


def test_a_wrong_key_opens_only_health(server):
    stranger = openai.OpenAI(base_url=server.url, api_key=KEY + "?", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        stranger.completions.create(model="zoo:target", prompt="x")
    root = server.url.removesuffix("/v1")
    statuses = {
        path: httpx.get(root + path).status_code for path in ("/v1/models", "/metrics", "/openapi.json", "/health")
    }
    assert statuses == {"/v1/models": 401, "/metrics": 401, "/openapi.json": 401, "/health": 200}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Basic", ""])
def test_the_scheme_before_the_key_may_be_in_any_case(server, scheme: str):
    answer = httpx.get(f"{server.url}/models", headers={"Authorization": f"{scheme} {KEY}".strip()})
    assert answer.status_code == (200 if scheme.lower() == "bearer" else 401)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["zoo:target"]
    assert client.models.retrieve("zoo:target").id == "zoo:target"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.slow
def test_a_signal_lets_running_requests_finish(tmp_path: Path, models):
    process = ServerProcess(tmp_path)
    with openai.OpenAI(base_url=process.url, api_key="none", max_retries=0) as client:
        request = {"model": "zoo:target", "prompt": "The river", "max_tokens": 600, "temperature": 0}
        chunks = client.completions.create(**request, stream=True, extra_body={"ignore_eos": True})
        text = next(chunks).choices[0].text
        process.signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            client.completions.create(model="zoo:target", prompt="x")
        text += "".join(chunk.choices[0].text for chunk in chunks)
        assert text == generated(models, "The river", max_tokens=600, stop_tokens=()).text
    assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: int):
    process = ServerProcess(tmp_path)
    with openai.OpenAI(base_url=process.url, api_key="none", max_retries=0) as client:
        request = {"model": "zoo:target", "prompt": "x", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        chunks = client.completions.create(**request, stream=True)
        next(chunks)
        process.signal(number)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            client.completions.create(**request)
        process.signal(number)
        assert process.wait() == 128 + number
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(chunks)
    assert process.log.count("\n") == 1  # the address


@pytest.mark.slow
def test_half_an_answer_is_an_error_for_the_client(tmp_path: Path):
    process = ServerProcess(tmp_path)
    with openai.OpenAI(base_url=process.url, api_key="none", max_retries=0) as client:
        request = {"model": "zoo:target", "prompt": "x", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        chunks = client.completions.create(**request, stream=True)
        next(chunks)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(client.completions.create, **request)
            next(chunks)
            process.signal(signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(chunks)
            with pytest.raises(openai.APIConnectionError):
                whole.result(60)
    assert process.wait() == -signal.SIGKILL
