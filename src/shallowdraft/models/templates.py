"""Rendering of chat templates, which are programs, in a process with limited time and memory."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shallowdraft.errors import PromptError

LONGEST_S = 5.0  # of rendering
MEMORY_BYTES = 2**29  # beyond what the process needs to start
LONGEST = 2**22  # characters of a conversation, or of a template


def render(template: str, messages: Sequence[Mapping[str, str]], names: Mapping[str, Any]) -> str:
    """Render a conversation with a chat template, up to where the assistant's turn begins.

    `names` maps the names of special tokens in templates to the tokens.
    """
    fixed = {"tools": None, "documents": None, "add_generation_prompt": True}
    question = {"template": template, "variables": {**names, **fixed, "messages": list(messages)}}
    answer = _renderer().ask(question)
    if "error" in answer:
        raise PromptError(f"the chat template does not take this conversation: {answer['error']}")
    return answer["text"]


class Renderer:
    """The rendering process, started on first use, and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.stop)

    def ask(self, question: Mapping[str, Any]) -> dict[str, str]:
        """Send a template with its variables and return the process's answer: {"text": …} or {"error": …}."""
        line = json.dumps(question) + "\n"
        with self._lock:
            self._process = self._process or _start()
            try:
                answer = _exchange(self._process, line)
            except BaseException:  # an answer left in the pipe would be taken for the next question's
                self.stop()
                raise
            if answer.endswith("\n"):
                return dict(json.loads(answer))
            code = self.stop()
        timed_out = f"it takes longer than {LONGEST_S:g} s"
        return {"error": timed_out if code == -signal.SIGALRM else f"its process ended with {code}"}

    def stop(self) -> int | None:
        """End the process, if there is one, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(BrokenPipeError), process:
            pass
        return process.returncode


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """Send a line and return the answer, which has no newline at its end if the process has ended."""
    assert process.stdin
    assert process.stdout
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline()


@cache
def _renderer() -> Renderer:
    return Renderer()


def _start() -> subprocess.Popen[str]:
    """Start the process in a session of its own, which Ctrl-C does not reach; it ends when its input is closed."""
    limits = [str(limit) for limit in (LONGEST_S, MEMORY_BYTES, LONGEST)]
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("template_process.py")), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
