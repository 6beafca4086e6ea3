"""A server whose limits are exceeded, whose clients disconnect, whose engine fails, and that is told to stop."""

import copy
import http.client
import json
import logging
import os
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from pydantic import ValidationError
from running import LOOKAHEAD, in_thread, wait_until

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.commands.serve import _try_template
from shallowdraft.decoding.batch import Batch
from shallowdraft.errors import MemoryShortageError, OptionError
from shallowdraft.models import memory
from shallowdraft.serving import connection, scheduler
from shallowdraft.serving.app import RequestLimits
from shallowdraft.serving.schemas import CompletionRequest
from shallowdraft.serving.server import ApiServer, listen
from shallowdraft.serving.worker import Worker

LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    return sd.load("zoo:target", device="cpu"), sd.load_draft("zoo:4x128", device="cpu")


def ask(url: str, prompt="The river", **options) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": "zoo:target", "prompt": prompt} | options, timeout=60)


def send_long_request(url: str, **options) -> http.client.HTTPConnection:
    """Send a request without waiting for the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = json.dumps({"model": "zoo:target", "prompt": "The river"} | LONG | options)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def running_and_waiting(url: str) -> tuple[float, float]:
    page = httpx.get(f"{url}/metrics").text
    values = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))
    return tuple(
        float(values[f'vllm:num_requests_{kind}{{model_name="zoo:target"}}']) for kind in ("running", "waiting")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_row(models, stream: bool):
    with in_thread(*models, rows=1, queue=1) as (_, url):
        clients = [send_long_request(url, stream=stream)]
        wait_until(lambda: running_and_waiting(url) == (1, 0))
        clients.append(send_long_request(url, stream=stream))
        wait_until(lambda: running_and_waiting(url) == (1, 1))
        full = ask(url)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        for client in clients:
            client.close()
        wait_until(lambda: running_and_waiting(url) == (0, 0))
        alone = sd.generate(models[0], "The river", draft=models[1], lookahead=LOOKAHEAD, max_new_tokens=5)
        assert ask(url, max_tokens=5, temperature=0).json()["choices"][0]["text"] == alone.text


def test_limits(models):
    with in_thread(
        models[0], None, queue=2, max_body_bytes=2_000, max_model_len=40, max_prompt_tokens=30, max_new_tokens=20
    ) as (_, url):
        assert ask(url, "a " * 5_000).status_code == 413
        chunked = httpx.post(f"{url}/v1/completions", content=iter([b"[" * 1_500] * 2))
        assert chunked.status_code == 413
        assert "2,000 bytes" in chunked.json()["error"]["message"]
        assert "at most 30" in ask(url, [5] * 31).json()["error"]["message"]
        assert "at most 20" in ask(url, max_tokens=21).json()["error"]["message"]
        assert "at most 2" in ask(url, ["a", "b", "c"]).json()["error"]["message"]
        full = ask(url, [5] * 30, max_tokens=20, ignore_eos=True).json()  # ends at max_model_len
        assert (full["usage"]["completion_tokens"], full["choices"][0]["finish_reason"]) == (10, "length")
        for content in (b"", b"{", b"[1]", b"\xff", b'{"\\ud800": 1}', b"[" * 1_900):
            broken = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        assert httpx.get(f"{url}/v1/nothing").json()["error"]["code"] == "not_found"
        chat = {"model": "zoo:target", "messages": [{"role": "user", "content": "x"}]}
        assert "--chat-template" in httpx.post(f"{url}/v1/chat/completions", json=chat).json()["error"]["message"]


def test_a_stopping_server_finishes_running_requests_and_refuses_new_ones(models):
    with in_thread(*models) as (server, url), ThreadPoolExecutor(1) as pool, httpx.Client() as kept:
        long = pool.submit(ask, url, **LONG | {"max_tokens": 150})
        wait_until(lambda: running_and_waiting(url) == (1, 0))
        server.stop()
        refused = kept.post(f"{url}/v1/completions", json={"model": "zoo:target", "prompt": "x"})
        assert (refused.status_code, kept.get(f"{url}/health").status_code) == (503, 503)
        assert long.result().json()["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize("stream", [False, True])
def test_an_iteration_that_fails_is_reported_and_survived(models, monkeypatch, caplog, stream: bool):
    step = Batch.step

    def broken(self):
        monkeypatch.setattr(Batch, "step", step)
        raise RuntimeError("a test")

    with in_thread(*models) as (_, url):
        monkeypatch.setattr(Batch, "step", broken)
        failed = ask(url, "Zanzibar", stream=stream)
        assert ask(url, max_tokens=5).status_code == 200
    assert failed.status_code == (200 if stream else 500)  # a stream has begun then
    events = failed.text.split("\n\n") if stream else [f"data: {failed.text}", ""]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "an iteration failed" in caplog.text
    assert "Zanzibar" not in caplog.text


def test_a_server_ends_with_the_error_if_no_new_batch_can_be_made(models, monkeypatch):
    """The memory of the failed batch is free by then."""
    caches: list[weakref.ref] = []

    def broken(self):
        caches.append(weakref.ref(self._reader.cache))
        raise RuntimeError("a test")

    def refused(*_):
        assert caches[0]() is None
        raise MemoryShortageError("no room for another")

    monkeypatch.setattr(scheduler.log, "exception", lambda _: None)  # pytest would keep what it logs
    limits = RequestLimits(
        max_model_len=200, max_prompt_tokens=100, max_new_tokens=100, max_prompts=2, max_body_bytes=1000
    )
    server = ApiServer(*models, LOOKAHEAD, Worker(), rows=2, queue=2, limits=limits)
    with listen("127.0.0.1", 0, None) as listening, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.serve_on, listening)
        wait_until(lambda: server.started)
        monkeypatch.setattr(Batch, "step", broken)
        monkeypatch.setattr(Batch, "__init__", refused)
        assert ask(f"http://127.0.0.1:{listening.getsockname()[1]}").status_code == 500
        with pytest.raises(MemoryShortageError, match="no room"):
            ended.result(60)


def logging_method(calls: list[str], name: str) -> Callable[..., object]:
    """Return a method of `Batch` that appends its name to `calls` whenever it is called."""
    method = getattr(Batch, name)

    def logged(*args):
        calls.append(name)
        return method(*args)

    return logged


def test_short_requests_do_not_keep_a_long_one_waiting(models, monkeypatch):
    """An iteration runs between any two that join, even if they end with their first token and never run beside it."""
    calls: list[str] = []
    with in_thread(*models) as (_, url), ThreadPoolExecutor(6) as pool:
        for name in ("join", "step"):
            monkeypatch.setattr(Batch, name, logging_method(calls, name))
        long = pool.submit(ask, url, **LONG | {"max_tokens": 400})
        wait_until(lambda: "step" in calls)
        for _ in range(3):
            assert [answer.status_code for answer in pool.map(lambda _: ask(url, max_tokens=1), range(5))] == [200] * 5
        assert not long.done()
        assert ("join", "join") not in pairwise(calls)
        assert calls.count("join") == 16


def half_sent(url: str, sent: bytes) -> socket.socket:
    connection = socket.create_connection(urlsplit(url).netloc.split(":"), timeout=30)
    connection.sendall(sent)
    return connection


def test_an_incomplete_request_times_out(models, monkeypatch):
    """Nothing, half a head, half a body, also after a whole request; but not one that takes long to answer."""
    monkeypatch.setattr(connection, "REQUEST_TIMEOUT_S", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
    with in_thread(*models) as (_, url):
        for sent in (b"", head, head + b"\r\n{"):
            with half_sent(url, sent) as half:
                assert half.recv(1000) == b""
        with half_sent(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + head + b"\r\n{") as half:
            assert b"200 OK" in half.recv(1000)
            while half.recv(1000):
                pass
        with httpx.Client() as kept:
            for _ in range(2):
                body = {"model": "zoo:target", "prompt": "x"} | LONG | {"max_tokens": 600}
                assert kept.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def test_connections_are_limited(models, monkeypatch):
    monkeypatch.setattr(connection, "max_connections", lambda: 2)
    with in_thread(*models) as (_, url), half_sent(url, b"G"), half_sent(url, b"G"):
        third = half_sent(url, b"")
        with third, suppress(ConnectionResetError):
            assert third.recv(1000) == b""


MANY = {str(number): "" for number in range(100_000)}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"prompt": part * 100_000} for part in ([-1], [[]], ["a", 1], [[1], [-1]])),
        {"prompt": "x", "logit_bias": MANY},
    ],
    ids=["numbers", "lists", "kinds", "numbers in lists", "names in an object"],
)
def test_validation_of_a_long_list_stops_at_the_first_error(wrong: dict[str, object]):
    for body in ({"model": "m"} | wrong, MANY):
        with pytest.raises(ValidationError) as raised:
            CompletionRequest.model_validate(body)
        assert raised.value.error_count() == 1


@pytest.mark.parametrize(
    ("sent", "message", "param"),
    [
        (b"{", "the body is not valid JSON: Expecting property name", None),
        (b"[1]", "send a JSON object, with Content-Type: application/json", None),
        (b'{"model": "m", "prompt": 5}', "prompt: send text, token ids, or a list of either", "prompt"),
        (b'{"model": "m", "prompt": ""}', "prompt: String should have at least 1 character", "prompt"),
        (b'{"model": "m", "prompt": [4, -2]}', "prompt.1: Input should be greater than or equal to 0", "prompt.1"),
        (b'{"model": "m", "prompt": "x", "best": 1}', "this server does not take best", None),
        (
            b'{"model": "m", "prompt": "x", "temperature": "1"}',
            "temperature: Input should be a valid number",
            "temperature",
        ),
        (
            b'{"model": "m", "prompt": "x", "logit_bias": {"5": 1}}',
            "logit_bias: this server does not take 5",
            "logit_bias",
        ),
    ],
    ids=str,
)
def test_the_message_names_the_field(quiet_server: str, sent: bytes, message: str, param: str | None):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{quiet_server}/v1/completions", content=sent, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def quiet_server(models):
    with in_thread(models[0], None) as (_, url):
        yield url


def test_prompts_are_never_logged(models, caplog, capfd):
    caplog.set_level(logging.DEBUG, "shallowdraft")
    with in_thread(*models) as (_, url):
        for wrong in ({}, {"nonsense": "Zanzibar"}, {"model": "Zanzibar"}, {"prompt": ["Zanzibar", 3]}):
            ask(url, **{"prompt": "Zanzibar", "max_tokens": 3} | wrong)
        httpx.post(f"{url}/v1/completions", content=b"Zanzibar")
    assert "Zanzibar" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_needs_a_key(host: str, capsys, monkeypatch):
    monkeypatch.delenv("SHALLOWDRAFT_API_KEY", raising=False)
    assert main(["serve", "--target", "zoo:target", "--port", "0", "--host", host]) == 2
    error = capsys.readouterr().err
    assert "give an API key" in error
    assert error.count("\n") == 1


def test_answers_are_sent_without_waiting_for_acknowledgements():
    with listen("127.0.0.1", 0, None) as listening, socket.create_connection(listening.getsockname()):
        connected, _ = listening.accept()
        with connected:
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_addresses():
    with listen("0.0.0.0", 0, "a key") as taken:
        assert taken.getsockname()[0] == "0.0.0.0"
        with pytest.raises(OptionError, match="cannot listen"):
            listen("127.0.0.1", taken.getsockname()[1], None)
    with pytest.raises(OptionError, match="use another"):
        listen("no.such.host.invalid", 0, None)
    with pytest.raises(OptionError, match="port is 70000"):
        listen("127.0.0.1", 70_000, None)
    listen("localhost", 0, None).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows is 0"),
        (["--queue", "-1"], "queue is -1"),
        (["--lookahead", "99"], "lookahead is 99"),
        (["--max-model-len", "5000"], "it must be 2 to 2048"),
        (["--max-prompt-tokens", "5000"], "max-prompt-tokens is 5000; there is room for 2047"),
        (["--api-key", ""], "the API key is empty"),
        (["--chat-template", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_take_one_line(options: list[str], message: str, capsys):
    assert main(["serve", "--target", "zoo:target", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert (message in error, error.count("\n")) == (True, 1)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"])
def test_a_template_with_an_error_is_refused_at_the_start(tmp_path: Path, capsys, template: str):
    (tmp_path / "template").write_text(template)
    arguments = ["serve", "--target", "zoo:target", "--port", "0", "--device", "cpu"]
    assert main([*arguments, "--chat-template", str(tmp_path / "template")]) == 2
    error = capsys.readouterr().err
    assert ("the chat template does not take this conversation" in error, error.count("\n")) == (True, 1)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path, capsys):
    (tmp_path / "template").write_bytes(b"\x93NUMPY\x00")
    arguments = ["serve", "--target", "zoo:target", "--port", "0", "--device", "cpu"]
    for file, message in (
        (tmp_path / "template", "is not UTF-8 text"),
        ("/dev/zero", "longer than 4,194,304 characters"),
    ):
        assert main([*arguments, "--chat-template", str(file)]) == 2
        error = capsys.readouterr().err
        assert (message in error, error.count("\n")) == (True, 1)


def test_a_template_may_want_a_system_message(models):
    tokenizer = copy.copy(models[0].require_tokenizer())
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[1].content }}"
    )
    _try_template(replace(models[0], tokenizer=tokenizer))


def test_stop_strings_need_a_tokenizer(models):
    with in_thread(replace(models[0], tokenizer=None), None) as (_, url):
        body = {"prompt": [5, 6], "max_tokens": 3}
        assert ask(url, **body).status_code == 200
        refused = ask(url, **body, stop=["x"])
    assert (refused.status_code, "has no tokenizer" in refused.text) == (400, True)


def test_caches_of_both_models_must_fit(models, monkeypatch):
    """All rows twice while they are copied, and that of the prompt being read; each has lookahead + 1 slots more."""
    token_bytes = sum(model.shape.kv_bytes_per_token("float32") for model in models)
    needed_bytes = (2 * 8 + 1) * (2000 + LOOKAHEAD + 1) * token_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda _: needed_bytes)
    Batch(*models, LOOKAHEAD, 2000, 8)
    monkeypatch.setattr(memory, "free_bytes", lambda _: needed_bytes - 1)
    with pytest.raises(MemoryShortageError, match="a cache of 8 x 2000 tokens, and copies"):
        Batch(*models, LOOKAHEAD, 2000, 8)


def test_an_interrupt_while_models_load_exits_cleanly(monkeypatch, capsys):
    """Another thread loads them, so that the process must exit without the interpreter's clean-up."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def left(status: int):
        raise SystemExit(status)

    monkeypatch.setattr(sd, "load", interrupted)
    monkeypatch.setattr(os, "_exit", left)
    with pytest.raises(SystemExit) as end:
        main(["serve", "--target", "zoo:target", "--port", "0"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
