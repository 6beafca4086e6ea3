"""shallowdraft inspect: what a checkpoint is and costs, and whether two share a vocabulary."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import ModelCommand
from shallowdraft.errors import OptionError
from shallowdraft.shapes import NAMED, ModelShape

if TYPE_CHECKING:
    from shallowdraft.models.vocabulary import VocabularyCheck


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelCommand):
    """Print a model's shape with what it costs and, for two models, whether they share a vocabulary.

    Reads config, tokenizer and the headers of the weights, not the weights. The shapes of the paper can be given by
    name. Example: shallowdraft inspect TARGET DRAFT
    """

    model: tyro.conf.Positional[str]
    """Checkpoint folder, hub id, or the name of a known shape such as noft-wide-796m."""
    draft: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DRAFT")] = None
    """A second one, to be its draft."""
    context: int = 1024
    """Tokens of context, for the cache and the attention's share of the FLOPs."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object."""

    def run(self) -> int:
        from shallowdraft.models.memory import dtype_name, free_bytes
        from shallowdraft.models.model import resolve_device, resolve_dtype

        if self.context < 1:
            raise OptionError(f"context is {self.context}; it must be at least 1")
        device = resolve_device(self.device)
        dtype = dtype_name(resolve_dtype(self.dtype, device))
        found = [_Inspected.find(name) for name in (self.model, self.draft) if name is not None]
        check = found[0].vocabulary_check(found[1]) if len(found) == 2 else None
        report = {
            "models": [_costs(one, dtype, self.context) for one in found],
            "vocabulary": None if check is None else asdict(check),
            "device": str(device),
            "dtype": dtype,
            "free_bytes": free_bytes(device),
        }
        if self.json_output:
            print(json.dumps(report))
        else:
            _show(report, self.context)
        if check is not None:
            check.require()
        return 0


@dataclass(frozen=True)
class _Inspected:
    """A model by its name: a known shape, or a folder that was looked into."""

    name: str
    shape: ModelShape
    folder: Path | None

    @classmethod
    def find(cls, name: str) -> "_Inspected":
        from shallowdraft.models.checkpoint import check_folder, find_folder, read_shape

        if name.lower() in NAMED and not Path(name).is_dir():
            return cls(name, NAMED[name.lower()], None)
        folder = find_folder(name, weights=False)
        return cls(name, check_folder(folder) if Path(name).is_dir() else read_shape(folder), folder)

    def vocabulary_check(self, draft: "_Inspected") -> "VocabularyCheck":
        from shallowdraft.models.vocabulary import (
            compare,
            load_tokenizer,
            say_sizes_only,
            vocabulary_of,
            why_sizes_only,
        )

        maps = [None if one.folder is None else vocabulary_of(load_tokenizer(one.folder)) for one in (self, draft)]
        check = compare(maps[0], maps[1], self.shape.vocab, draft.shape.vocab)
        if check.relation == "same" and (reason := why_sizes_only(*maps)):
            say_sizes_only(self.name, draft.name, reason)
        return check


def _costs(found: _Inspected, dtype: str, context: int) -> dict[str, Any]:
    shape = found.shape
    return {
        "name": found.name,
        "family": shape.family,
        "shape": str(shape),
        "layers": shape.layers,
        "d_model": shape.d_model,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "context": shape.context,
        "tied": shape.tied,
        "parameters": shape.parameters,
        "weight_bytes": shape.weight_bytes(dtype),
        "pass_bytes": shape.pass_bytes(dtype),
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype),
        "kv_bytes": shape.kv_bytes_per_token(dtype) * context,
        "flops_per_token": shape.flops_per_token(context),
    }


def _show(report: dict[str, Any], context: int) -> None:
    from rich.table import Table

    from shallowdraft.commands.console import Console

    models, dtype = report["models"], report["dtype"]
    table = Table()
    table.add_column(f"in {dtype}")
    for model in models:
        table.add_column(model["name"], justify="right", overflow="fold")
    for label, cell in _ROWS.items():
        table.add_row(label.format(context=f"{context:,}"), *(cell(model) for model in models))
    console = Console(highlight=False)
    console.print(table)
    needed = sum(model["weight_bytes"] + model["kv_bytes"] for model in models)
    if report["free_bytes"] is not None:
        fits = "fits" if needed <= report["free_bytes"] else "does NOT fit"
        console.print(
            f"weights and cache: {_bytes(needed)}; free on {report['device']}: {_bytes(report['free_bytes'])}: {fits}",
            soft_wrap=True,
        )
    if check := report["vocabulary"]:
        console.print(f"vocabulary: {check['relation']} ({check['detail']})", soft_wrap=True)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "family": lambda m: m["family"],
    "layers x d_model / heads / ffn": lambda m: m["shape"],
    "key/value heads x head width": lambda m: f"{m['kv_heads']} x {m['head_dim']}",
    "vocabulary": lambda m: f"{m['vocab']:,}" + (" (tied)" if m["tied"] else ""),
    "longest context": lambda m: f"{m['context']:,}",
    "parameters": lambda m: f"{m['parameters']:,}",
    "weights": lambda m: _bytes(m["weight_bytes"]),
    "read by a pass": lambda m: _bytes(m["pass_bytes"]),
    "cache of {context} tokens": lambda m: _bytes(m["kv_bytes"]),
    "FLOPs a token at {context}": lambda m: f"{m['flops_per_token']:,}",
}
