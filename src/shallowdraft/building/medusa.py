"""Medusa heads: how they are trained, and how well they guess ahead on held-out text.

Shapes: B rows, T tokens, K heads. A guess's rank is its place among a head's guesses for one token, from 0.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import DOMAIN
from shallowdraft.building.jobs import GuessAhead
from shallowdraft.building.stages import Workshop
from shallowdraft.building.training import Recipe, rows_at_once
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads, fresh_heads
from shallowdraft.models.tree import best_tree, chances

NODES = 16  # of the tree that a figure is given for


def train_heads(
    shop: Workshop, target: Decoder, count: int, recipe: Recipe, objective: str = "forward-kl"
) -> tuple[Heads, dict[str, float]]:
    """So many heads on a target that stays as it is, and what `measure_heads` says of them on its own text, if any."""
    heads = fresh_heads(target, count)
    rows = rows_at_once(target.shape, recipe.sequence, copies=4 * count)
    shop.train("heads", heads, GuessAhead(target, objective), replace(recipe, micro_rows=rows))
    domains = (DOMAIN,) if DOMAIN in shop.store.domains else None
    rows = min(rows, max(1, shop.validation_tokens // recipe.sequence))
    held_out = Batches(shop.store, part="val", rows=rows, sequence=recipe.sequence, seed=0, domains=domains)
    passes = max(1, shop.validation_tokens // (rows * recipe.sequence))
    return heads, measure_heads(heads, target, held_out, shop.count("measuring", passes))


@torch.no_grad()
def measure_heads(heads: Heads, target: Decoder, batches: Batches, turns: Iterable[int]) -> dict[str, float]:
    """Note the heads' chances; how often each one's first guess is right, and tokens an iteration with a tree.

    A batch is read at each of the turns.
    """
    ranks = torch.cat([_ranks(heads, target, torch.from_numpy(batches.next())) for _ in turns])
    heads.chances = chances(ranks)
    tree = best_tree(heads.chances, NODES)
    emitted = iterations = 0
    for row in ranks.tolist():
        at = 0
        while at < len(row):
            kept = tree.accepted_depth(row[at][: tree.depth])
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
