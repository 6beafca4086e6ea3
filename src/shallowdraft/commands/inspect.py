"""shallowdraft inspect: what a checkpoint is and costs, and whether two share a vocabulary."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shallowdraft.commands.options import Command
from shallowdraft.shapes import NAMED, ModelShape


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Print a model's shape with what it costs and, for two models, whether they share a vocabulary.

    Reads config, tokenizer and the headers of the weights, not the weights. The shapes of the paper can be given by
    name. Example: shallowdraft inspect TARGET DRAFT
    """

    model: tyro.conf.Positional[str]
    """Checkpoint folder, hub id, or the name of a known shape such as noft-wide-796m."""
    draft: Annotated[str | None, tyro.conf.Positional] = None
    """A second one, to be its draft."""
    context: int = 1024
    """Attended tokens for the attention's share of the FLOPs and for the cache."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object."""

    def run(self) -> int:
        names = [self.model] + ([self.draft] if self.draft else [])
        models = [_costs(name, _shape(name), self.context) for name in names]
        check = _check(*names) if len(names) == 2 else None
        if self.json_output:
            print(json.dumps({"models": models, "vocabulary": None if check is None else asdict(check)}))
        else:
            _show(models, None if check is None else f"vocabulary: {check.relation} ({check.detail})")
        if check is not None:
            check.require()
        return 0


def _shape(name: str) -> ModelShape:
    if name.lower() in NAMED and not Path(name).is_dir():
        return NAMED[name.lower()]
    from shallowdraft.models.checkpoint import check_folder, find_folder

    return check_folder(find_folder(name))


def _costs(name: str, shape: ModelShape, context: int) -> dict[str, Any]:
    return {
        "name": name,
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
        "weight_bytes": {dtype: shape.weight_bytes(dtype) for dtype in ("float32", "bfloat16")},
        "pass_bytes": {dtype: shape.pass_bytes(dtype) for dtype in ("float32", "bfloat16")},
        "kv_bytes_per_token": {dtype: shape.kv_bytes_per_token(dtype) for dtype in ("float32", "bfloat16")},
        "flops_per_token": shape.flops_per_token(context),
    }


def _check(target: str, draft: str) -> Any:
    from shallowdraft.models.vocabulary import compare, load_tokenizer

    maps = []
    for name in (target, draft):
        tokenizer = load_tokenizer(Path(name)) if Path(name).is_dir() else None
        maps.append(None if tokenizer is None else tokenizer.get_vocab())
    return compare(maps[0], maps[1], _shape(target).vocab, _shape(draft).vocab)


def _show(models: list[dict[str, Any]], vocabulary: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for model in models:
        table.add_column(model["name"], justify="right", overflow="fold")
    for label, cell in _ROWS.items():
        table.add_row(label, *(cell(model) for model in models))
    console = Console(highlight=False)
    console.print(table)
    if vocabulary:
        console.print(vocabulary, soft_wrap=True)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _both(field: str) -> Any:
    return lambda model: f"{_bytes(model[field]['float32'])} / {_bytes(model[field]['bfloat16'])}"


_ROWS: dict[str, Any] = {
    "family": lambda m: m["family"],
    "shape (layers x d_model / heads / ffn)": lambda m: m["shape"],
    "key/value heads x head width": lambda m: f"{m['kv_heads']} x {m['head_dim']}",
    "vocabulary": lambda m: f"{m['vocab']:,}" + (" (tied)" if m["tied"] else ""),
    "context": lambda m: f"{m['context']:,}",
    "parameters": lambda m: f"{m['parameters']:,}",
    "weights, float32 / bf16": _both("weight_bytes"),
    "read by a pass, float32 / bf16": _both("pass_bytes"),
    "cache a token, float32 / bf16": _both("kv_bytes_per_token"),
    "FLOPs a token": lambda m: f"{m['flops_per_token']:,}",
}
