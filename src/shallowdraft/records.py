"""Files of measurements: JSON lines, the first of which says what they are and where they come from. No torch here.

A record is on disk, whole, before the next is made; what a killed run left half-written is dropped on reading.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from shallowdraft.errors import RecordError

SCHEMA = 1
RANDOM = "random:"  # what the name of a draft begins with that has a shape and random weights
_PACKAGES = ("shallowdraft", "torch", "transformers", "numpy")

Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """An append-only file of one kind of record."""

    path: Path
    header: Record

    @classmethod
    def read(cls, path: Path, kind: str) -> "Records":
        """A file that is there."""
        if not path.is_file():
            raise RecordError(f"{path}: there is no such file")
        header = next(_lines(path), None)
        if header is None or header.get("kind") != kind:
            raise RecordError(
                f"{path}: this is no {kind}, as its first line should say; name another file, or remove it"
            )
        if header.get("schema") != SCHEMA:
            raise RecordError(f"{path}: written as version {header.get('schema')}, this package reads {SCHEMA}")
        return cls(path, header)

    @classmethod
    def open(cls, path: Path, kind: str, about: Record, **origin: Any) -> "Records":
        """A new file, or one that was begun with the same `about`."""
        if not path.exists() or next(_lines(path), None) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            header = {"kind": kind, "schema": SCHEMA, "about": about, "provenance": provenance(**origin)}
            path.write_text(json.dumps(header, ensure_ascii=False) + "\n", encoding="utf-8")
        found = cls.read(path, kind)
        wanted = json.loads(json.dumps(about))
        if found.header["about"] != wanted:
            known = found.header["about"]
            differ = [key for key in wanted | known if known.get(key) != wanted.get(key)]
            raise RecordError(f"{path} was begun with another {', '.join(differ)}; name another file, or remove it")
        _drop_half_line(path)
        return found

    @property
    def about(self) -> Record:
        about: Record = self.header["about"]
        return about

    def append(self, record: Record) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Record]:
        lines = _lines(self.path)
        next(lines)
        return lines

    def latest(self, *names: str) -> dict[str, Record]:
        """The last record of each key, which is what these fields hold."""
        return {_key(record, names): record for record in self}

    def renew(self, records: Iterable[Record], *names: str) -> None:
        """Append those that say something else than the last one of their key."""
        known = self.latest(*names)
        for record in records:
            if known.get(_key(record, names)) != json.loads(json.dumps(record)):
                self.append(record)


def _key(record: Record, names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def write_whole(path: Path, text: str) -> None:
    """At once: whoever is killed meanwhile leaves the file that was there."""
    partial = path.with_name(path.name + ".partial")
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
    """The command line of this process."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


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


def _lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):  # a run was killed while it wrote
                return
            try:
                yield json.loads(line)
            except ValueError:
                raise RecordError(f"{path}:{number}: not a line of JSON; was the file edited?") from None


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
