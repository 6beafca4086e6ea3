"""Files of measurements: JSON lines, the first of which describes them and their origin. No torch here.

Appended lines are on disk, whole, before their writer goes on; a line that a killed process left half-written is
dropped on reading. Writing disturbs measurements that follow it, so measurements that take turns append all records of
a turn at its end.
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
DIGEST = "_digest"  # the end of a key whose value is the digest of something's content
RANDOM = "random:"  # the beginning of a draft's name that stands for a shape with random weights
_PACKAGES = ("shallowdraft", "torch", "transformers", "numpy")

KEY_OPTION = "--api-key"
HIDDEN = "…"
_CREDENTIALS = re.compile(r"(//|^(?=[^/\s]*:))[^/?#\s]+@")

Record = dict[str, Any]


class _Provenance(TypedDict, total=False):
    """The part of the provenance that is read again."""

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
    """The current name of fields by the name that earlier versions gave them."""

    @classmethod
    def read(
        cls,
        path: Path,
        kind: str,
        row: type | UnionType | None = None,
        *,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> "Records":
        """Open an existing file for reading."""
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
        """Begin a file, or go on with one that was begun with the same `about`.

        Names in `about` may differ if their digests are there and equal.
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
        """The description of what is measured."""
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
        """Yield every record with its place, which is the file and the number of the line."""
        lines = _lines(self.path)
        next(lines)
        for where, line in lines:
            record = {self.renamed.get(name, name): value for name, value in line.items()} if self.renamed else line
            if self.row:
                require_fields(record, self.row, where, RecordError)
            yield where, record

    def latest(self, *names: str) -> dict[str, Record]:
        """Return the last record by key: the values of these fields, as JSON."""
        return {_key(record, names): record for record in self}

    def renew(self, records: Iterable[Record], *names: str) -> None:
        """Append the records that differ from the last one with the same key."""
        latest = self.latest(*names)
        for record in records:
            if latest.get(_key(record, names)) != json.loads(json.dumps(record)):  # as it would be read
                self.append(record)


def _differences(recorded: Record, current: Record) -> list[str]:
    """Return the names of differences between two descriptions; digests, where there are some, decide over names."""
    keys = current | recorded
    differing = [key for key in keys if recorded.get(key) != current.get(key)]
    with_digest = {key.removesuffix(DIGEST) for key in keys if key.endswith(DIGEST)}
    differences = []
    for name in sorted(key.removesuffix(DIGEST) for key in differing if key.endswith(DIGEST)):
        unnoted = f"{name}{DIGEST}" not in recorded
        differences.append(f"{name}, or by a version that did not note its content" if unnoted else name)
    return differences + [key for key in differing if not key.endswith(DIGEST) and key not in with_digest]


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
    """Replace a file at once, so that an interrupted write leaves the file as it was."""
    partial = path.with_name(path.name + ".partial")
    with path_in_errors(partial):
        partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def provenance(**more: Any) -> Record:
    """Return the origin of a record: command, commit, versions, machine, time."""
    return {
        "argv": command(),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processor": processor(),
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **more,
    }


def command() -> list[str]:
    """Return the command line of this process, without keys and passwords."""
    return masked([Path(sys.argv[0]).name, *sys.argv[1:]])


def masked(argv: Sequence[str]) -> list[str]:
    """Return a command line without the values of options that take a key; underscores count as hyphens."""
    kept: list[str] = []
    for before, argument in zip(["", *argv], argv, strict=False):
        name, separator, _ = argument.partition("=")
        names_key, is_key = (option.replace("_", "-") == KEY_OPTION for option in (name, before))
        if is_key:
            kept.append(HIDDEN)
        elif names_key and separator:
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(masked_url(argument))
    return kept


def masked_url(text: str) -> str:
    """Return text without the user and password before the host of an address in it."""
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return None


@cache
def commit() -> str | None:
    """Return the commit of the checkout that the package runs from; None if it was installed otherwise."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache
def processor() -> str:
    """Return the name of the CPU and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield every whole line with its place; the last line is not whole if its writer was killed."""
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
