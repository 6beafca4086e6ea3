"""A server that is asked for too much, left alone, broken or told to stop."""

import http.client
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from running import LOOKAHEAD, in_thread, until

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.decoding.batch import Batch
from shallowdraft.errors import OptionError
from shallowdraft.serving.server import listen

LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    return sd.load("zoo:target", device="cpu"), sd.load_draft("zoo:4x128", device="cpu")


def ask(url: str, prompt="The river", **options) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": "zoo:target", "prompt": prompt} | options, timeout=60)


def leaving(url: str, **options) -> http.client.HTTPConnection:
    """A client that has asked and can go."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = json.dumps({"model": "zoo:target", "prompt": "The river"} | LONG | options)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def running(url: str) -> tuple[float, float]:
    page = httpx.get(f"{url}/metrics").text
    values = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))
    return tuple(
        float(values[f'vllm:num_requests_{kind}{{model_name="zoo:target"}}']) for kind in ("running", "waiting")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(models, stream: bool):
    with in_thread(*models, rows=1, queue=1) as (_, url):
        clients = [leaving(url, stream=stream)]
        until(lambda: running(url) == (1, 0))
        clients.append(leaving(url, stream=stream))
        until(lambda: running(url) == (1, 1))
        full = ask(url)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        for client in clients:
            client.close()
        until(lambda: running(url) == (0, 0))
        alone = sd.generate(models[0], "The river", draft=models[1], lookahead=LOOKAHEAD, max_new_tokens=5)
        assert ask(url, max_tokens=5, temperature=0).json()["choices"][0]["text"] == alone.text


def test_limits(models):
    with in_thread(models[0], None, queue=2, body_bytes=2_000, longest=40, prompt_tokens=30, tokens=20) as (_, url):
        assert ask(url, "a " * 5_000).status_code == 413
        chunked = httpx.post(f"{url}/v1/completions", content=iter([b"[" * 1_500] * 2))
        assert chunked.status_code == 413
        assert "2,000 bytes" in chunked.json()["error"]["message"]
        assert "at most 30" in ask(url, [5] * 31).json()["error"]["message"]
        assert "at most 20" in ask(url, max_tokens=21).json()["error"]["message"]
        assert "at most 2" in ask(url, ["a", "b", "c"]).json()["error"]["message"]
        full = ask(url, [5] * 30, max_tokens=20, ignore_eos=True).json()  # the text ends where there is no more room
        assert (full["usage"]["completion_tokens"], full["choices"][0]["finish_reason"]) == (10, "length")
        for content in (b"", b"{", b"[1]", b"\xff", b'{"\\ud800": 1}', b"[" * 1_900):
            broken = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        assert httpx.get(f"{url}/v1/nothing").json()["error"]["code"] == "not_found"
        chat = {"model": "zoo:target", "messages": [{"role": "user", "content": "x"}]}
        assert "--chat-template" in httpx.post(f"{url}/v1/chat/completions", json=chat).json()["error"]["message"]


def test_a_server_that_stops_finishes_what_runs_and_takes_no_more(models):
    with in_thread(*models) as (server, url), ThreadPoolExecutor(1) as pool, httpx.Client() as kept:
        long = pool.submit(ask, url, **LONG | {"max_tokens": 150})
        until(lambda: running(url) == (1, 0))
        server.stop()
        refused = kept.post(f"{url}/v1/completions", json={"model": "zoo:target", "prompt": "x"})
        assert (refused.status_code, kept.get(f"{url}/health").status_code) == (503, 503)
        assert long.result().json()["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_said_and_survived(models, monkeypatch, caplog, stream: bool):
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


def test_nothing_of_a_prompt_is_logged(models, caplog, capfd):
    caplog.set_level(logging.DEBUG, "shallowdraft")
    with in_thread(*models) as (_, url):
        for wrong in ({}, {"nonsense": "Zanzibar"}, {"model": "Zanzibar"}, {"prompt": ["Zanzibar", 3]}):
            ask(url, **{"prompt": "Zanzibar", "max_tokens": 3} | wrong)
        httpx.post(f"{url}/v1/completions", content=b"Zanzibar")
    assert "Zanzibar" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_for_others_needs_a_key(host: str, capsys, monkeypatch):
    monkeypatch.delenv("SHALLOWDRAFT_API_KEY", raising=False)
    assert main(["serve", "--target", "zoo:target", "--port", "0", "--host", host]) == 2
    error = capsys.readouterr().err
    assert "give an API key" in error
    assert error.count("\n") == 1


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
    ("options", "said"),
    [
        (["--rows", "0"], "rows is 0"),
        (["--queue", "-1"], "queue is -1"),
        (["--lookahead", "99"], "lookahead is 99"),
        (["--max-model-len", "5000"], "it must be 2 to 2048"),
        (["--api-key", ""], "the API key is empty"),
        (["--chat-template", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_take_one_line(options: list[str], said: str, capsys):
    assert main(["serve", "--target", "zoo:target", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert (said in error, error.count("\n")) == (True, 1)
