"""Servers for tests: `shallowdraft serve` in a process, or an `ApiServer` in a thread that a test can look into."""

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
from shallowdraft.serving.app import RequestLimits
from shallowdraft.serving.server import ApiServer, listen
from shallowdraft.serving.worker import Worker

LOOKAHEAD = 2
PAIR = ["--target", "zoo:target", "--draft", "zoo:4x128", "--lookahead", str(LOOKAHEAD)]


class ServerProcess:
    """A process of `shallowdraft serve` on a free port, on the CPU."""

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
        wait_until(lambda: "served at" in self.log or self._process.poll() is not None, 300)
        address = re.search(r"http://\S+", self.log)
        assert address, self.log
        self.url = address[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(60)


@contextmanager
def in_thread(
    target: sd.Model, draft: sd.Model | None, *, rows: int = 4, queue: int = 8, **limits: int
) -> Iterator[tuple[ApiServer, str]]:
    """Run a server in a thread; yield it and its URL."""
    defaults = {"max_model_len": 2000, "max_prompt_tokens": 500, "max_new_tokens": 1900, "max_body_bytes": 100_000}
    request_limits = RequestLimits(**defaults | {"max_prompts": queue} | limits)
    server = ApiServer(target, draft, LOOKAHEAD, Worker(), rows=rows, queue=queue, limits=request_limits)
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


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    begin_s = time.perf_counter()
    while not condition():
        assert time.perf_counter() - begin_s < timeout_s
        time.sleep(0.02)
