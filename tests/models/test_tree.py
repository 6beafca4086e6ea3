"""Token trees in one pass, against the same continuations one after the other."""

from itertools import combinations, product
from math import prod

import pytest
import torch
from conftest import CONFIGS, PACKINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import KERNEL_KINDS, TOLERANCE, load_packed

import shallowdraft as sd
from shallowdraft.errors import OptionError
from shallowdraft.models.tree import Tree, best_tree, chains

TREE = Tree((0, 0, 0, 1, 1, 2, 3, 4, 8))
WAYS = [(kind, way) for kind in CONFIGS for way in PACKINGS if way != "panels" or kind in KERNEL_KINDS]


def logits_of_paths(model: sd.Model, texts: list[list[int]], nodes: torch.Tensor) -> torch.Tensor:
    """Return the logits after every node of every row, with each path read alone."""
    results = []
    with torch.inference_mode():
        for text, row in zip(texts, nodes.tolist(), strict=True):
            for path in TREE.paths:
                tokens = torch.tensor([[*text, *(row[node - 1] for node in path)]])
                length = tokens.shape[1]
                hidden = model.decoder(tokens, torch.arange(length)[None], model.decoder.new_cache(1, length), length)
                results.append(model.decoder.head(hidden[0, -1]))
    return torch.stack(results).view(len(texts), len(TREE.paths), -1)


@pytest.mark.parametrize(("kind", "packing"), WAYS)
@pytest.mark.parametrize("parts", [[10], [1, 3, 6]], ids=["at once", "level by level"])
def test_every_path_is_as_if_it_were_alone(kind: str, packing: str, parts: list[int], folder):
    model = load_packed(folder(kind), packing)
    draws = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 97, (length,), generator=draws).tolist() for length in (11, 20)]
    nodes = torch.randint(0, 97, (2, 9), generator=draws)
    slots, decoder = 40, model.decoder
    cache, placed = decoder.new_cache(2, slots), TREE.on(torch.device("cpu"))
    base = torch.tensor([len(text) - 1 for text in texts])
    tokens = torch.cat((torch.tensor([[text[-1]] for text in texts]), nodes), 1)
    actual, first = [], 0
    with torch.inference_mode():
        padded = torch.tensor([text + [0] * (20 - len(text)) for text in texts])
        decoder(padded, torch.arange(20).expand(2, -1), cache, 20)
        for count in parts:
            part = placed.part(base, first, first + count)
            hidden = decoder(tokens[:, first : first + count], part.positions, cache, slots, part)
            actual.append(decoder.head(hidden))
            first += count
    assert (torch.cat(actual, 1) - logits_of_paths(model, texts, nodes)).abs().max() < TOLERANCE


def test_shapes_of_trees():
    assert TREE.paths == ((), (1,), (2,), (3,), (1, 4), (1, 5), (2, 6), (3, 7), (1, 4, 8), (1, 4, 8, 9))
    assert TREE.depth == 4
    assert TREE.children[:3] == ((1, 2, 3), (4, 5), (6,))
    assert chains(2, 3).paths == ((), (1,), (2,), (1, 3), (2, 4), (1, 3, 5), (2, 4, 6))
    assert [*map(list, TREE.levels)] == [[0], [1, 2, 3], [4, 5, 6, 7], [8], [9]]
    for wrong in ((), (1,), (0, 2), (-1,), (0,) * 64, (0, 1, 0)):
        with pytest.raises(OptionError, match="tree"):
            Tree(wrong)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    chances=st.lists(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3), min_size=1, max_size=3),
    nodes=st.integers(1, 5),
)
def test_no_other_tree_is_accepted_further(chances: list[list[float]], nodes: int):
    """Compare with every set of paths that is a tree."""
    chances = [sorted(level, reverse=True) for level in chances]
    paths = [
        path for depth in range(1, len(chances) + 1) for path in product(*(range(len(c)) for c in chances[:depth]))
    ]
    gains = {path: prod(chances[depth][rank] for depth, rank in enumerate(path)) for path in paths}
    trees = (
        subset
        for subset in combinations(paths, min(nodes, len(paths)))
        if all(len(path) == 1 or path[:-1] in subset for path in subset)
    )
    best = max(sum(gains[path] for path in tree) for tree in trees)
    tree = best_tree(chances, nodes)
    ranks = {node: children.index(node) for children in tree.children for node in children}
    reached = sum(prod(chances[n][ranks[node]] for n, node in enumerate(path)) for path in tree.paths[1:])
    assert reached == pytest.approx(best)
