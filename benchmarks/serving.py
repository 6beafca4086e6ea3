"""A server under load from many clients at once; some disconnect, send invalid JSON or send prompts that are too long.

Every answer is compared with that of `generate`. At the end every accepted request must have been answered, all batch
rows must be free and the server must exit with 0. Throughput, time to the first token, latency and the server's memory
are printed.

    python benchmarks/serving.py [--clients 64] [--seconds 300] [--rows 8] [--threads 2]
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx2 as httpx
import numpy as np
import torch

import shallowdraft as sd
from shallowdraft.prompts import load_prompts
from shallowdraft.records import commit, processor

TARGET, DRAFT, LOOKAHEAD = "zoo:target", "zoo:4x128", 2
KINDS = {"whole": 30, "stream": 40, "disconnect": 10, "malformed": 10, "oversize": 10}  # percent of all requests
MALFORMED = (b"{", b"[]", b'{"model": 1}', b'{"model": "zoo:target", "prompt": "x", "unknown": 1}', b"\xff\xfe")


@dataclass(frozen=True)
class Case:
    """A request, and the text that `generate` returns for it."""

    body: dict[str, object]
    text: str


@dataclass
class Observations:
    """The clients' view of the server: outcomes, times and tokens."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0


def new_cases() -> list[Case]:
    """Return prompts of the zoo with short and long answers, greedy and sampled."""
    target, draft = sd.load(TARGET, device="cpu"), sd.load_draft(DRAFT, device="cpu")
    cases = []
    for number, prompt in enumerate(load_prompts("zoo")[:16]):
        options = {"temperature": (0.0, 1.0)[number % 2], "seed": number, "top_p": (1.0, 0.9)[number // 2 % 2]}
        tokens = (8, 32, 64)[number % 3]
        expected = sd.generate(target, prompt.text, draft=draft, lookahead=LOOKAHEAD, max_new_tokens=tokens, **options)
        cases.append(Case({"model": TARGET, "prompt": prompt.text, "max_tokens": tokens, **options}, expected.text))
    return cases


async def streamed(
    http: httpx.AsyncClient, case: Case, observations: Observations, disconnect_after_s: float | None
) -> str:
    """Stream an answer, or disconnect after some seconds; return the outcome."""
    begin_s, text, done = time.perf_counter(), "", False
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return f"refused with {answer.status_code}"
        async for line in answer.aiter_lines():
            if disconnect_after_s is not None and time.perf_counter() - begin_s > disconnect_after_s:
                return "disconnected"
            if line == "data: [DONE]":
                done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if not text and event["choices"]:
                    observations.first_token_s.append(time.perf_counter() - begin_s)
                text += "".join(choice["text"] for choice in event["choices"])
                observations.tokens += event["usage"]["completion_tokens"] if event["usage"] else 0
    observations.total_s.append(time.perf_counter() - begin_s)
    return "answered" if done and text == case.text else "WRONG ANSWER" if done else "UNFINISHED ANSWER"


async def whole(http: httpx.AsyncClient, case: Case, observations: Observations) -> str:
    """Ask for an answer as one object; return the outcome."""
    begin_s = time.perf_counter()
    answer = await http.post("/v1/completions", json=case.body)
    if answer.status_code != 200:
        return f"refused with {answer.status_code}"
    observations.total_s.append(time.perf_counter() - begin_s)
    observations.tokens += answer.json()["usage"]["completion_tokens"]
    return "answered" if answer.json()["choices"][0]["text"] == case.text else "WRONG ANSWER"


async def client(url: str, number: int, until_s: float, cases: list[Case], observations: Observations) -> None:
    """Send one request after another until `until_s`; wait a second if the queue was full."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        while time.perf_counter() < until_s:
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            try:
                outcome = await ask(http, kind, draw, draw.choice(cases), observations)
            except httpx.HTTPError as error:
                outcome = f"NO ANSWER ({type(error).__name__})"
            observations.outcomes[f"{kind}: {outcome}"] += 1
            if outcome.endswith("429"):
                await asyncio.sleep(1)


async def ask(http: httpx.AsyncClient, kind: str, draw: random.Random, case: Case, observations: Observations) -> str:
    """Send one request of a kind and return the outcome."""
    if kind == "malformed":
        json_type = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=draw.choice(MALFORMED), headers=json_type)
        return f"refused with {answer.status_code}"
    if kind == "oversize":
        return await whole(http, Case(case.body | {"prompt": "x " * draw.choice((5_000, 900_000))}, ""), observations)
    if kind == "whole":
        return await whole(http, case, observations)
    return await streamed(http, case, observations, draw.random() * 2 if kind == "disconnect" else None)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def run_clients(
    url: str, pid: int, options: argparse.Namespace, cases: list[Case]
) -> tuple[Observations, list[float]]:
    """Run all clients; return their observations and the server's memory in MiB at ten times."""
    observations, memory = Observations(), []
    until_s = time.perf_counter() + options.seconds
    clients = asyncio.gather(*(client(url, number, until_s, cases, observations) for number in range(options.clients)))
    for _ in range(10):
        await asyncio.sleep(options.seconds / 10)
        memory.append(resident_mib(pid))
    await clients
    return observations, memory


def unfinished_requests(url: str) -> float:
    """Return the number of requests that are running or waiting."""
    page = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_\w+{.*} (\S+)$", page, re.M))


def print_percentiles(name: str, seconds: list[float]) -> None:
    values = np.percentile(seconds, (50, 90, 99)) if seconds else [float("nan")] * 3
    print(f"{name:<20}" + "".join(f"  p{p} {s:7.3f} s" for p, s in zip((50, 90, 99), values, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = new_cases()
    models = f"--target {TARGET} --draft {DRAFT} --lookahead {LOOKAHEAD} --device cpu --port 0".split()
    sizes = ["--rows", str(options.rows), "--threads", str(options.threads)]
    command = [sys.executable, "-m", "shallowdraft", "serve", *models, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1")
        try:
            observations, memory = asyncio.run(run_clients(url, server.pid, options, cases))
            time.sleep(1)  # the server drops the requests of clients that disconnected
            unfinished = unfinished_requests(url)
        finally:
            server.send_signal(signal.SIGTERM)
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}")
    print(f"{options.clients} clients for {options.seconds:.0f} s, {options.rows} rows, {options.threads} threads")
    for outcome, count in sorted(observations.outcomes.items()):
        print(f"{outcome:<36}{count:>8,}")
    answered = sum(count for outcome, count in observations.outcomes.items() if outcome.endswith(": answered"))
    print(f"{answered / options.seconds:.1f} answers/s, {observations.tokens / options.seconds:.0f} tokens/s")
    print_percentiles("time to first token", observations.first_token_s)
    print_percentiles("latency", observations.total_s)
    print(f"memory of the server in MiB: {', '.join(f'{mib:.0f}' for mib in memory)}")
    print(f"requests unfinished in the server: {unfinished:.0f}; exit code {server.returncode}")
    broken = any("ANSWER" in outcome or "500" in outcome for outcome in observations.outcomes)
    return int(broken or unfinished > 0 or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
