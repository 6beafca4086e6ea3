"""Every file that the tool reads, damaged at random: one line and status 2, or a sound result; nothing elsewhere."""

import contextlib
import gzip
import io
import json
import lzma
import math
import os
import random
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from conftest import random_heads, random_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reporting.made_run import make_server
from safetensors.torch import load_file

import shallowdraft as sd
from shallowdraft.cli import main
from shallowdraft.errors import ShallowdraftError
from shallowdraft.models.checkpoint import find_folder, read_shape
from shallowdraft.models.heads import save_heads
from shallowdraft.models.synthetic import byte_tokenizer, make_pair, random_decoder
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.records import Records
from shallowdraft.reporting.reading import read_run
from shallowdraft.runs.search import Judgement
from shallowdraft.shapes.notation import parse_shape

MOST_BYTES = 3 * 2**30  # of address space beyond what the process has when a test begins
MOST_S = 60.0  # of a command, which takes a tenth of a second on an idle machine
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
HOSTILE = [
    None, True, False, -1, 0, 1, 3, 10**9, 2**63, 10**30, 0.5, -1.5, 1e308, math.nan, math.inf, "", "x", "3",
    "\ud800", "a\u2028b", "\0", "../../../ESCAPED", "/ESCAPED", "zoo:../..", "[/bold]", "\x1b[31m", "é" * 5000,
    [], {}, [[]], [1], ["x"], [None], DEEP, {"a": 1}, {"../b": {"c": []}},
]  # fmt: skip
WHOLE = [
    b"", b"\n", b"null", b"[]\n", b"{}\n", b'"x"\n', b"1\n", b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe\x00",
    b"\x00" * 64, b'{"kind": "trace", "schema": 1}\n', b"PK\x03\x04" + b"\x00" * 60, b"\x80\x04.", b"\xff" * 8 + b"{}",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A file and the command that reads it."""

    file: str
    command: str


GENERATE = "generate --target target --draft draft --prompt Some --max-new-tokens 4 --json"
PRETRAIN = (
    "pretrain --corpus text --shape 1x16/1h/32 --tokenizer speaker --tokens 64 --batch-tokens 32 --sequence 16 "
    "--context 32 --out made --json"
)
QUICK = {
    "config": Case("target/config.json", GENERATE),
    "config inspected": Case("draft/config.json", "inspect target draft --json"),
    "T5 config": Case("t5/config.json", "inspect t5 --json"),
    "OPT config": Case("opt/config.json", "inspect opt --json"),
    "generation config": Case("target/generation_config.json", GENERATE),
    "tokenizer": Case("target/tokenizer.json", GENERATE),
    "tokenizer config": Case("draft/tokenizer_config.json", GENERATE),
    "weights": Case("draft/model.safetensors", GENERATE),
    "index": Case("sharded/model.safetensors.index.json", "inspect sharded --json"),
    "old weights": Case("old/pytorch_model.bin", "generate --target old --prompt S --max-new-tokens 2 --json"),
    "heads": Case("heads/config.json", GENERATE.replace("--draft draft", "--drafter medusa --heads heads")),
    "weights of heads": Case(
        "heads/model.safetensors", GENERATE.replace("--draft draft", "--drafter medusa --heads heads")
    ),
    "tree": Case("tree.json", f"{GENERATE} --drafter tree --tree tree.json --nodes 4"),
    "skips": Case("skips.jsonl", GENERATE.replace("--draft draft", "--drafter skip --skips skips.jsonl")),
    "prompts": Case("few.jsonl", GENERATE.replace("--prompt Some", "--prompts few.jsonl")),
    "questions": Case("questions.jsonl", "accuracy --drafts draft --sets questions.jsonl --json"),
    "completions": Case("answers.jsonl", "record --target target --import answers.jsonl --out imported"),
    "tensors": Case(
        "tensors.txt",
        "record --target target --import tensors.txt --import-format tensors --prompts few.jsonl --out imported",
    ),
    "trace": Case("run/trace.jsonl", "replay --trace run/trace.jsonl --drafts draft --json"),
    "drawn trace": Case("drawn.jsonl", "replay --trace drawn.jsonl --drafts draft --json"),
    "trace to go on with": Case(
        "greedy.jsonl", "record --target target --prompts few.jsonl --out greedy.jsonl --max-new-tokens 16"
    ),
    "profile": Case("run/profile.jsonl", "predict --trace run/trace.jsonl --profile run/profile.jsonl --json"),
    "online outputs": Case(
        "learned/outputs.jsonl",
        "online --target target --draft draft --prompts few.jsonl --out learned --budget 0 --max-new-tokens 8 --json",
    ),
    "study of an export": Case(
        "run/study.json", "export draft --target target --engine transformers --study run --out served"
    ),
    "replays of an export": Case(
        "run/replays.jsonl", "export draft --target target --engine transformers --study run --out served"
    ),
    "corpus": Case("text/notes.jsonl", PRETRAIN),
    "gz": Case("text/tales.jsonl.gz", PRETRAIN),
    "xz": Case("text/logs.jsonl.xz", PRETRAIN),
    "text": Case("text/book.txt", PRETRAIN),
    "run": Case("begun/training/run.json", PRETRAIN.replace("made", "begun")),
    "state": Case("begun/training/pretrain/state.pt", PRETRAIN.replace("made", "begun")),
    "metrics": Case("begun/training/pretrain/metrics.jsonl", PRETRAIN.replace("made", "begun")),
    "token store": Case("begun/training/tokens/store.json", PRETRAIN.replace("made", "begun")),
    "tokens": Case("begun/training/tokens/notes.train.bin", PRETRAIN.replace("made", "begun")),
}
READ = {  # by us, without a command: those take seconds
    "search": ("found/search.jsonl", lambda: list(Records.read(Path("found/search.jsonl"), "search", Judgement))),
} | {
    f"{name} of a report": (f"run/{name}", lambda: read_run(Path("run")))
    for name in (
        "trace.jsonl", "replays.jsonl", "profile.jsonl", "live.jsonl", "tokens.jsonl", "study.json", "accuracy.json",
        "server.jsonl", "fast.jsonl",
    )
}  # fmt: skip
STUDY = (
    "study --target target --drafts draft --drafters model ngram skip --prompts few.jsonl --out run "
    "--lookaheads 1:2 --max-new-tokens 16 --rounds 1 --live 1 --json"
)
SLOW = {
    f"{name} of a study": Case(f"run/{name}.jsonl", STUDY)
    for name in ("trace", "replays", "profile", "live", "tokens", "skips")
} | {name: Case(file, "report run") for name, (file, _) in READ.items() if file.startswith("run/")}
SLOW |= {
    "tokenizer for GGUF": Case(
        "small/tokenizer.json", "export small --target small --engine llama.cpp --lookahead 2 --out served"
    )
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, folder) -> Path:
    """All these files, made by the tool's own commands where it makes them."""
    root = tmp_path_factory.mktemp("pristine")
    with contextlib.chdir(root):
        target, _ = make_pair(
            parse_shape("3x32/2h/48", vocab=320, context=256), parse_shape("1x32/2h/48", vocab=320, context=256), 0.8
        ).save(Path())
        make_pair(parse_shape("1+1x32/2h/48", vocab=320), parse_shape("1+1x32/2h/48", vocab=320), 0.8).save(
            Path("pair")
        )
        shutil.move("pair/target", "t5")
        shutil.copytree(folder("opt"), "opt")
        zoo = find_folder("zoo:target")
        small = random_decoder(parse_shape("1x16/1h/32", vocab=read_shape(zoo).vocab), seed=0)
        sd.Model("small", small, load_tokenizer(zoo)).save("small")
        random_reference("llama").save_pretrained("sharded", max_shard_size="50KB")
        Path("target/generation_config.json").write_text('{"eos_token_id": [300, 301], "pad_token_id": null}')
        shutil.copytree(target, "old")
        torch.save(load_file("old/model.safetensors"), "old/pytorch_model.bin")
        Path("old/model.safetensors").unlink()
        save_heads(random_heads(sd.load("target"), 2), Path("heads"))
        _write_texts()
        for command in (
            STUDY,
            "record --target target --prompts few.jsonl --out greedy.jsonl --max-new-tokens 16",
            "record --target target --prompts few.jsonl --out drawn.jsonl --max-new-tokens 16 --temperature 1",
            "skip-search --target target --trace run/trace.jsonl --out skips.jsonl --trials 1",
            "replay --trace run/trace.jsonl --drafts draft --nodes 4 --out tree.json",
            "accuracy --drafts draft --sets questions.jsonl --trace run/trace.jsonl --json",
            QUICK["online outputs"].command,
            PRETRAIN.replace("made", "begun"),
        ):
            code, out, err = run(command)
            assert code == 0, err
            if command.startswith("accuracy"):
                Path("run/accuracy.json").write_text(out)
        for path in Path("begun").iterdir():
            if path.name != "training":
                path.unlink()
        make_server(Path("run/server.jsonl"))
        make_server(Path("run/fast.jsonl"), 2.5, 0.7, draft="draft", lookahead=2)
        row = {"candidate": "1x32/2h/48 of target", "rung": 0, "tokens": 9, "lookahead": 2}
        search = Records.open(Path("found/search.jsonl"), "search", {"target": "target"})
        search.append(row | {"tar": 1.5, "speed_up": 1.1, "tokens_per_s": 100.0})
    return root


def _write_texts() -> None:
    speaker = byte_tokenizer(320)
    speaker.eos_token = speaker.convert_ids_to_tokens(300)
    speaker.save_pretrained("speaker")
    write_lines("few.jsonl", [{"prompt": f"Prompt {n} of some", "id": str(n)} for n in range(3)])
    asked = [{"prompt": f"What is {n}?", "choices": ["one", "two"], "answer": n % 2} for n in range(3)]
    write_lines("questions.jsonl", asked)
    choice = {"token_ids": [5, 6, 7], "logprobs": {"token_logprobs": [-0.5, -1.0, -0.1]}}
    answer = {"id": "a", "prompt_token_ids": [1, 2], "choices": [choice], "request": {"temperature": 1.0}}
    write_lines("answers.jsonl", [answer, answer | {"id": "b"}])
    Path("tensors.txt").write_text("tensor([[  18, 79, 56]])\ntensor([[  51, 10]])\n")
    Path("text").mkdir()
    lines = [json.dumps({"text": f"Document {n} has some words. " * 4}) + "\n" for n in range(120)]
    Path("text/notes.jsonl").write_text("".join(lines))
    Path("text/tales.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    Path("text/logs.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode()))
    Path("text/book.txt").write_text("One whole book. " * 100)


def write_lines(path: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(command: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command))
    return code, out.getvalue(), err.getvalue()


def damaged(content: bytes, name: str, chance: random.Random) -> bytes:
    """The content of a file with something wrong somewhere, or nothing."""
    way = chance.random()
    if way < 0.1:
        return chance.choice(WHOLE)
    if way < 0.2:
        return content[: chance.randrange(len(content))]
    if way < 0.3:
        flipped = bytearray(content)
        for _ in range(chance.randint(1, 8)):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        return bytes(flipped)
    if name.endswith(".gz"):
        return gzip.compress(damaged(gzip.decompress(content), name[:-3], chance))
    if name.endswith(".xz"):
        return lzma.compress(damaged(lzma.decompress(content), name[:-3], chance))
    if name.endswith(".safetensors"):
        size = struct.unpack("<Q", content[:8])[0]
        header = dumped(changed(json.loads(content[8 : 8 + size]), chance))
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    if name.endswith((".pt", "pytorch_model.bin")):
        made = io.BytesIO()
        torch.save(changed(torch.load(io.BytesIO(content)), chance), made)
        return made.getvalue()
    if name.endswith(".json"):
        return dumped(changed(json.loads(content), chance))
    if name.endswith(".jsonl"):
        return _lines_changed(content.splitlines(keepends=True), chance)
    return b"\xef\xbb\xbf" + content + content[: chance.randrange(len(content))]


def _lines_changed(lines: list[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(lines))
    way = chance.random()
    if way < 0.85:
        lines[at] = dumped(changed(json.loads(lines[at]), chance)) + b"\n"
    elif way < 0.9:
        lines[at] = chance.choice(WHOLE) + b"\n"
    elif way < 0.95:
        del lines[at]
    else:
        lines.insert(0, b"\xef\xbb\xbf")
    return b"".join(lines)


def changed(value: Any, chance: random.Random) -> Any:
    """A value with a member somewhere in it replaced or left out."""
    holder: Any = [value]
    whole, key = holder, 0
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
        holder = holder[key]
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
    if holder is not whole and chance.random() < 0.15:
        del holder[key]
    else:
        holder[key] = chance.choice(HOSTILE)
    return whole[0]


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def work(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place to run commands in, with little memory, and no network for names of models that are none."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "a" / "b" / "c" / "work"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, before[1]))
    yield place
    resource.setrlimit(resource.RLIMIT_AS, before)


def put_back(pristine: Path, work: Path) -> None:
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(pristine, work, dirs_exist_ok=True)


def require_sound(case: Case, root: Path) -> None:
    """A command ends in one of two ways, soon, and writes nothing elsewhere."""
    begun_s = time.monotonic()
    code, out, err = run(case.command)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert time.monotonic() - begun_s < MOST_S
    assert "Traceback" not in err
    assert (code, len(said)) in ((0, 0), (2, 1)), err
    assert "\x1b" not in "".join(said)
    if code == 0 and "--json" in case.command:
        json.loads(out, parse_constant=pytest.fail)
    assert not [*root.rglob("*ESCAPED*"), *Path("/").glob("ESCAPED*")]


def fuzz(case: Case, pristine: Path, work: Path, seed: int) -> None:
    put_back(pristine, work)
    file = work / case.file
    file.write_bytes(damaged(file.read_bytes(), case.file, random.Random(seed)))
    require_sound(case, work.parents[3])


SEEDS = st.integers(0, 2**32 - 1)
ALIKE = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("name", QUICK)
def test_a_damaged_file(name: str, pristine: Path, work: Path):
    @settings(max_examples=3, derandomize=True, **ALIKE)
    @given(SEEDS)
    def check(seed: int) -> None:
        fuzz(QUICK[name], pristine, work, seed)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_damaged_file_at_length(name: str, pristine: Path, work: Path):
    case = (QUICK | SLOW)[name]

    @settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")) // (5 if name in SLOW else 1), **ALIKE)
    @given(SEEDS)
    def check(seed: int) -> None:
        fuzz(case, pristine, work, seed)

    check()


@pytest.mark.parametrize("name", READ)
def test_a_damaged_file_that_is_only_read(name: str, pristine: Path, work: Path):
    file, read = READ[name]

    @settings(max_examples=8, derandomize=True, **ALIKE)
    @given(SEEDS)
    def check(seed: int) -> None:
        put_back(pristine, work)
        Path(file).write_bytes(damaged(Path(file).read_bytes(), file, random.Random(seed)))
        with contextlib.suppress(ShallowdraftError):
            read()

    check()


@pytest.mark.parametrize("name", QUICK)
def test_a_whole_file(name: str, pristine: Path, work: Path):
    """What is not damaged is read."""
    put_back(pristine, work)
    code, _, err = run(QUICK[name].command)
    assert code == 0, err


BOMBS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "config": ("config inspected", lambda content: dumped(json.loads(content) | {"num_hidden_layers": 10**9})),
    "xz": ("xz", lambda _: lzma.compress(b'{"text": "' + b"a" * 2**28, preset=0)),
    "trace": ("trace", lambda content: content + b"[" * 200_000 + b"\n"),
    "state": ("state", lambda content: content[: len(content) // 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_process_of_its_own(name: str, pristine: Path, work: Path):
    """With little memory and time, one line and status 2."""
    of, damage = BOMBS[name]
    put_back(pristine, work)
    file = work / QUICK[of].file
    file.write_bytes(damage(file.read_bytes()))
    done = subprocess.run(
        [sys.executable, "-m", "shallowdraft", *shlex.split(QUICK[of].command)],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr
