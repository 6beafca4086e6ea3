"""Careful reading of files that others wrote: regular files only, of limited size, in UTF-8, with the expected fields.

Lines end at line feeds alone: JSON may contain U+2028 and others at which `str.splitlines` ends a line.
Every error has the class that the caller names, and one line with the file and the number of the line. No torch here.
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
EXPANSION, ALWAYS_EXPANDED = 200, 2**28  # a compressed file may expand this many times, or to this many bytes

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_UNPACKERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSED = tuple(_UNPACKERS)
_DAMAGED = (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)

ErrorClass = type[ShallowdraftError]
T = TypeVar("T")


def require_regular(path: Path, error_class: ErrorClass) -> None:
    """Refuse a pipe or a device, which may never end or never deliver a byte."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise error_class(f"{path}: not a regular file but a pipe, a socket or a device; write it to a file first")


def is_plain_name(name: str) -> bool:
    """Return whether a name, joined to a folder, is a file in that folder and nowhere else."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


@contextmanager
def _opened(path: Path, error_class: ErrorClass) -> Iterator[IO[bytes]]:
    """Open a regular file, decompressed if its name says so."""
    require_regular(path, error_class)
    unpack: Callable[..., IO[bytes]] = _UNPACKERS.get(path.suffix, open)
    try:
        with unpack(path, "rb") as stream:
            yield stream
    except _DAMAGED as error:
        raise error_class(f"{path}: cannot be decompressed ({error}); copy it again") from None


def read_text(path: Path, error_class: ErrorClass, *, most: int = LARGEST_TEXT) -> str:
    """Read a whole file of at most `most` characters; a carriage return before a line feed is dropped."""
    with _opened(path, error_class) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as decoded:
        try:
            text = decoded.read(most + 1)
        except UnicodeDecodeError as error:
            raise error_class(f"{path}: not UTF-8 ({error.reason}); convert it first") from None
    if len(text) > most:
        raise error_class(f"{path}: more than {most:,} characters, the most that is read at once; split it")
    return text


def read_lines(path: Path, error_class: ErrorClass, *, ended: bool = False) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, from 1; with `ended` stop at a last line without a line feed."""
    size = 0
    with _opened(path, error_class) as stream:
        most = max(ALWAYS_EXPANDED, EXPANSION * path.stat().st_size)
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
            size += len(line)
            if len(line) > LONGEST_LINE:
                raise error_class(f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes, the most there may be")
            if size > most:
                raise error_class(
                    f"{path}: holds more than {most:,} bytes, over {EXPANSION} times its own size; "
                    "if that is right, decompress it first"
                )
            if ended and not line.endswith(b"\n"):
                return
            try:
                yield number, line.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise error_class(f"{path}:{number}: not UTF-8 ({error.reason}); convert it first") from None


def read_json(path: Path, error_class: ErrorClass, advice: str = "copy the file again") -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    text = read_text(path, error_class, most=LARGEST_OBJECT)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise error_class(f"{path}: not readable as JSON ({error}); {advice}") from None
    if not isinstance(content, dict):
        raise error_class(f"{path}: holds no JSON object; {advice}")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON of any type; raise a ValueError for text that is invalid or nested too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_too_deep(value):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair, which is not text") from None
    return value


def _is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than DEEPEST, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        children: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            children += [member for member in members if isinstance(member, dict | list)]
        if not children:
            return False
        level = children
    return True


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of writing, such as a full disk; only errors of opening have it already."""
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
    """The smallest and the largest value of a number, in `Annotated`."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most


Count = Annotated[int, Range(0, 2**53)]
Size = Annotated[int, Range(1, 2**53)]
Seconds = Annotated[float, Range(0, 1e9)]
PositiveSeconds = Annotated[float, Range(1e-12, 1e9)]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(1e-9, 1e12)]
"""Tokens per iteration or per second, and speed-ups."""
Interval = tuple[Rate, Rate]
"""From and to."""


def require_fields(record: Any, expected: Any, where: str, error_class: ErrorClass) -> None:
    """Refuse a record that lacks a field of a dataclass or TypedDict, or has a value of another type there."""
    if problem := _mismatch(record, expected, "it"):
        raise error_class(f"{where}: {problem}; correct it, or write the file again")


def from_record(
    dataclass: Callable[..., T], record: Any, where: str, error_class: ErrorClass, *, extra_fields: bool = False
) -> T:
    """Build a dataclass from a record that has its fields; others are an error unless `extra_fields` allows them."""
    require_fields(record, dataclass, where, error_class)
    types, _ = _field_types(dataclass)
    if not extra_fields and (unknown := record.keys() - types):
        raise error_class(f"{where}: has an unknown field {shortened(min(unknown))}")
    try:
        return _instance(dataclass, record)
    except ShallowdraftError as error:
        raise error_class(f"{where}: {error}") from None


def _instance(dataclass: Callable[..., T], record: dict[str, Any]) -> T:
    types, _ = _field_types(dataclass)
    return dataclass(**{name: _as_type(value, types[name]) for name, value in record.items() if name in types})


def _as_type(value: Any, expected: Any) -> Any:
    """Return a checked JSON value as its type: lists as tuples, keys as numbers, objects as dataclasses."""
    origin, args = get_origin(expected), get_args(expected)
    if origin in (Annotated, NotRequired):
        return _as_type(value, args[0])
    if origin in (Union, UnionType):
        return _as_type(value, next(option for option in args if not _mismatch(value, option, "it")))
    if origin is list:
        return value if args[0] in _PLAIN else [_as_type(member, args[0]) for member in value]
    if origin is tuple:
        types = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_as_type(member, type_) for member, type_ in zip(value, types, strict=True))
    if origin is dict:
        return {int(key) if args[0] is int else key: _as_type(member, args[1]) for key, member in value.items()}
    return _instance(expected, value) if isinstance(expected, type) and is_dataclass(expected) else value


@cache
def _field_types(expected: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of all fields, and the names of those that are required."""
    types = get_type_hints(expected, include_extras=True)
    if not is_dataclass(expected):
        return types, getattr(expected, "__required_keys__", frozenset(types))
    init_fields = [field for field in fields(expected) if field.init]
    required = (field.name for field in init_fields if field.default is MISSING and field.default_factory is MISSING)
    return {field.name: types[field.name] for field in init_fields}, frozenset(required)


# The functions below return the first difference between a value and a type, as a sentence about `name`, the path of
# the value in its record; "" if there is none.


def _mismatch(value: Any, expected: Any, name: str) -> str:
    origin, args = get_origin(expected), get_args(expected)
    if expected is Any:
        return ""
    if origin is NotRequired:
        return _mismatch(value, args[0], name)
    if origin is Annotated:
        base, bounds = args
        if problem := _mismatch(value, base, name):
            return problem
        inside = bounds.least <= value <= bounds.most
        return "" if inside else f"{name} is {shortened(value)}, not from {bounds.least:,} to {bounds.most:,}"
    if origin in (Union, UnionType):
        problems = [_mismatch(value, member, name) for member in args]
        return "" if "" in problems else problems[0]
    if origin is Literal:
        return "" if value in args else f"{name} is {shortened(value)}, not one of {', '.join(map(str, args))}"
    if origin in (list, tuple):
        return _list_mismatch(value, args, name)
    if origin is dict:
        return _dict_mismatch(value, args, name)
    if expected in _PLAIN:
        is_valid, description = _PLAIN[expected]
        return "" if is_valid(value) else f"{name} is {shortened(value)}, not {description}"
    return _object_mismatch(value, expected, name)


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


def _list_mismatch(value: Any, args: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, list):
        return f"{name} is {shortened(value)}, not a list"
    uniform = len(args) == 1 or args[-1] is Ellipsis  # list[X] or tuple[X, ...]
    if not uniform and len(value) != len(args):
        return f"{name} has {len(value)} members, not {len(args)}"
    if uniform and value and _are_numbers(value, args[0]):
        return ""
    for index, member in enumerate(value):
        if problem := _mismatch(member, args[0] if uniform else args[index], f"{name}[{index}]"):
            return problem
    return ""


def _are_numbers(values: list[Any], expected: Any) -> bool:
    """Return whether all values are numbers of a type: a fast path, since a trace is mostly lists of numbers."""
    base, *bounds = get_args(expected) if get_origin(expected) is Annotated else (expected,)
    if set(map(type, values)) != {base} or base not in (int, float):
        return False
    if base is float and not isfinite(sum(values)):
        return False
    least, most = min(values), max(values)
    return all(map(_is_float, (least, most))) and all(bound.least <= least and most <= bound.most for bound in bounds)


def _dict_mismatch(value: Any, args: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, dict):
        return f"{name} is {shortened(value)}, not an object"
    key_type, value_type = args
    for key, member in value.items():
        if key_type is int and not re.fullmatch(r"\d{1,9}", key, re.ASCII):
            return f"{name} has a key {shortened(key)}, which is not a whole number"
        if problem := _mismatch(member, value_type, f"{name}.{key[:40]}"):
            return problem
    return ""


def _object_mismatch(value: Any, expected: type, name: str) -> str:
    if not isinstance(value, dict):
        return f"{name} is {shortened(value)}, not an object"
    types, required = _field_types(expected)
    prefix = "" if name == "it" else f"{name}."
    if missing := [field for field in types if field in required and field not in value]:
        return f"{prefix}{missing[0]} is missing"
    for field, field_type in types.items():
        if field in value and (problem := _mismatch(value[field], field_type, prefix + field)):
            return problem
    return ""
