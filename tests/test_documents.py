"""Every command in the documents runs, in the order in which it stands there, in one folder a document."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shallowdraft.cli import main
from shallowdraft.models.synthetic import make_pair
from shallowdraft.profiling import measure as measuring
from shallowdraft.shapes.notation import parse_shape

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
COMMANDS = r"(shallowdraft|torchrun|python|pip|make|ray) "  # how a line of a block begins that is one

LEFT_OUT = {
    r"pip install ": "changes the environment that the tests run in",
    r"make (test|check)$": "these tests are what it runs",
    r"ray start ": "leaves processes behind on the machine; tests/studying/test_cluster.py makes a cluster of its own",
    r"shallowdraft study .* --cluster ": "needs that cluster; tests/studying/test_cluster.py runs it",
    r"torchrun --nnodes 2 ": "needs a second machine",
}
"""Commands that no test runs as they stand, and why."""

SLOW = r"shallowdraft (demo|serve|bench|pretrain|prune|distill)|shallowdraft design .*--search|torchrun|from openai"
"""What only the long run does; the quick one leaves it out."""

SMALLER = {
    "study": "--limit 2 --lookaheads 1:2 --max-new-tokens 14 --rounds 1 --live 1",
    "record": "--limit 3 --max-new-tokens 14",
    "profile": "--lookaheads 1,4 --rounds 1 --contexts 16",
    "generate": "--max-new-tokens 4",
    "skip-search": "--trials 1",
}
"""What the quick run adds to a verb, so that it takes a second; a sample of a time is one iteration then."""

INSTEAD = {
    r"--tokens \d+": "--tokens 16384 --batch-tokens 2048 --sequence 64",  # hours of training
    r"--generated \d+": "--generated 16384",
    r"--search": "--search --candidates 2 --tokens 20000 --generated 20000",
    r"--batches 1 4 16": "--batches 1 4 16 --rounds 1 --lookaheads 1,2,8",  # a quarter of an hour
    r"--nproc-per-node 8": "--nproc-per-node 2",  # as many cores as a small machine has
    r"\bDIR\b": "target",
}
"""What both runs replace in a command."""

STUDY = "shallowdraft study --target zoo:target --drafts zoo:4x128 --prompts zoo --limit 8 --out run"


def write_corpus(folder: Path) -> None:
    """Sources of the package and its tests, as text of one domain."""
    (folder / "text").mkdir()
    for name, part in (("code", (ROOT / "src").rglob("*.py")), ("code-val", (ROOT / "tests").rglob("*.py"))):
        lines = [json.dumps({"text": file.read_text()}) for file in sorted(part)]
        (folder / "text" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_pair(folder: Path) -> None:
    """A target whose tokenizer knows where documents end, as training asks for, and a draft."""
    pair = make_pair(parse_shape("4x64/2h/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8)
    pair.target.tokenizer.eos_token = pair.target.tokenizer.convert_ids_to_tokens(511)
    pair.save(folder)


GIVEN: dict[str, list[str | Callable[[Path], None]]] = {
    "docs/production.md": [STUDY],
    "docs/report.md": [STUDY, "cp -r run other-run"],
    "docs/machines.md": [write_pair, write_corpus],
    "docs/building.md": [write_corpus],
}
"""What a document takes for granted."""


def steps(document: str) -> list[str]:
    """Commands and Python examples in order; of commands with comments and several lines what a shell would see."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M):
        if language == "python":
            found.append(block)
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        found += [shlex.join(shlex.split(line, comments=True)) for line in lines if re.match(COMMANDS, line)]
    return found


def runs(document: str, *, quick: bool) -> list[str]:
    """Those of a document that are run."""
    left = [step for step in steps(document) if not any(re.match(one, step) for one in LEFT_OUT)]
    return [step for step in left if not (quick and re.match(SLOW, step))]


def test_what_is_left_out_is_in_some_document():
    known = [step for document in DOCUMENTS for step in steps(document)]
    assert len(known) > 40
    for one in (*LEFT_OUT, SLOW):
        assert any(re.match(one, step) for step in known), one


class Session:
    """A shell in a folder of its own, in this process where it can be."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder, self._quick = folder, quick
        self._servers: dict[str, str] = {}
        """Addresses by those that the documents name."""
        self._open = ExitStack()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, step: str) -> None:
        for named, address in self._servers.items():
            step = step.replace(named, address)
        if "\n" in step:
            exec(step, {})
            return
        for pattern, instead in INSTEAD.items():
            step = re.sub(pattern, instead, step)
        words = shlex.split(step)
        if words[0] in ("torchrun", "cp"):
            done = subprocess.run(words, cwd=self._folder, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{step}\n{done.stderr[-3000:]}"
            return
        verb, options = words[1], words[2:]
        if verb == "serve":
            address = self._open.enter_context(served(self._folder, *options))
            self._servers["http://127.0.0.1:8000"] = address
            return
        if verb == "bench":
            options = self._asked_of_ours(options)
        if self._quick and verb in SMALLER:
            options += SMALLER[verb].split()
        assert main([verb, *options]) == 0, step

    def _asked_of_ours(self, options: list[str]) -> list[str]:
        """Our server answers instead of the one that an export is for: without a draft, with it at port 8001."""
        at = options.index("--url") + 1
        if options[at] not in self._servers:
            draft = ["--draft", "draft", "--lookahead", "2"] if options[at].endswith("8001") else []
            exported = served(self._folder / "served", "--target", "target", *draft)
            self._servers[options[at]] = self._open.enter_context(exported)
        options[at] = self._servers[options[at]]
        return options


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """`serve` at a free port."""
    command = [sys.executable, "-m", "shallowdraft", "serve", *options, "--port", "0"]
    log = folder / f"server-{len(list(folder.glob('server-*')))}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
    until(lambda: "served at" in log.read_text() or process.poll() is not None)
    address = re.search(r"http://[\d.]+:\d+", log.read_text())
    assert address, log.read_text()
    try:
        yield address[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def until(true: Callable[[], bool]) -> None:
    begin_s = time.perf_counter()
    while not true():
        assert time.perf_counter() - begin_s < 300
        time.sleep(0.05)


def run_document(document: str, folder: Path, *, quick: bool) -> None:
    with Session(folder, quick=quick) as session:
        for step in GIVEN.get(document, []):
            if isinstance(step, str):
                session.run(step)
            else:
                step(folder)
        for step in runs(document, quick=quick):
            session.run(step)


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if runs(one, quick=True)])
def test_a_documents_commands_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WARM_UP", "COUNT", "TURNS"):
        monkeypatch.setattr(measuring, name, 1)
    run_document(document, tmp_path, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("document", [one for one in DOCUMENTS if runs(one, quick=False)])
def test_a_documents_commands_run_as_they_stand(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    run_document(document, tmp_path, quick=False)
