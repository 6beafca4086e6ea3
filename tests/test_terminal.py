"""What reaches a terminal: nothing that a name from disk, a message or a library says to it."""

import io
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import transformers

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.display.console import Console
from shallowdraft.display.printable import Printable
from shallowdraft.models.synthetic import byte_tokenizer, make_pair
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.shapes.shape import ModelShape

NAME = "dr[bold]\x1b]0;title\x07\x9b2J\raft[/b]:cat:"
SHOWN = r"dr[bold]\x1b]0;title\x07\x9b2J\x0daft[/b]:cat:"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of a strange name, and the same without a tokenizer."""
    folder = tmp_path_factory.mktemp("terminal")
    shape, small = ModelShape(2, 32, 2, 48, 400, context=96), ModelShape(1, 24, 2, 32, 400, context=96)
    _, draft = make_pair(shape, small, 0.8).save(folder)
    shutil.copytree(draft, folder / NAME)
    (folder / "nameless").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(draft / name, folder / "nameless")
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "hello there"}\n')
    recorded = ["record", "--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "trace.jsonl")]
    assert main([*recorded, "--target", str(folder / "target"), "--max-new-tokens", "24"]) == 0
    return folder


def test_names_in_tables_and_lines(folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["inspect", "target", NAME]) == 0
    assert main(["replay", "--trace", "trace.jsonl", "--drafts", NAME]) == 0
    assert main(["generate", "--target", "target", "--draft", NAME, "--prompt", "hello", "--json"]) == 0
    seen = capsys.readouterr()
    assert not CONTROL.search(seen.out + seen.err)
    assert seen.out.replace("\n", "").count(SHOWN) >= 1


def test_names_in_errors_take_one_line(folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / NAME / "config.json").rename(folder / "config.json")
    assert main(["replay", "--trace", "trace.jsonl", "--drafts", NAME]) == 2
    assert main(["inspect", NAME + "\nerror"]) == 2
    (folder / "config.json").rename(folder / NAME / "config.json")
    error = capsys.readouterr().err
    assert (CONTROL.search(error), error.count(SHOWN), error.count("\n")) == (None, 2, 2)


def test_a_console_escapes_what_it_measures():
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    table = Table(title=NAME)
    table.add_column("draft", no_wrap=True)
    table.add_row(NAME)
    console.print(table)
    console.print(Text("\x1b]0;title\x9b2J", style="red"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # rich's own colours
    assert not CONTROL.search(shown)
    assert shown.count(SHOWN) == 2
    assert r"\x1b]0;title\x9b2J" in shown.splitlines()


def test_progress_bars_of_libraries_may_move():
    stream = io.StringIO()
    for part in ("\r 50%|█████     |", "\n", "\x1b[A\x1b[A", f"\r{NAME} 60%\r"):
        Printable(stream).write(part)
    assert stream.getvalue() == f"\r 50%|█████     |\n\x1b[A\x1b[A\r{SHOWN} 60%\r"


def test_text_goes_to_a_file_as_it_is(folder: Path, monkeypatch, capsys):
    monkeypatch.setattr(sd.Model, "decode", lambda _, ids: "\x1b[31m" * len(ids))
    assert main(["generate", "--target", str(folder / "target"), "--prompt", "hello"]) == 0
    assert "\x1b[31m" in capsys.readouterr().out


def test_every_console_is_ours():
    package = Path(sd.__file__).parent
    importing = [file.name for file in package.rglob("*.py") if "rich.console import" in file.read_text()]
    assert importing == ["console.py"]


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "target", "nameless"],
        ["generate", "--target", "target", "--draft", "nameless", "--prompt", "hello", "--json"],
        ["replay", "--trace", "trace.jsonl", "--drafts", "nameless", "--nodes", "3", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_a_draft_without_a_tokenizer_is_taken_and_said(folder: Path, monkeypatch, capsys, command: list[str]):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's; without any, warnings go to stderr
    from shallowdraft.models import vocabulary

    vocabulary.warn_sizes_only.cache_clear()
    assert main(command) == 0
    seen = capsys.readouterr()
    said = "target and nameless are taken to be the same: sizes compared only, no tokenizer of the draft"
    assert seen.err.count(said) == 1
    if command[0] == "inspect":
        assert "vocabulary: same (sizes compared only, no tokenizer of the draft)" in seen.out


def test_transformers_says_nothing_of_long_texts(tmp_path: Path, monkeypatch, caplog):
    tokenizer = byte_tokenizer(400)
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.model_max_length == 8
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.utils.logging.set_verbosity_warning()
    try:
        assert len(loaded.encode("a long text " * 9)) > 8
    finally:
        transformers.utils.logging.set_verbosity_error()
    assert caplog.text == ""


def test_a_bar_on_a_terminal_is_drawn_and_names_beside_it_escaped():
    """In a process of its own, on a terminal of its own."""
    program = f"""
import sys
from shallowdraft.display.progress import follow
from shallowdraft.display.printable import printing
def done():
    yield 1
    print({NAME!r}, file=sys.stderr)
    yield 2
with printing():
    follow({NAME!r}, done(), 2)
    print({NAME!r})
"""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how Linux says that nobody is at the other end
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[2K" in shown  # the bar's own
    assert rb"\x1b[2K" not in shown
    assert SHOWN in shown.decode()
    assert b"\x1b]0;" not in shown
    assert "\x9b" not in shown.decode()
