"""`bench` against an HTTP server that streams from the zoo, counts as vLLM does, refuses keys, breaks off and hangs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

import shallowdraft as sd
from shallowdraft.benchmarking import load
from shallowdraft.benchmarking.endpoint import Counters, Endpoint, parse_counters
from shallowdraft.benchmarking.levels import speed_up, summarise
from shallowdraft.cli import main
from shallowdraft.errors import OptionError, RecordError, ServerError
from shallowdraft.identity import folder_digest
from shallowdraft.models import zoo
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records, masked
from shallowdraft.runs.servers import KIND

MODEL, KEY, LOOKAHEAD, TOKENS = "zoo:target", "a secret", 2, 8
TEXTS = "Once", "The sea", "A man"
PREFIX = "vllm:spec_decode_num_"


class ZooServer:
    """An application with counters; the words fail, hang and cut in a prompt make it misbehave."""

    def __init__(self) -> None:
        self.target, self.draft = sd.load("zoo:target"), sd.load("zoo:2x192")
        self.total = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        self.lock, self.hold = threading.Lock(), threading.Event()
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.get("/metrics", response_class=PlainTextResponse)(self.metrics)

    def models(self, request: Request) -> dict[str, object]:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            raise HTTPException(401)
        return {"data": [{"id": MODEL, "owned_by": "somebody"}]}

    def metrics(self) -> str:
        lines = [f'{PREFIX}{name}_total{{engine="0"}} {float(count)}' for name, count in self.total.items()]
        return "\n".join(["# TYPE some counter", *lines, f'{PREFIX}accepted_tokens_per_pos_total{{position="0"}} 7.0'])

    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(self.stream(body, body["prompt"], chat=False), media_type="text/event-stream")

    async def chat(self, request: Request) -> StreamingResponse:
        body = await request.json()
        text = body["messages"][0]["content"]
        return StreamingResponse(self.stream(body, text, chat=True), media_type="text/event-stream")

    def stream(self, body: dict[str, object], prompt: str, *, chat: bool) -> Iterator[str]:
        if "fail" in prompt:
            yield f"data: {json.dumps({'error': {'message': 'out of memory'}})}\n\n"
            return
        if "hang" in prompt:
            self.hold.wait(60)
        with self.lock:  # one at a time
            pieces = sd.stream(
                self.target, prompt, draft=self.draft, lookahead=LOOKAHEAD, max_new_tokens=body["max_tokens"]
            )
            for piece in pieces:
                choice = {"delta": {"content": piece.text}} if chat else {"text": piece.text}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            stats = pieces.result.stats
            counts = stats.iterations, stats.iterations * LOOKAHEAD, stats.emitted - stats.iterations
            for name, count in zip(self.total, counts, strict=True):
                self.total[name] += count
        last = {"choices": [], "usage": {"completion_tokens": stats.tokens, "prompt_tokens": 3}}
        if chat:
            names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
            last["metrics"] = {"speculative_decoding": dict(zip(names, counts, strict=True))}
        yield f"data: {json.dumps(last)}\n\n"
        if "cut" not in prompt:
            yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, ZooServer]]:
    zoo_server = ZooServer()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(zoo_server.app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}", zoo_server
    zoo_server.hold.set()
    server.should_exit = True
    thread.join()


def prompts(folder: Path, *texts: str) -> str:
    file = folder / "some.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text, "id": str(number)}) + "\n" for number, text in enumerate(texts))
    )
    return str(file)


def arguments(url: str, file: str, out: Path, *more: str) -> list[str]:
    options = ["bench", "--url", url, "--model", MODEL, "--prompts", file, "--out", str(out), "--api-key", KEY]
    return [*options, "--max-new-tokens", str(TOKENS), *more]


def test_a_run_measures_and_counts(served, tmp_path: Path, capsys, monkeypatch):
    url, server = served
    command = arguments(f"{url}/v1", prompts(tmp_path, *TEXTS), tmp_path / "out.jsonl")
    command += ["--draft", "zoo:2x192", "--lookahead", str(LOOKAHEAD)]
    monkeypatch.setattr(sys, "argv", ["shallowdraft", *command])
    assert main([*command, "--concurrency", "1", "2", "--repeats", "2", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert [(level["concurrency"], level["requests"], level["failed"]) for level in levels] == [(1, 6, 0), (2, 6, 0)]
    for level in levels:
        low, high = level["tokens_per_s_interval"]
        assert 0 < low <= level["tokens_per_s"] <= high
        assert 0 < level["ttft_s"] <= level["ttft_s_p95"]
    options = {"draft": server.draft, "lookahead": LOOKAHEAD, "max_new_tokens": TOKENS}
    ours = sd.total([sd.generate(server.target, text, **options).stats for text in TEXTS], one_batch=False)
    assert [level["tar"] for level in levels] == pytest.approx(
        [ours.emitted / ours.iterations] * 2
    )  # without the warm-up
    file = Records.read(tmp_path / "out.jsonl", KIND)
    assert (file.about["draft"], file.about["lookahead"]) == ("zoo:2x192", LOOKAHEAD)
    assert file.header["provenance"]["engine"] == "somebody"
    rows = list(file)
    expected = sd.generate(server.target, "Once", max_new_tokens=TOKENS).text
    answers = [row for row in rows if "tokens" in row]
    assert all(row["tokens"] == TOKENS for row in answers)
    assert [row["text"] for row in answers if row["id"] == "0"] == [expected] * 4
    assert KEY not in (tmp_path / "out.jsonl").read_text()
    assert main([*command, "--concurrency", "1", "2", "--repeats", "2"]) == 0  # sends no request
    assert len(list(Records.read(tmp_path / "out.jsonl", KIND))) == len(rows)
    assert "first token ms" in capsys.readouterr().out


def test_chat_with_counts_of_each_request(served, tmp_path: Path, capsys):
    url, server = served
    assert main(arguments(url, prompts(tmp_path, "Once"), tmp_path / "out.jsonl", "--chat", "--json")) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    ours = sd.generate(server.target, "Once", draft=server.draft, lookahead=LOOKAHEAD, max_new_tokens=TOKENS).stats
    assert level["requests"] == 1
    assert level["tar"] == pytest.approx(ours.emitted / ours.iterations)


def test_failed_requests_are_counted_and_sent_again(served, tmp_path: Path, capsys):
    url, _ = served
    out = tmp_path / "out.jsonl"
    assert main(arguments(url, prompts(tmp_path, "Once", "please fail", "cut it"), out, "--json")) == 2
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert (level["requests"], level["failed"]) == (1, 2)
    errors = [row["error"] for row in Records.read(out, KIND) if "error" in row]
    assert any("broke off: out of memory" in error for error in errors)
    assert any("the stream has no end" in error for error in errors)
    assert main(arguments(url, prompts(tmp_path, "Once", "well", "now"), out, "--json")) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert (level["requests"], level["failed"]) == (3, 0)
    assert main(arguments(url, prompts(tmp_path, "please fail"), out, "--concurrency", "2")) == 2
    assert "nothing was answered at 2 at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", "wrong"], "refuses the key"),
        (["--model", "other"], "does not serve other; it serves zoo:target"),
        (["--url", "http://127.0.0.1:9"], "no server answers there"),
        (["--url", "nowhere"], "nowhere"),
        (["--concurrency", "0"], "at least 1"),
        (["--draft", "zoo:2x192"], "--draft and --lookahead go together"),
        (["--prompts", "no-such-set"], "no set of that name"),
    ],
)
def test_bad_input(served, tmp_path: Path, capsys, options: list[str], message: str):
    assert main(arguments(served[0], prompts(tmp_path, "Once"), tmp_path / "out.jsonl", *options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_an_interrupted_run_keeps_its_records(served, tmp_path: Path):
    command = arguments(served[0], prompts(tmp_path, "Once", "hang"), tmp_path / "out.jsonl")
    command = [sys.executable, "-m", "shallowdraft", *command]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background shell ignores it, and its children inherit that
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            while not (tmp_path / "out.jsonl").exists() or '"tokens"' not in (tmp_path / "out.jsonl").read_text():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in error
    assert summarise(tmp_path / "out.jsonl")[0].requests == 1


def test_the_disk_is_synced_only_at_the_end_of_a_level(served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record is in the file at once; syncing it would disturb the requests that are being timed."""
    out, synced, sync = tmp_path / "out.jsonl", [], os.fsync

    def watched(file: int) -> None:
        synced.append(len(rows(out)))
        sync(file)

    def rows(path: Path) -> list[Record]:
        return [row for row in Records.read(path, KIND) if "tokens" in row]

    monkeypatch.setattr(os, "fsync", watched)
    prompts = [("some", Prompt(str(number), "", text)) for number, text in enumerate(TEXTS)]
    with closing(Endpoint(served[0], MODEL, KEY)) as endpoint:
        for count in load.run_load(endpoint, load.Load(prompts, [1, 2], TOKENS), out):
            assert len(rows(out)) == count
    assert synced == [len(TEXTS), 2 * len(TEXTS)]


def test_a_server_of_another_protocol(served):
    with closing(Endpoint(f"{served[0]}/metrics?", MODEL, KEY)) as endpoint, pytest.raises(ServerError, match="speak"):
        endpoint.check()


def test_counters_of_vllm_and_sglang():
    assert parse_counters("process_cpu_seconds_total 1.5\n") is None
    first = parse_counters(f'{PREFIX}drafts_total{{engine="0"}} 10\n{PREFIX}drafts_total{{engine="1"}} 5.0\n')
    assert first == Counters(iterations=15)
    positions = f'{PREFIX}accepted_tokens_per_pos_total{{engine="0",position="1"}} 4\n{PREFIX}drafts_total 20\n'
    assert parse_counters(positions).since(first)["accepted_by_position"] == {"1": 4}
    assert parse_counters('sglang:spec_accept_length{tp_rank="0"} 2.5\n').tar == 2.5


@pytest.mark.parametrize("option", [["--api-key", KEY], ["--api_key", KEY], [f"--api-key={KEY}"], [f"--api_key={KEY}"]])
def test_the_key_is_masked_in_every_spelling(option: list[str]):
    kept = masked(["shallowdraft", "bench", *option, "--chat"])
    assert KEY not in " ".join(kept)
    assert kept[-1] == "--chat"


@pytest.mark.parametrize("ending", ["\n", " ", "\r\n"])
def test_a_key_may_end_with_white_space(served, ending: str):
    with closing(Endpoint(served[0], MODEL, KEY + ending)) as endpoint:
        endpoint.check()


def test_a_key_that_no_header_can_carry_is_not_shown(served):
    for key in ("sec\nret", "sec\x00ret", "secrét"):
        with pytest.raises(OptionError, match="the API key holds characters") as caught:
            Endpoint(served[0], MODEL, key)
        assert "sec" not in str(caught.value)


def test_a_password_in_the_address_is_not_shown(tmp_path: Path, capsys):
    for url in ("http://me:secret@127.0.0.1:9/v1", "me:secret@127.0.0.1:9", "http://me:secret@[::1"):
        command = arguments(url, prompts(tmp_path, "a"), tmp_path / "out.jsonl")
        assert main(command) == 2
        printed = capsys.readouterr()
        assert "secret" not in printed.out + printed.err.replace(KEY, "")
        assert not (tmp_path / "out.jsonl").exists()
    with closing(Endpoint("http://me:secret@127.0.0.1:9/v1", MODEL)) as endpoint:
        assert endpoint.url == "http://…@127.0.0.1:9"


def test_the_shares_of_requests_add_up_to_the_time_that_passed(monkeypatch):
    """One request from 0 to 4 s, another from 1 to 3, then none, then one from 10 to 11: five seconds in all."""
    times = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr(load.time, "perf_counter", lambda: next(times))
    clock = load.SharedClock()
    long = clock.begin()
    short = clock.begin()
    short = clock.end() - short
    long = clock.end() - long
    last = clock.begin()
    assert (long, short, clock.end() - last) == (3, 1, 1)


def answer(concurrency: int, number: int, prompt: str, share_s: float, in_run: int = 8) -> Record:
    """Build a record of ten tokens; one other request was under way all the time."""
    key = {"concurrency": concurrency, "round": number, "set": "s", "id": prompt, "in_run": in_run}
    times = {"total_s": 2 * share_s, "share_s": share_s, "arrivals_s": [share_s, 2 * share_s]}
    return key | times | {"tokens": 10, "speculation": None}


def test_prompts_with_more_answers_count_with_all_of_them(tmp_path: Path):
    """One prompt is answered once, the other twice; seconds and tokens add up."""
    file = Records.open(tmp_path / "out.jsonl", KIND, {})
    for number, prompt, share_s in [(0, "a", 1.0), (1, "a", 1.0), (0, "b", 8.0)]:
        file.append(answer(4, number, prompt, share_s))
    (level,) = summarise(file.path)
    assert (level.requests, level.tokens_per_s, level.under_way) == (3, 3, 2)
    assert (level.ttft_s, level.between_s) == (1, pytest.approx(10 / 27))
    assert (level.tokens_per_s_interval[0], level.tokens_per_s_interval[1]) == (pytest.approx(1.25), 10)


def test_one_token_has_no_time_between_tokens(served, tmp_path: Path, capsys):
    command = arguments(served[0], prompts(tmp_path, "Once"), tmp_path / "out.jsonl", "--concurrency", "8")
    assert main([*command, "--max-new-tokens", "1", "--json"]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert level["between_s"] is None
    assert level["under_way"] == pytest.approx(1, rel=0.05)
    assert main([*command, "--max-new-tokens", "1"]) == 0
    assert "of 8 at once only 1.0 were under way" in capsys.readouterr().out


def test_the_speed_up_over_another_server(tmp_path: Path):
    """The prompts that both answered count: 20 tokens in 3 s against 20 in 6."""
    times = {"fast": {"a": 1.0, "b": 2.0, "c": 9.0}, "slow": {"a": 4.0, "b": 2.0, "d": 9.0}}
    for name, seconds in times.items():
        file = Records.open(tmp_path / name, KIND, {})
        for prompt, share_s in seconds.items():
            file.append(answer(1, 0, prompt, share_s))
    ratio, (low, high) = speed_up(tmp_path / "fast", tmp_path / "slow", 1)
    assert ratio == pytest.approx(2)
    assert (low, high) == pytest.approx((1, 4))
    assert speed_up(tmp_path / "fast", tmp_path / "slow", 2) is None


def test_servers_that_were_sent_different_requests_are_not_compared(tmp_path: Path):
    """One of two equal servers was sent twice as many requests, so that each has half the share."""
    for name, rounds in (("much", 2), ("little", 1)):
        file = Records.open(tmp_path / name, KIND, {})
        for number in range(rounds):
            file.append(answer(2, number, "a", 1.0 / rounds))
    assert speed_up(tmp_path / "much", tmp_path / "little", 2) is None


def test_a_request_sent_again_alone_does_not_count_for_throughput(tmp_path: Path):
    for name, (share_s, in_run) in {"whole": (0.5, 4), "again": (1.0, 1)}.items():
        file = Records.open(tmp_path / name, KIND, {})
        for prompt in "abc":
            file.append(answer(2, 0, prompt, 0.5, 4))
        file.append(answer(2, 0, "d", share_s, in_run))
    (level,) = summarise(tmp_path / "again")
    assert (level.requests, level.tokens_per_s, level.under_way) == (4, 20, 2)
    assert speed_up(tmp_path / "whole", tmp_path / "again", 2) == (1, (1, 1))


def test_models_in_folders_are_known_by_their_content(served, tmp_path: Path, capsys):
    draft, moved, out = tmp_path / "draft", tmp_path / "moved", tmp_path / "out.jsonl"
    shutil.copytree(zoo.folder("zoo:2x192"), draft)
    command = arguments(served[0], prompts(tmp_path, "Once"), out, "--lookahead", str(LOOKAHEAD))
    assert main([*command, "--draft", str(draft)]) == 0
    about = Records.read(out, KIND).about
    assert (about["draft"], about["model"]) == (str(draft), MODEL)
    assert about["draft_digest"] == folder_digest(draft)
    assert about["model_digest"] == folder_digest(zoo.folder(MODEL))
    draft.rename(moved)
    assert main([*command, "--draft", str(moved)]) == 0  # the same weights elsewhere
    capsys.readouterr()
    shutil.copytree(zoo.folder("zoo:4x128"), draft)
    assert main([*command, "--draft", str(draft)]) == 2  # other weights under the first name
    assert "was begun with another draft" in capsys.readouterr().err


def test_a_file_without_digests_is_continued_by_name(served, tmp_path: Path, capsys):
    out = tmp_path / "out.jsonl"
    command = arguments(served[0], prompts(tmp_path, "Once"), out, "--lookahead", str(LOOKAHEAD))
    assert main([*command, "--draft", "zoo:2x192"]) == 0
    header, *rows = out.read_text().splitlines(keepends=True)
    header = json.loads(header)
    del header["about"]["draft_digest"], header["about"]["model_digest"]  # as earlier versions wrote it
    out.write_text("".join([json.dumps(header) + "\n", *rows]))
    assert main([*command, "--draft", "zoo:2x192"]) == 0
    assert out.read_text().splitlines(keepends=True)[1:] == rows  # sends no request
    assert main([*command, "--draft", "zoo:4x128"]) == 2
    assert "was begun with another draft" in capsys.readouterr().err


def test_a_file_begun_with_a_draft_is_not_continued_without(served, tmp_path: Path, capsys):
    command = arguments(served[0], prompts(tmp_path, "Once"), tmp_path / "out.jsonl")
    assert main([*command, "--draft", "d", "--lookahead", "1"]) == 0
    assert main(command) == 2
    assert "was begun with another draft, lookahead" in capsys.readouterr().err


def test_a_file_without_answers(tmp_path: Path):
    Records.open(tmp_path / "out.jsonl", KIND, {}).append(
        {"concurrency": 1, "round": 0, "set": "s", "id": "a", "error": "no luck"}
    )
    with pytest.raises(RecordError, match="it said: no luck"):
        summarise(tmp_path / "out.jsonl")
