"""A pair of models into a folder that an engine serves: checkpoints, settings, the command that starts it.

Everything that can be refused is refused first. The folder appears whole or not at all.
"""

import json
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

from shallowdraft.errors import OptionError, UnsupportedModelError
from shallowdraft.export.advice import Advice
from shallowdraft.export.engines import DRAFT, FAMILIES, GGUF, TARGET, Engine, Setup, line, setup
from shallowdraft.export.padding import fitted
from shallowdraft.models import zoo
from shallowdraft.models.checkpoint import check_folder, find_folder, has_int8_weights, read_json, read_shape
from shallowdraft.models.model import Model, load
from shallowdraft.models.vocabulary import load_tokenizer
from shallowdraft.records import provenance, write_whole
from shallowdraft.shapes import ModelShape

START = "start.sh"
ABOUT = "export.json"
SENTENCES = "tokenizer.model"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    setup: Setup
    vocabulary: str
    """What became of the draft's."""

    @property
    def command(self) -> str:
        return line(self.setup)


def export(draft: str, target: str, engine: Engine, advice: Advice, out: Path, dtype: str | None = None) -> Exported:
    """Write the draft for an engine, and the target where the engine cannot read it as it is."""
    as_gguf = engine == "llama.cpp"
    local = target.startswith(zoo.PREFIX) or Path(target).is_dir()
    folders = {DRAFT: find_folder(draft), TARGET: find_folder(target, weights=as_gguf)}
    shapes = {DRAFT: check_folder(folders[DRAFT]), TARGET: read_shape(folders[TARGET])}
    _require(engine, shapes)
    put = _gguf_writer(shapes, folders[TARGET]) if as_gguf else partial(_write_folder, folders[TARGET])
    if out.exists():
        raise OptionError(f"{out} exists already; name another folder")
    size, before = shapes[TARGET].vocab, shapes[DRAFT].vocab
    models = {DRAFT: fitted(_loaded(folders[DRAFT], dtype), load_tokenizer(folders[TARGET]), size)}
    where = str(folders[TARGET].resolve()) if local else target
    if as_gguf or (local and has_int8_weights(folders[TARGET])):
        models[TARGET] = _loaded(folders[TARGET], dtype)
        where = TARGET + (GGUF if as_gguf else "")
    made = setup(engine, where, advice.lookahead, advice.by_batch)
    vocabulary = "as it was" if before == size else f"{before:,} token ids made {size:,}, as many as the target's"

    def write(folder: Path) -> None:
        for role, model in models.items():
            put(model, folder / role)
        if engine == "transformers":
            _write_generation(folder / DRAFT, advice.lookahead)
        about = {"engine": engine, "target": target, "draft": draft, "vocabulary": vocabulary}
        settled = {"advice": asdict(advice), "command": made.command, "provenance": provenance()}
        write_whole(folder / ABOUT, json.dumps(about | settled, indent=2) + "\n")
        for name, text in made.files.items():
            write_whole(folder / name, text)
        write_whole(folder / START, made.script())
        _make_executable(folder / START)

    _at_once(out, write)
    return Exported(out, made, vocabulary)


def _require(engine: Engine, shapes: dict[str, ModelShape]) -> None:
    for role, shape in shapes.items():
        if shape.family not in FAMILIES[engine]:
            known = ", ".join(FAMILIES[engine])
            raise UnsupportedModelError(f"the {role} is of the family {shape.family}; for {engine} we write {known}")


def _loaded(folder: Path, dtype: str | None) -> Model:
    """In the precision that its config has, unless another is wanted."""
    own = read_json(folder / "config.json")
    return load(folder, dtype or own.get("dtype") or own.get("torch_dtype") or "float32", "cpu", trainable=True)


def _write_folder(target_folder: Path, model: Model, path: Path) -> None:
    model.save(path)
    if (target_folder / SENTENCES).is_file():  # which transformers no longer writes, and converters want
        shutil.copy(target_folder / SENTENCES, path)


def _gguf_writer(shapes: dict[str, ModelShape], target_folder: Path) -> Callable[[Model, Path], None]:
    """What writes models of these shapes, with the target's tokenizer."""
    if find_spec("gguf") is None:
        raise OptionError("GGUF needs the package gguf; install it: pip install 'shallowdraft[export]'")
    from shallowdraft.export.gguf_file import read_tokenizer, require_gguf, write_gguf

    for shape in shapes.values():
        require_gguf(shape)
    tokenizer = read_tokenizer(target_folder)
    return lambda model, path: write_gguf(model, tokenizer, path.with_name(path.name + GGUF))


def _write_generation(folder: Path, lookahead: int) -> None:
    """So many tokens each time, however sure the draft is."""
    assistant = {"num_assistant_tokens": lookahead, "num_assistant_tokens_schedule": "constant"}
    kept = {name: value for name, value in read_json(folder / "config.json").items() if name.endswith("_token_id")}
    text = json.dumps(kept | assistant | {"assistant_confidence_threshold": 0.0}, indent=2)
    write_whole(folder / "generation_config.json", text + "\n")


def _make_executable(file: Path) -> None:
    """For whoever may read it."""
    mode = file.stat().st_mode
    file.chmod(mode | (mode & 0o444) >> 2)


def _at_once(out: Path, write: Callable[[Path], None]) -> None:
    """Write into a folder beside it, which then takes its name; what fails or is ended leaves nothing behind.

    What was killed outright is removed by the next export to this place.
    """
    made = out.with_name(out.name + ".partial")
    with _told_to_end():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        try:
            write(made)
            made.rename(out)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM ends the program as an exit does, that is, tidily; in the main thread, which alone may ask for that."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
