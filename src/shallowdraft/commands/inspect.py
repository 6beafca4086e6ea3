"""shallowdraft inspect: what a checkpoint is and costs, and whether two share a vocabulary."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import Json, ModelCommand
from shallowdraft.errors import OptionError
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.shape import ModelShape

if TYPE_CHECKING:
    import torch

    from shallowdraft.models.vocabulary import VocabularyCheck


@dataclass(frozen=True, kw_only=True)
class InspectCommand(ModelCommand):
    """Print a model's shape with what it costs and, for two models, whether they share a vocabulary.

    Reads config, tokenizer and the headers of the weights, not the weights. The shapes of the paper can be given by
    name. Example: shallowdraft inspect TARGET DRAFT
    """

    model: tyro.conf.Positional[str]
    """Checkpoint folder, hub id, or the name of a known shape such as noft-wide-796m."""
    draft: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DRAFT")] = None
    """A second one, to be its draft."""
    context: int = 1024
    """Tokens of context, for the cache and the attention's share of the FLOPs; a model with a shorter context has that
    of its own."""
    json_output: Json = False
    """Print one JSON object."""

    def run(self) -> int:
        from shallowdraft.models.memory import dtype_name, free_bytes
        from shallowdraft.models.model import resolve_device, resolve_dtype

        if self.context < 1:
            raise OptionError(f"--context is {self.context}; it must be at least 1")
        device = resolve_device(self.device)
        dtype = dtype_name(resolve_dtype(self.dtype, device))
        models = [_InspectedModel.named(name) for name in (self.model, self.draft) if name is not None]
        check = models[0].vocabulary_check(models[1]) if len(models) == 2 else None
        report = {
            "models": [
                _costs(model, dtype, self.context) | self._as_draft(model.shape, device, dtype) for model in models
            ],
            "vocabulary": None if check is None else asdict(check),
            "device": str(device),
            "dtype": dtype,
            "free_bytes": free_bytes(device),
            "silent_from": _silent_from(*(model.shape for model in models)) if check else None,
        }
        if self.json_output:
            print(json.dumps(report))
        else:
            _show(report)
        if check is not None:
            check.require()
        return 0

    def _as_draft(self, shape: ModelShape, device: "torch.device", dtype: str) -> dict[str, Any]:
        """Return the precision in which the model drafts, and why that is not int8 if int8 is the default."""
        from shallowdraft.models.model import int8_by_default, int8_requirements

        by_default = self.dtype is None and device.type == "cpu"
        rounded = by_default and int8_by_default(shape, device)
        return {
            "draft_dtype": "int8" if rounded else dtype,
            "draft_dtype_reason": int8_requirements(shape) if by_default and not rounded else None,
        }


@dataclass(frozen=True)
class _InspectedModel:
    """A model by its name: a known shape, or a checkpoint folder."""

    name: str
    shape: ModelShape
    folder: Path | None

    @classmethod
    def named(cls, name: str) -> "_InspectedModel":
        """Return the model of this name."""
        from shallowdraft.models.checkpoint import check_folder, find_folder, read_shape

        if name.lower() in NAMED and not Path(name).is_dir():
            return cls(name, NAMED[name.lower()], None)
        folder = find_folder(name, weights=False)
        return cls(name, check_folder(folder) if Path(name).is_dir() else read_shape(folder), folder)

    def vocabulary_map(self) -> dict[str, int] | None:
        """Return the map from tokens to ids; None without a tokenizer."""
        from shallowdraft.models.vocabulary import load_tokenizer, vocabulary_of

        return None if self.folder is None else vocabulary_of(load_tokenizer(self.folder))

    def vocabulary_check(self, draft: "_InspectedModel") -> "VocabularyCheck":
        from shallowdraft.models.vocabulary import (
            compare,
            sizes_only_reason,
            warn_sizes_only,
        )

        maps = [model.vocabulary_map() for model in (self, draft)]
        check = compare(maps[0], maps[1], self.shape.vocab, draft.shape.vocab)
        if check.relation == "same" and (reason := sizes_only_reason(*maps)):
            warn_sizes_only(self.name, draft.name, reason)
        return check


def _silent_from(target: ModelShape, draft: ModelShape) -> int | None:
    """Return the length of text beyond which the draft proposes nothing, if it is shorter than the target's."""
    return draft.context if draft.context < target.context else None


def _costs(model: _InspectedModel, dtype: str, context: int) -> dict[str, Any]:
    shape, tokens = model.shape, min(context, model.shape.context)
    return {
        "name": model.name,
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
        "cache_tokens": tokens,
        "kv_bytes": shape.kv_bytes_per_token(dtype) * tokens,
        "flops_per_token": shape.flops_per_token(tokens),
    }


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from shallowdraft.display.console import Console

    models, dtype = report["models"], report["dtype"]
    table = Table()
    table.add_column(f"in {dtype}")
    for model in models:
        table.add_column(model["name"], justify="right", overflow="fold")
    for label, cell in _ROWS.items():
        table.add_row(label, *(cell(model) for model in models))
    console = Console(highlight=False)
    console.print(table)
    needed = sum(model["weight_bytes"] + model["kv_bytes"] for model in models)
    if report["free_bytes"] is not None:
        fits = "fits" if needed <= report["free_bytes"] else "does NOT fit"
        console.print(
            f"weights and cache: {_bytes(needed)}; free on {report['device']}: {_bytes(report['free_bytes'])}: {fits}",
            soft_wrap=True,
        )
    if reason := models[-1]["draft_dtype_reason"]:
        console.print(f"{models[-1]['name']} drafts in {models[-1]['draft_dtype']}: {reason}", soft_wrap=True)
    if report["silent_from"] is not None:
        target, draft = models
        console.print(
            f"silent: beyond {draft['context']:,} tokens of text {draft['name']} proposes nothing; from there to the "
            f"{target['context']:,} of {target['name']} decoding is plain",
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
    "cache": lambda m: f"{_bytes(m['kv_bytes'])} for {m['cache_tokens']:,} tokens",
    "FLOPs a token": lambda m: f"{m['flops_per_token']:,} behind {m['cache_tokens']:,}",
    "as a draft in": lambda m: m["draft_dtype"],
}
