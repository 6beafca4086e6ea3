"""A server under load: many clients at once, among them some that leave, send nonsense or ask for too much.

Every answer is compared with `generate`'s. At the end: was every accepted request answered, are all rows free, did the
server's memory grow, does it end with 0? Throughput, time to the first token and latency by percentile are printed.

    python benchmarks/serving.py [--clients 64] [--seconds 300] [--rows 8] [--threads 2]
"""

import argparse
import asyncio
import json
import os
import platform
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

TARGET, DRAFT, LOOKAHEAD = "zoo:target", "zoo:4x128", 2
KINDS = {"whole": 30, "stream": 40, "leaves": 10, "malformed": 10, "oversize": 10}  # in percent
NONSENSE = (b"{", b"[]", b'{"model": 1}', b'{"model": "zoo:target", "prompt": "x", "unknown": 1}', b"\xff\xfe")


@dataclass(frozen=True)
class Case:
    """A request and what `generate` makes of it."""

    body: dict[str, object]
    text: str


@dataclass
class Found:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0


def cases() -> list[Case]:
    """Prompts of the zoo, greedy and drawn, short and long."""
    target, draft = sd.load(TARGET, device="cpu"), sd.load_draft(DRAFT, device="cpu")
    made = []
    for number, prompt in enumerate(load_prompts("zoo")[:16]):
        options = {"temperature": (0.0, 1.0)[number % 2], "seed": number, "top_p": (1.0, 0.9)[number // 2 % 2]}
        tokens = (8, 32, 64)[number % 3]
        alone = sd.generate(target, prompt.text, draft=draft, lookahead=LOOKAHEAD, max_new_tokens=tokens, **options)
        made.append(Case({"model": TARGET, "prompt": prompt.text, "max_tokens": tokens, **options}, alone.text))
    return made


async def streamed(http: httpx.AsyncClient, case: Case, found: Found, leave_after: float | None) -> str:
    begin_s, text, done = time.perf_counter(), "", False
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return f"refused with {answer.status_code}"
        async for line in answer.aiter_lines():
            if leave_after is not None and time.perf_counter() - begin_s > leave_after:
                return "left"
            if line == "data: [DONE]":
                done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if not text and event["choices"]:
                    found.first_s.append(time.perf_counter() - begin_s)
                text += "".join(choice["text"] for choice in event["choices"])
                found.tokens += event["usage"]["completion_tokens"] if event["usage"] else 0
    found.whole_s.append(time.perf_counter() - begin_s)
    return "answered" if done and text == case.text else "WRONG ANSWER" if done else "UNFINISHED ANSWER"


async def whole(http: httpx.AsyncClient, case: Case, found: Found) -> str:
    begin_s = time.perf_counter()
    answer = await http.post("/v1/completions", json=case.body)
    if answer.status_code != 200:
        return f"refused with {answer.status_code}"
    found.whole_s.append(time.perf_counter() - begin_s)
    found.tokens += answer.json()["usage"]["completion_tokens"]
    return "answered" if answer.json()["choices"][0]["text"] == case.text else "WRONG ANSWER"


async def client(url: str, number: int, until_s: float, given: list[Case], found: Found) -> None:
    """Asks one thing after the other; one that is told to come later waits."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        while time.perf_counter() < until_s:
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            try:
                outcome = await asked(http, kind, draw, draw.choice(given), found)
            except httpx.HTTPError as error:
                outcome = f"NO ANSWER ({type(error).__name__})"
            found.outcomes[f"{kind}: {outcome}"] += 1
            if outcome.endswith("429"):
                await asyncio.sleep(1)


async def asked(http: httpx.AsyncClient, kind: str, draw: random.Random, case: Case, found: Found) -> str:
    """One request, and what came of it."""
    if kind == "malformed":
        json_type = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=draw.choice(NONSENSE), headers=json_type)
        return f"refused with {answer.status_code}"
    if kind == "oversize":
        return await whole(http, Case(case.body | {"prompt": "x " * draw.choice((5_000, 900_000))}, ""), found)
    if kind == "whole":
        return await whole(http, case, found)
    return await streamed(http, case, found, draw.random() * 2 if kind == "leaves" else None)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def load(url: str, pid: int, given: argparse.Namespace, known: list[Case]) -> tuple[Found, list[float]]:
    """What the clients saw, and the server's memory at ten times."""
    found, memory = Found(), []
    until_s = time.perf_counter() + given.seconds
    clients = asyncio.gather(*(client(url, number, until_s, known, found) for number in range(given.clients)))
    for _ in range(10):
        await asyncio.sleep(given.seconds / 10)
        memory.append(resident_mib(pid))
    await clients
    return found, memory


def busy(url: str) -> float:
    """Requests that the server still has."""
    page = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_\w+{.*} (\S+)$", page, re.M))


def percentiles(name: str, seconds: list[float]) -> None:
    found = np.percentile(seconds, (50, 90, 99)) if seconds else [float("nan")] * 3
    print(f"{name:<20}" + "".join(f"  p{p} {s:7.3f} s" for p, s in zip((50, 90, 99), found, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    known = cases()
    options = f"--target {TARGET} --draft {DRAFT} --lookahead {LOOKAHEAD} --device cpu --port 0".split()
    sizes = ["--rows", str(given.rows), "--threads", str(given.threads)]
    command = [sys.executable, "-m", "shallowdraft", "serve", *options, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1")
        try:
            found, memory = asyncio.run(load(url, server.pid, given, known))
            time.sleep(1)  # for those who left
            left = busy(url)
        finally:
            server.send_signal(signal.SIGTERM)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{given.clients} clients for {given.seconds:.0f} s, {given.rows} rows, {given.threads} threads")
    for outcome, count in sorted(found.outcomes.items()):
        print(f"{outcome:<36}{count:>8,}")
    answered = sum(count for outcome, count in found.outcomes.items() if outcome.endswith(": answered"))
    print(f"{answered / given.seconds:.1f} answers/s, {found.tokens / given.seconds:.0f} tokens/s")
    percentiles("time to first token", found.first_s)
    percentiles("latency", found.whole_s)
    print(f"memory of the server in MiB: {', '.join(f'{mib:.0f}' for mib in memory)}")
    print(f"requests left in the server: {left:.0f}; exit code {server.returncode}")
    broken = any("ANSWER" in outcome or "500" in outcome for outcome in found.outcomes)
    return int(broken or left > 0 or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
