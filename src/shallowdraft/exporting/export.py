"""Export of a pair of models to a folder that an engine serves: checkpoints, settings, the start command.

All checks come first. The folder appears complete or not at all.
"""

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.exporting.advice import Advice
from shallowdraft.exporting.engines import DRAFT, FAMILIES, GGUF, TARGET, Engine, Setup, setup
from shallowdraft.exporting.padding import with_vocabulary
from shallowdraft.models import zoo
from shallowdraft.models.checkpoint import check_folder, find_folder, has_int8_weights, read_json, read_shape
from shallowdraft.models.model import Model, load
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.records import provenance, write_whole
from shallowdraft.shapes.shape import ModelShape

START = "start.sh"
ABOUT = "export.json"
SENTENCEPIECE = "tokenizer.model"


@dataclass(frozen=True)
class Exported:
    """An exported folder."""

    folder: Path
    setup: Setup
    vocabulary: str
    """A description of any change to the draft's vocabulary."""
    advice: Advice
    """The lookahead that is set, and the study's figures about it."""

    def to_json(self) -> dict[str, Any]:
        """Return {"folder", "command", "files", "advice"}."""
        setup = self.setup
        return {"folder": str(self.folder), "command": setup.command, "files": setup.files, "advice": vars(self.advice)}

    @property
    def command(self) -> str:
        """The start command for a shell."""
        return shlex.join(self.setup.command)


def export(draft: str, target: str, engine: Engine, advice: Advice, out: Path, dtype: str | None = None) -> Exported:
    """Write the draft for an engine, and the target too if the engine cannot read its present folder."""
    as_gguf = engine == "llama.cpp"
    local = target.startswith(zoo.PREFIX) or Path(target).is_dir()
    folders = {DRAFT: find_folder(draft), TARGET: find_folder(target, weights=as_gguf)}
    shapes = {DRAFT: check_folder(folders[DRAFT]), TARGET: read_shape(folders[TARGET])}
    _require_family(engine, shapes)
    write_model = _gguf_writer(shapes, folders[TARGET]) if as_gguf else partial(_write_checkpoint, folders[TARGET])
    if out.exists():
        raise OptionError(f"{out} exists already; name another folder")
    size, size_before = shapes[TARGET].vocab, shapes[DRAFT].vocab
    models = {DRAFT: with_vocabulary(_load(folders[DRAFT], dtype), load_tokenizer(folders[TARGET]), size)}
    served_target = str(folders[TARGET].resolve()) if local else target
    if as_gguf or (local and has_int8_weights(folders[TARGET])):
        models[TARGET] = _load(folders[TARGET], dtype)
        served_target = TARGET + (GGUF if as_gguf else "")
    engine_setup = setup(engine, served_target, advice.lookahead, advice.by_batch)
    unchanged = size_before == size
    vocabulary = "as it was" if unchanged else f"{size_before:,} token ids made {size:,}, as many as the target's"

    def write(folder: Path) -> None:
        for role, model in models.items():
            write_model(model, folder / role)
        if engine == "transformers":
            _write_generation_config(folder / DRAFT, advice.lookahead)
        about: dict[str, Any] = {"engine": engine, "target": target, "draft": draft, "vocabulary": vocabulary}
        about |= {"advice": asdict(advice), "command": engine_setup.command, "provenance": provenance()}
        write_whole(folder / ABOUT, json.dumps(about, indent=2) + "\n")
        for name, text in engine_setup.files.items():
            write_whole(folder / name, text)
        write_whole(folder / START, engine_setup.script())
        _make_executable(folder / START)

    _write_atomically(out, write)
    return Exported(out, engine_setup, vocabulary, advice)


def _require_family(engine: Engine, shapes: dict[str, ModelShape]) -> None:
    for role, shape in shapes.items():
        if shape.family not in FAMILIES[engine]:
            families = ", ".join(FAMILIES[engine])
            raise UnsupportedModelError(f"the {role} is of the family {shape.family}; for {engine} we write {families}")


def _load(folder: Path, dtype: str | None) -> Model:
    """Load a model in a given precision, or that of its config."""
    config = read_json(folder / "config.json")
    return load(folder, dtype or config.get("dtype") or config.get("torch_dtype") or "float32", "cpu", trainable=True)


def _write_checkpoint(target_folder: Path, model: Model, path: Path) -> None:
    model.save(path)
    if (target_folder / SENTENCEPIECE).is_file():  # transformers no longer writes it, but converters read it
        shutil.copy(target_folder / SENTENCEPIECE, path)


def _gguf_writer(shapes: dict[str, ModelShape], target_folder: Path) -> Callable[[Model, Path], None]:
    """Return a function that writes models of these shapes with the target's tokenizer."""
    if find_spec("gguf") is None:
        raise OptionError("GGUF needs the package gguf; install it: pip install 'shallowdraft[export]'")
    from shallowdraft.exporting.gguf_file import read_tokenizer, require_gguf, write_gguf

    for shape in shapes.values():
        require_gguf(shape)
    tokenizer = read_tokenizer(target_folder)
    return lambda model, path: write_gguf(model, tokenizer, path.with_name(path.name + GGUF))


def _write_generation_config(folder: Path, lookahead: int) -> None:
    """Make transformers draft the same number of tokens each time, at any confidence."""
    assistant = {"num_assistant_tokens": lookahead, "num_assistant_tokens_schedule": "constant"}
    config = read_json(folder / "config.json")
    token_ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    text = json.dumps(token_ids | assistant | {"assistant_confidence_threshold": 0.0}, indent=2)
    write_whole(folder / "generation_config.json", text + "\n")


def _make_executable(file: Path) -> None:
    """Let everyone execute the file who may read it."""
    mode = file.stat().st_mode
    file.chmod(mode | (mode & 0o444) >> 2)  # each read bit sets its execute bit


def _write_atomically(out: Path, write: Callable[[Path], None]) -> None:
    """Write into a temporary folder and rename it; a failed or terminated export leaves nothing behind.

    After SIGKILL the temporary folder stays, until the next export to this path removes it.
    """
    partial_folder = out.with_name(out.name + ".partial")
    with _exit_on_sigterm():
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        try:
            write(partial_folder)
            partial_folder.rename(out)
        except BaseException:
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that clean-up runs; signal handlers can only be set in the main thread."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
