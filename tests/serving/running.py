"""Servers to test: in a process of their own as a user starts them, or in a thread where a test can look inside."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import shallowdraft as sd
from shallowdraft.serving.app import Limits
from shallowdraft.serving.server import Server, listen
from shallowdraft.serving.worker import Worker

LOOKAHEAD = 2
PAIR = ["--target", "zoo:target", "--draft", "zoo:4x128", "--lookahead", str(LOOKAHEAD)]


class Process:
    """`shallowdraft serve` on a free port, without a GPU."""

    def __init__(self, folder: Path, *options: str, api_key: str = "") -> None:
        self._log = folder / "server.log"
        environment = {name: value for name, value in os.environ.items() if name != "SHALLOWDRAFT_API_KEY"}
        command = [sys.executable, "-m", "shallowdraft", "serve", *PAIR, "--port", "0", "--threads", "1", *options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--device", "cpu"],
                stdout=log,
                stderr=log,
                env=environment | ({"SHALLOWDRAFT_API_KEY": api_key} if api_key else {}),
            )
        until(lambda: "served at" in self.log or self._process.poll() is not None, 300)
        found = re.search(r"http://\S+", self.log)
        assert found, self.log
        self.url = found[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(60)


@contextmanager
def in_thread(
    target: sd.Model, draft: sd.Model | None, *, rows: int = 4, queue: int = 8, body_bytes: int = 100_000, **limits: int
) -> Iterator[tuple[Server, str]]:
    given = {"longest": 2000, "prompt_tokens": 500, "tokens": 1900, "prompts": queue} | limits
    limited = Limits(**given, body_bytes=body_bytes)
    server = Server(target, draft, LOOKAHEAD, Worker(), rows=rows, queue=queue, limits=limited)
    with listen("127.0.0.1", 0, None) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.serve_on, args=(listening,))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{port}"
        finally:
            server.stop()
            thread.join(60)
    assert not thread.is_alive()


def until(true: Callable[[], bool], most_s: float = 60) -> None:
    begin_s = time.perf_counter()
    while not true():
        assert time.perf_counter() - begin_s < most_s
        time.sleep(0.02)
