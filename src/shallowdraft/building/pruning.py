"""Carve a smaller model out of a larger one, to an exact shape.

The parts to keep are chosen by importance, or by learned masks; embedding, final norm and head are always carried over.
Which layers to keep cannot be told from a model that was just cut (the order flips once it is trained), so there are
several candidate sets, and the caller decides after training each a little.
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
class KeptParts:
    """Which parts of a parent stay, by index, in ascending order."""

    layers: tuple[int, ...]
    groups: tuple[Tensor, ...]  # key/value heads of each kept layer
    heads: tuple[Tensor, ...]  # query heads of each kept layer, numbered within the parent's layer
    ffn: tuple[Tensor, ...]  # neurons of each kept layer
    hidden: Tensor  # channels of the residual stream, the same in all layers


def require_reachable(parent: ModelShape, shape: ModelShape) -> None:
    """Raise unless the parent can be pruned to the shape."""
    for name in ("layers", "d_model", "heads", "kv_heads", "ffn"):
        if getattr(shape, name) > getattr(parent, name):
            raise OptionError(
                f"{name} is {getattr(shape, name)}, the parent has {getattr(parent, name)}; "
                "pruning can only make it smaller"
            )
    # Rotary frequencies and the scale of attention are those of the parent's head width.
    if shape.head_dim != parent.head_dim:
        raise OptionError(f"heads are {shape.head_dim} wide, the parent's {parent.head_dim}; pruning keeps their width")
    # A query head reads the keys of its own group, so a group cannot take in heads of another.
    if shape.heads // shape.kv_heads > parent.heads // parent.kv_heads:
        raise OptionError(
            f"{shape.heads // shape.kv_heads} query heads share a key/value head, in the parent "
            f"{parent.heads // parent.kv_heads}; keep more key/value heads"
        )


def layer_candidates(importance: Importance, keep: int) -> list[tuple[int, ...]]:
    """Return the different sets of `keep` layers that are worth trying."""
    layers = len(importance.layers)
    spread = [round((index + 0.5) * layers / keep - 0.5) for index in range(keep)]
    early = [int((index + 0.25) * layers / keep) for index in range(keep)]  # spread too, each a little earlier
    start = (layers - keep) // 2
    middle = list(range(start, start + keep))
    ends = [*range((keep + 1) // 2), *range(layers - keep // 2, layers)]
    changing_most = importance.layers.topk(keep).indices.tolist()
    candidates = (list(range(keep)), spread, early, middle, ends, changing_most)
    # Rounding may name a layer twice where nearly all are kept; such a set is not one of `keep` layers.
    return list(dict.fromkeys(tuple(sorted(indices)) for indices in candidates if len(set(indices)) == keep))


def choose_parts(parent: ModelShape, shape: ModelShape, importance: Importance, layers: tuple[int, ...]) -> KeptParts:
    """Choose the most important heads, neurons and channels of these layers of a parent."""
    require_reachable(parent, shape)
    groups, heads = [], []
    heads_per_group = shape.heads // shape.kv_heads
    for layer in layers:
        by_group = importance.heads[layer].view(parent.kv_heads, -1)  # [groups, query heads of a group]
        best = by_group.topk(heads_per_group, dim=1)  # heads are ranked within their group
        # A group is worth what the heads are worth that it would keep.
        kept = _top(best.values.sum(1), shape.kv_heads)
        first_heads = torch.arange(parent.kv_heads)[:, None] * by_group.shape[1]
        groups.append(kept)
        heads.append((first_heads + best.indices.sort(1).values)[kept].flatten())
    ffn = tuple(_top(importance.ffn[layer], shape.ffn) for layer in layers)
    return KeptParts(layers, tuple(groups), tuple(heads), ffn, _top(importance.hidden, shape.d_model))


def carve(parent: Decoder, shape: ModelShape, kept: KeptParts) -> Decoder:
    """Make a dense decoder of this shape from the parent's weights at the kept indices."""
    # The first `full_layers` of a sliding-window model attend to the whole context; kept ones among them still do.
    full_layers = sum(layer < parent.shape.full_layers for layer in kept.layers)
    child, state = replace(child_shape(parent.shape, shape), full_layers=full_layers), parent.dense_state()
    carved = {}
    for name in child.layout():
        parts = name.split(".")
        parent_name = name
        if parts[0] == "blocks":
            layer = int(parts[1])
            parent_name = ".".join(["blocks", str(kept.layers[layer]), *parts[2:]])
        rows, columns = _indices(parent.shape, kept, parts)
        tensor = state[parent_name]
        if rows is not None:
            tensor = tensor[rows.to(tensor.device)]
        if columns is not None and tensor.dim() > 1:  # a bias has rows only
            tensor = tensor[:, columns.to(tensor.device)]
        carved[name] = tensor.clone()
    return assemble(child, carved)


def _indices(parent: ModelShape, kept: KeptParts, parts: list[str]) -> tuple[Tensor | None, Tensor | None]:
    """Return which rows (outputs) and columns (inputs) of a parameter stay; None means all."""
    module = parts[-2]
    hidden = None if len(kept.hidden) == parent.d_model else kept.hidden
    if module in ("embed", "head"):
        # Where embeddings have a width of their own, project_in and project_out lie between them and the residual.
        return None, None if parent.embed_dim != parent.d_model else hidden
    if module in ("positions", "project_out"):
        return None, hidden
    if module in ("norm", "attn_norm", "ffn_norm", "project_in"):
        return hidden, None
    layer = int(parts[1])
    if module in ("q_norm", "k_norm"):
        return None, None
    if module == "qkv":
        # Rows: all query heads, then all key heads, then all value heads.
        q, kv = parent.heads * parent.head_dim, parent.kv_heads * parent.head_dim
        keys = _channels(kept.groups[layer], parent.head_dim)
        return torch.cat((_channels(kept.heads[layer], parent.head_dim), q + keys, q + kv + keys)), hidden
    if module == "out":
        return hidden, _channels(kept.heads[layer], parent.head_dim)
    if module == "up":
        neurons = kept.ffn[layer]
        # A gated FFN has its gate in the first half of the rows and the values in the second.
        return torch.cat((neurons, parent.ffn + neurons)) if parent.gated else neurons, hidden
    assert module == "down"
    return hidden, kept.ffn[layer]


def _channels(heads: Tensor, width: int) -> Tensor:
    """Return the indices of the channels of these heads."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _top(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores, ascending."""
    return scores.topk(count).indices.sort().values
