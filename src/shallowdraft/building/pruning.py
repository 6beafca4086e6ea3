"""Carve a smaller model out of a larger one, to an exact shape.

What stays is chosen by importance; embedding, final norm and head are always carried over. Which layers to keep cannot
be told from a model that was just cut (the order flips once it is trained), so there are several candidates, and the
caller decides after training each a little.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shallowdraft.building.importance import Importance
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape, child_shape

MOST_CANDIDATES = 6


@dataclass(frozen=True)
class Cut:
    """Which parts of a parent stay, by index, in ascending order."""

    layers: tuple[int, ...]
    groups: tuple[Tensor, ...]  # for each kept layer: key/value heads
    heads: tuple[Tensor, ...]  # for each kept layer: query heads
    ffn: tuple[Tensor, ...]
    hidden: Tensor


def require_reachable(parent: ModelShape, wanted: ModelShape) -> None:
    """Raise unless the wanted shape is a part of the parent's."""
    for name in ("layers", "d_model", "heads", "kv_heads", "ffn"):
        if getattr(wanted, name) > getattr(parent, name):
            raise OptionError(
                f"{name} is {getattr(wanted, name)}, the parent has {getattr(parent, name)}; "
                "pruning can only make it smaller"
            )
    if wanted.head_dim != parent.head_dim:
        raise OptionError(
            f"heads are {wanted.head_dim} wide, the parent's {parent.head_dim}; pruning keeps their width"
        )
    if wanted.heads // wanted.kv_heads > parent.heads // parent.kv_heads:
        raise OptionError(
            f"{wanted.heads // wanted.kv_heads} query heads share a key/value head, in the parent "
            f"{parent.heads // parent.kv_heads}; keep more key/value heads"
        )


def layer_candidates(importance: Importance, keep: int) -> list[tuple[int, ...]]:
    """Sets of layers worth trying: the first, spread over all, the middle, both ends, those that change most."""
    layers = len(importance.layers)
    spread = [round((index + 0.5) * layers / keep - 0.5) for index in range(keep)]
    early = [int((index + 0.25) * layers / keep) for index in range(keep)]
    start = (layers - keep) // 2
    ends = [*range((keep + 1) // 2), *range(layers - keep // 2, layers)]
    busiest = importance.layers.topk(keep).indices.tolist()
    found = (list(range(keep)), spread, early, list(range(start, start + keep)), ends, busiest)
    return list(dict.fromkeys(tuple(sorted(one)) for one in found if len(set(one)) == keep))


def choose(parent: ModelShape, wanted: ModelShape, importance: Importance, layers: tuple[int, ...]) -> Cut:
    """The most important parts of the given layers."""
    require_reachable(parent, wanted)
    groups, heads = [], []
    per_group = wanted.heads // wanted.kv_heads
    for layer in layers:
        by_group = importance.heads[layer].view(parent.kv_heads, -1)
        best = by_group.topk(per_group, dim=1)  # heads are ranked within their group
        kept = _top(best.values.sum(1), wanted.kv_heads)
        first = torch.arange(parent.kv_heads)[:, None] * by_group.shape[1]
        groups.append(kept)
        heads.append((first + best.indices.sort(1).values)[kept].flatten())
    ffn = tuple(_top(importance.ffn[layer], wanted.ffn) for layer in layers)
    return Cut(layers, tuple(groups), tuple(heads), ffn, _top(importance.hidden, wanted.d_model))


def carve(parent: Decoder, wanted: ModelShape, cut: Cut) -> Decoder:
    """A dense decoder of the wanted shape with the parent's weights at the kept indices."""
    kept_full = sum(layer < parent.shape.full_layers for layer in cut.layers)
    shape, state = replace(child_shape(parent.shape, wanted), full_layers=kept_full), parent.dense_state()
    carved = {}
    for name in shape.layout():
        parts = name.split(".")
        source = name
        if parts[0] == "blocks":
            layer = int(parts[1])
            source = ".".join(["blocks", str(cut.layers[layer]), *parts[2:]])
        rows, columns = _indices(parent.shape, cut, parts)
        tensor = state[source]
        if rows is not None:
            tensor = tensor[rows.to(tensor.device)]
        if columns is not None and tensor.dim() > 1:
            tensor = tensor[:, columns.to(tensor.device)]
        carved[name] = tensor.clone()
    return assemble(shape, carved)


def _indices(parent: ModelShape, cut: Cut, parts: list[str]) -> tuple[Tensor | None, Tensor | None]:
    """Which rows and columns of a parameter stay; None: all."""
    module = parts[-2]
    hidden = None if len(cut.hidden) == parent.d_model else cut.hidden
    if module in ("embed", "head"):
        return None, None if parent.embed_dim != parent.d_model else hidden
    if module in ("positions", "project_out"):
        return None, hidden
    if module in ("norm", "attn_norm", "ffn_norm", "project_in"):
        return hidden, None
    layer = int(parts[1])
    if module in ("q_norm", "k_norm"):
        return None, None
    if module == "qkv":
        q, kv = parent.heads * parent.head_dim, parent.kv_heads * parent.head_dim
        keys = _spans(cut.groups[layer], parent.head_dim)
        return torch.cat((_spans(cut.heads[layer], parent.head_dim), q + keys, q + kv + keys)), hidden
    if module == "out":
        return hidden, _spans(cut.heads[layer], parent.head_dim)
    if module == "up":
        kept = cut.ffn[layer]
        return torch.cat((kept, parent.ffn + kept)) if parent.gated else kept, hidden
    assert module == "down"
    return hidden, cut.ffn[layer]


def _spans(heads: Tensor, width: int) -> Tensor:
    """Head indices -> indices of their channels."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores, ascending."""
    return scores.topk(count).indices.sort().values
