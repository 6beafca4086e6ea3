"""Inputs of the API: names or loaded models, records or their files, one name or several."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shallowdraft.errors import OptionError
from shallowdraft.limits import MAX_LOOKAHEAD
from shallowdraft.runs.profile import Profile, read_profile
from shallowdraft.runs.trace import Trace, read_trace

if TYPE_CHECKING:
    from shallowdraft.models.model import Model
    from shallowdraft.prompts import Prompt
    from shallowdraft.shapes.shape import ModelShape
    from shallowdraft.studying.cluster import Executor

T = TypeVar("T")

Names = str | Iterable[str]
Lookaheads = str | Sequence[int]
"""`1:12`, `1,2,4`, or numbers."""


def as_list(values: str | Iterable[T]) -> list[str] | list[T]:
    """Return several values as a list, and a single name as a list of one."""
    return [values] if isinstance(values, str) else list(values)


def parse_lookaheads(lookaheads: Lookaheads) -> list[int]:
    """Return lookaheads that are written as `1:12` or `1,2,4`, or given as numbers."""
    text = lookaheads if isinstance(lookaheads, str) else ",".join(map(str, lookaheads))
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        numbers = list(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        numbers = sorted({int(part) for part in text.split(",")})
    else:
        numbers = []
    if not numbers or not 1 <= min(numbers) <= max(numbers) <= MAX_LOOKAHEAD:
        raise OptionError(f"--lookaheads is {text}; write from:to or a,b,c with numbers from 1 to {MAX_LOOKAHEAD}")
    return numbers


def gather_prompts(prompts_of: "Names | Iterable[tuple[str, Prompt]]", limit: int | None) -> "list[tuple[str, Prompt]]":
    """Return prompts with the name of their set, loaded where only a set or a file is named."""
    from shallowdraft.prompts import load_prompts
    from shallowdraft.prompts import names as shipped_names

    entries: list[str | tuple[str, Prompt]] = [prompts_of] if isinstance(prompts_of, str) else list(prompts_of)
    if not entries:
        raise OptionError(f"give --prompts: some of {', '.join(shipped_names())}, or files")
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}; it must be at least 1")
    prompts: list[tuple[str, Prompt]] = []
    for entry in entries:
        if isinstance(entry, str):
            prompts += [(Path(entry).stem, prompt) for prompt in load_prompts(entry)[:limit]]
        else:
            prompts.append(entry)
    if len({(name, prompt.id) for name, prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same set and id; give each set once, and each line another id")
    return prompts


def load_target(target: "str | Model", dtype: str | None, device: str | None) -> "Model":
    """Load a decoder-only target by name; a loaded one is returned as it is."""
    from shallowdraft.models.checkpoint import require_decoder_only
    from shallowdraft.models.model import load

    if not isinstance(target, str):
        return target
    require_decoder_only(target)
    return load(target, dtype, device)


def load_draft_model(draft: "str | Model", dtype: str | None, device: str | None) -> "Model":
    """Load a decoder-only draft by name; a loaded one is returned as it is."""
    from shallowdraft.models.checkpoint import require_decoder_only
    from shallowdraft.models.model import load_draft

    if not isinstance(draft, str):
        return draft
    require_decoder_only(draft)
    return load_draft(draft, dtype, device)


def shape_of(model: "str | Model") -> "ModelShape":
    """Return the shape of a model, loaded or by name."""
    from shallowdraft.models.checkpoint import find_folder, read_shape

    return read_shape(find_folder(model)) if isinstance(model, str) else model.shape


def open_trace(trace: Trace | str | Path) -> Trace:
    """Return a trace, read from its file if that is named."""
    return trace if isinstance(trace, Trace) else read_trace(Path(trace))


def open_profile(profile: Profile | str | Path) -> Profile:
    """Return a profile, read from its file if that is named."""
    return profile if isinstance(profile, Profile) else read_profile(Path(profile))


def executor(cluster: str | None, device: str | None) -> "Executor":
    """Return where to replay and build: here, or on a Ray cluster."""
    from shallowdraft.models.model import resolve_device
    from shallowdraft.studying.cluster import Cluster, Here

    if cluster is None:
        return Here()
    return Cluster(cluster, gpus=int(resolve_device(device).type == "cuda"))


def require_at_least(least: int, **options: int) -> None:
    """Refuse options below a number."""
    for name, value in options.items():
        if value < least:
            raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")


def require_lookahead(lookahead: int) -> None:
    """Refuse a lookahead that no engine of ours has."""
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise OptionError(f"--lookahead is {lookahead}; it must be 1 to {MAX_LOOKAHEAD}")
