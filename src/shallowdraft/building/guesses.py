"""How well Medusa heads guess ahead, on held-out text.

Shapes: B rows, T tokens, K heads. A guess's rank is its place among a head's guesses for one token, from 0.
"""

import torch
from torch import Tensor

from shallowdraft.building.corpus import Batches
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads
from shallowdraft.models.tree import best_tree, chances

NODES = 16  # of the tree that a figure is given for


@torch.no_grad()
def measure_heads(heads: Heads, target: Decoder, batches: Batches, count: int) -> dict[str, float]:
    """Note the heads' chances; how often each one's first guess is right, and tokens an iteration with a tree."""
    ranks = torch.cat([_ranks(heads, target, torch.from_numpy(batches.next())) for _ in range(count)])
    heads.chances = chances(ranks)
    tree = best_tree(heads.chances, NODES)
    emitted = iterations = 0
    for row in ranks.tolist():
        at = 0
        while at < len(row):
            kept = tree.followed(row[at][: tree.depth])
            emitted, iterations, at = emitted + kept + 1, iterations + 1, at + kept + 1
    first = (ranks == 0).float().mean((0, 1)).tolist()
    return {f"match_{head}": match for head, match in enumerate(first, 1)} | {"greedy_tar": emitted / iterations}


def _ranks(heads: Heads, target: Decoder, tokens: Tensor) -> Tensor:
    """Of what the target says after each token, and up to K tokens later, among the heads' guesses there [B, T, K]."""
    hidden = target.read(tokens.to(target.device))
    choice = target.head(hidden).argmax(-1)
    length = choice.shape[1] - heads.shape.count
    found = []
    for ahead, guess in enumerate(heads(hidden[:, :length]).unbind(2), 1):
        logits = target.head(guess)
        wanted = logits.gather(2, choice[:, ahead : ahead + length, None])
        found.append((logits > wanted).sum(-1).cpu())
    return torch.stack(found, 2)
