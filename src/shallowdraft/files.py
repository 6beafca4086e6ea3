"""Files that others wrote, read with care: regular ones, bounded, in UTF-8, with the fields wanted.

Lines end at line feeds alone: JSON may hold U+2028 and others at which `str.splitlines` ends one.
Every error is of the class that the caller names, in one line with the file and the line's number.
No torch here.
"""

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from errno import EIO
from functools import cache
from math import isfinite
from pathlib import Path
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints

from shallowdraft.errors import ShallowdraftError

LARGEST_TEXT = 2**28  # characters of a text that is read as a whole
LARGEST_OBJECT = LONGEST_LINE = 2**26  # bytes
DEEPEST = 64  # lists and objects within each other
EXPANSION, ALWAYS_EXPANDED = 200, 2**28  # a compressed file holds so many times its size, or so many bytes, at most

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_UNPACKERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSED = tuple(_UNPACKERS)
_DAMAGED = (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)

Complaint = type[ShallowdraftError]
Made = TypeVar("Made")


def require_regular(path: Path, complaint: Complaint) -> None:
    """Refuse a pipe or a device, which may have no end, and which nobody may ever write to."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise complaint(f"{path}: no regular file but a pipe, a socket or a device; write it to a file first")


def is_plain_name(name: str) -> bool:
    """Whether it names a file of a folder, and nothing elsewhere."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


@contextmanager
def _opened(path: Path, complaint: Complaint) -> Iterator[IO[bytes]]:
    """Open a regular file, decompressed if its name says so."""
    require_regular(path, complaint)
    unpack: Callable[..., IO[bytes]] = _UNPACKERS.get(path.suffix, open)
    try:
        with unpack(path, "rb") as stream:
            yield stream
    except _DAMAGED as error:
        raise complaint(f"{path}: cannot be decompressed ({error}); copy it again") from None


def read_text(path: Path, complaint: Complaint, *, most: int = LARGEST_TEXT) -> str:
    """Read a whole file as text; carriage returns before line feeds are left out."""
    with _opened(path, complaint) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as decoded:
        try:
            text = decoded.read(most + 1)
        except UnicodeDecodeError as error:
            raise complaint(f"{path}: not UTF-8 ({error.reason}); convert it first") from None
    if len(text) > most:
        raise complaint(f"{path}: more than {most:,} characters, the most that is read at once; split it")
    return text


def read_lines(path: Path, complaint: Complaint, *, ended: bool = False) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, from 1; with `ended` only those that a line feed ends."""
    size = 0
    with _opened(path, complaint) as stream:
        most = max(ALWAYS_EXPANDED, EXPANSION * path.stat().st_size)
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
            size += len(line)
            if len(line) > LONGEST_LINE:
                raise complaint(f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes, the most there may be")
            if size > most:
                raise complaint(
                    f"{path}: holds more than {most:,} bytes, over {EXPANSION} times its own size; "
                    "if that is right, decompress it first"
                )
            if ended and not line.endswith(b"\n"):
                return
            try:
                yield number, line.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise complaint(f"{path}:{number}: not UTF-8 ({error.reason}); convert it first") from None


def read_json(path: Path, complaint: Complaint, advice: str = "copy the file again") -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    text = read_text(path, complaint, most=LARGEST_OBJECT)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise complaint(f"{path}: not readable as JSON ({error}); {advice}") from None
    if not isinstance(content, dict):
        raise complaint(f"{path}: holds no JSON object; {advice}")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON of any kind; a ValueError says what is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair, which is no text") from None
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for outer in level
            for child in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of writing, like a full disk, name the file, as only those of opening do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or EIO, error.strerror or str(error), str(path)) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` at once if nothing fails, and is removed otherwise."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class Range:
    """The least and the most that a number may be, in `Annotated`."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most


Count = Annotated[int, Range(0, 2**53)]
Size = Annotated[int, Range(1, 2**53)]
Seconds = Annotated[float, Range(0, 1e9)]
SomeSeconds = Annotated[float, Range(1e-12, 1e9)]
Share = Annotated[float, Range(0, 1)]


def require_fields(record: Any, wanted: Any, where: str, complaint: Complaint) -> None:
    """Refuse what lacks a field of a dataclass or TypedDict, or has another type there."""
    if reason := _unlike(record, wanted, "it"):
        raise complaint(f"{where}: {reason}; correct it, or write the file again")


def make(wanted: Callable[..., Made], record: Any, where: str, complaint: Complaint) -> Made:
    """Make a dataclass of a record that has its fields and no others."""
    require_fields(record, wanted, where, complaint)
    hints, _ = _hints(wanted)
    if unknown := record.keys() - hints:
        raise complaint(f"{where}: has a field {shortened(min(unknown))} that is not known here")
    try:
        return wanted(**{name: _rebuilt(value, hints[name]) for name, value in record.items()})
    except ShallowdraftError as error:
        raise complaint(f"{where}: {error}") from None


def _rebuilt(value: Any, wanted: Any) -> Any:
    return tuple(value) if get_origin(wanted) is tuple else value


@cache
def _hints(wanted: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types of all fields, and the fields that must be there."""
    hints = get_type_hints(wanted, include_extras=True)
    if not is_dataclass(wanted):
        return hints, getattr(wanted, "__required_keys__", frozenset(hints))
    made = [one for one in fields(wanted) if one.init]
    needed = (one.name for one in made if one.default is MISSING and one.default_factory is MISSING)
    return {one.name: hints[one.name] for one in made}, frozenset(needed)


def _unlike(value: Any, wanted: Any, name: str) -> str:
    """Say how a value differs from a type; nothing if it does not."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return ""
    if origin is NotRequired:
        return _unlike(value, inner[0], name)
    if origin is Annotated:
        base, bounds = inner
        if reason := _unlike(value, base, name):
            return reason
        inside = bounds.least <= value <= bounds.most
        return "" if inside else f"{name} is {shortened(value)}, not from {bounds.least:,} to {bounds.most:,}"
    if origin in (Union, UnionType):
        reasons = [_unlike(value, kind, name) for kind in inner]
        return "" if "" in reasons else reasons[0]
    if origin is Literal:
        return "" if value in inner else f"{name} is {shortened(value)}, not one of {', '.join(map(str, inner))}"
    if origin in (list, tuple):
        return _unlike_list(value, inner, name)
    if origin is dict:
        return _unlike_map(value, inner, name)
    if wanted in _PLAIN:
        right, called = _PLAIN[wanted]
        return "" if right(value) else f"{name} is {shortened(value)}, not {called}"
    return _unlike_object(value, wanted, name)


def _is_float(value: Any) -> bool:
    return isfinite(value) if type(value) is float else _is_int(value)


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_int, "a whole number"),
    float: (_is_float, "a number"),
    str: (lambda value: type(value) is str, "text"),
    bool: (lambda value: type(value) is bool, "true or false"),
    NoneType: (lambda value: value is None, "null"),
}


def _unlike_list(value: Any, inner: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, list):
        return f"{name} is {shortened(value)}, not a list"
    alike = len(inner) == 1 or inner[-1] is Ellipsis
    if not alike and len(value) != len(inner):
        return f"{name} has {len(value)} members, not {len(inner)}"
    if alike and value and _are_numbers(value, inner[0]):
        return ""
    kinds = [inner[0]] * len(value) if alike else inner
    reasons = (_unlike(one, kind, f"{name}[{at}]") for at, (one, kind) in enumerate(zip(value, kinds, strict=True)))
    return next(filter(None, reasons), "")


def _are_numbers(values: list[Any], wanted: Any) -> bool:
    """Whether all are plainly numbers of a type, quickly: most of a trace are."""
    base, *bounds = get_args(wanted) if get_origin(wanted) is Annotated else (wanted,)
    if set(map(type, values)) != {base} or base not in (int, float):
        return False
    if base is float and not isfinite(sum(values)):
        return False
    least, most = min(values), max(values)
    return all(map(_is_float, (least, most))) and all(one.least <= least and most <= one.most for one in bounds)


def _unlike_map(value: Any, inner: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, dict):
        return f"{name} is {shortened(value)}, no object"
    key, kind = inner
    if key is int and (strange := [one for one in value if not re.fullmatch(r"\d{1,9}", one, re.ASCII)]):
        return f"{name} has a key {shortened(strange[0])}, which is no whole number"
    return next(filter(None, (_unlike(one, kind, f"{name}.{of[:40]}") for of, one in value.items())), "")


def _unlike_object(value: Any, wanted: type, name: str) -> str:
    if not isinstance(value, dict):
        return f"{name} is {shortened(value)}, no object"
    hints, needed = _hints(wanted)
    of = "" if name == "it" else f"{name}."
    if lacking := [field for field in hints if field in needed and field not in value]:
        return f"{of}{lacking[0]} is missing"
    reasons = (_unlike(value[field], kind, of + field) for field, kind in hints.items() if field in value)
    return next(filter(None, reasons), "")
