"""Files of measurements: JSON lines, the first of which says what they are and where they come from. No torch here.

What is appended is on disk, whole, before its writer goes on; what a killed run left half-written
is dropped on reading. Writing disturbs what follows it: who takes measurements in turns appends all
records of a turn at its end.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from reprlib import repr as shortened
from types import MappingProxyType, UnionType
from typing import Any, NotRequired, TypedDict

from shallowdraft.errors import RecordError
from shallowdraft.files import parse_json, path_in_errors, read_lines, require_fields

SCHEMA = 1
DIGEST = "_digest"  # how the key ends under which the content of something is known
RANDOM = "random:"  # what the name of a draft begins with that has a shape and random weights
_PACKAGES = ("shallowdraft", "torch", "transformers", "numpy")

KEY_OPTION = "--api-key"
HIDDEN = "…"
_CREDENTIALS = re.compile(r"(//|^(?=[^/\s]*:))[^/?#\s]+@")

Record = dict[str, Any]


class _Provenance(TypedDict, total=False):
    """What of it is read again."""

    time: str


class _Header(TypedDict):
    """The first line of a file."""

    kind: str
    schema: int
    about: Record
    provenance: NotRequired[_Provenance]


@dataclass(frozen=True)
class Records:
    """An append-only file of one kind of record."""

    path: Path
    header: Record
    row: type | UnionType | None = None
    """The fields that every record must have: a dataclass or TypedDict."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Fields that earlier versions called otherwise: their earlier names, and those of today."""

    @classmethod
    def read(
        cls,
        path: Path,
        kind: str,
        row: type | UnionType | None = None,
        *,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> "Records":
        """A file that is there."""
        if not path.exists():
            raise RecordError(f"{path}: there is no such file")
        header = next((record for _, record in _lines(path)), None)
        if header is None or header.get("kind") != kind:
            raise RecordError(
                f"{path}: this is no {kind}, as its first line should say; name another file, or remove it"
            )
        if header.get("schema") != SCHEMA:
            raise RecordError(
                f"{path}: written as version {shortened(header.get('schema'))}, this package reads {SCHEMA}"
            )
        require_fields(header, _Header, f"{path}:1", RecordError)
        return cls(path, header, row, renamed)

    @classmethod
    def open(
        cls,
        path: Path,
        kind: str,
        about: Record,
        row: type | UnionType | None = None,
        *,
        renamed: Mapping[str, str] = MappingProxyType({}),
        **origin: Any,
    ) -> "Records":
        """A new file, or one that was begun with the same `about`.

        Where `about` has a digest of something, what that is called may differ.
        """
        if not path.exists() or next(_lines(path), None) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            header = {"kind": kind, "schema": SCHEMA, "about": about, "provenance": provenance(**origin)}
            with path_in_errors(path):
                path.write_text(json.dumps(header, ensure_ascii=False) + "\n", encoding="utf-8")
        file = cls.read(path, kind, row, renamed=renamed)
        if different := _differences(file.about, json.loads(json.dumps(about))):
            names = ", ".join(different)
            raise RecordError(f"{path} was begun with another {names}; name another file or folder, or remove it")
        _drop_half_line(path)
        return file

    @property
    def about(self) -> Record:
        about: Record = self.header["about"]
        return about

    def append(self, *records: Record, sync: bool = True) -> None:
        """Add lines, and wait until they are on disk; without `sync` they still outlive this process."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with path_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Record]:
        return (record for _, record in self.placed())

    def placed(self) -> Iterator[tuple[str, Record]]:
        """Every record and where it stands: file and line."""
        lines = _lines(self.path)
        next(lines)
        for where, line in lines:
            record = {self.renamed.get(name, name): value for name, value in line.items()} if self.renamed else line
            if self.row:
                require_fields(record, self.row, where, RecordError)
            yield where, record

    def latest(self, *names: str) -> dict[str, Record]:
        """The last record of each key, which is what these fields hold."""
        return {_key(record, names): record for record in self}

    def renew(self, records: Iterable[Record], *names: str) -> None:
        """Append those that say something else than the last one of their key."""
        known = self.latest(*names)
        for record in records:
            if known.get(_key(record, names)) != json.loads(json.dumps(record)):
                self.append(record)


def _differences(known: Record, wanted: Record) -> list[str]:
    """What two descriptions say differently; what has a digest is known by that, not by what it is called."""
    differing = [key for key in wanted | known if known.get(key) != wanted.get(key)]
    contents = {key.removesuffix(DIGEST) for key in wanted | known if key.endswith(DIGEST)}
    labels = {key.removesuffix(DIGEST) for key in differing if key.endswith(DIGEST)}
    unknown = {name for name in labels if f"{name}{DIGEST}" not in known}
    names = [key for key in differing if not key.endswith(DIGEST) and key not in contents]
    return [
        f"{name}, or by a version that did not note its content" if name in unknown else name for name in sorted(labels)
    ] + names


def _key(record: Record, names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def is_begun(path: Path) -> bool:
    """Return whether a file is there and its first line is whole, which it is not if its writer was killed at once."""
    return path.exists() and next(read_lines(path, RecordError, ended=True), None) is not None


def kind_of(path: Path) -> str | None:
    """Return the kind of records that a file holds, or None if it holds none."""
    try:
        header = next(_lines(path), None)
    except RecordError:
        return None
    return header[1].get("kind") if header else None


def write_whole(path: Path, text: str) -> None:
    """At once: whoever is killed meanwhile leaves the file that was there."""
    partial = path.with_name(path.name + ".partial")
    with path_in_errors(partial):
        partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def provenance(**more: Any) -> Record:
    """Command, commit, versions, machine, time."""
    return {
        "argv": command(),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processor": processor(),
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **more,
    }


def command() -> list[str]:
    """The command line of this process, as records may keep it."""
    return masked([Path(sys.argv[0]).name, *sys.argv[1:]])


def masked(argv: Sequence[str]) -> list[str]:
    """A command line as records may keep it: without keys, whose options are also known with underscores."""
    kept: list[str] = []
    for before, one in zip(["", *argv], argv, strict=False):
        name, separator, _ = one.partition("=")
        known, hidden = (option.replace("_", "-") == KEY_OPTION for option in (name, before))
        kept.append(HIDDEN if hidden else f"{name}={HIDDEN}" if known and separator else masked_url(one))
    return kept


def masked_url(text: str) -> str:
    """Text with an address in it, less the user and password that stand before its host."""
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return None


@cache
def commit() -> str | None:
    """Of the checkout that the package runs from, if it does."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache
def processor() -> str:
    """The CPU's name and how many cores there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Every whole line and where it stands; the last is not if a run was killed while it wrote."""
    for number, line in read_lines(path, RecordError, ended=True):
        where = f"{path}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise RecordError(f"{where}: not a line of JSON ({error}); was the file edited?") from None
        if not isinstance(record, dict):
            raise RecordError(f"{where}: no JSON object; was the file edited?")
        yield where, record


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
