"""Training of Medusa heads, and how well they guess ahead on held-out text.

Shapes: B batch rows, T tokens, C width of the hidden state, K heads. A token's rank under a head is the number of
tokens that the head finds more likely; rank 0 is the head's first guess.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shallowdraft.building.batches import Batches
from shallowdraft.building.generated_text import DOMAIN
from shallowdraft.building.recipe import Recipe, rows_at_once
from shallowdraft.building.tasks import HeadTraining
from shallowdraft.building.trainer import Trainer
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads, fresh_heads
from shallowdraft.models.tree import best_tree, chances
from shallowdraft.progress import Follow, run_silently

NODES = 16  # of the tree for which TAR is measured


def fit_heads(
    trainer: Trainer, target: Decoder, count: int, recipe: Recipe, objective: str = "forward-kl"
) -> tuple[Heads, dict[str, float]]:
    """Train `count` heads on a frozen target; return them and their figures from `measure_heads`.

    They are measured on held-out text that the target wrote, where the store has some.
    """
    heads = fresh_heads(target, count)
    # A step holds the logits of every head beside the target's: logits, log-softmax and gradients of each.
    rows = rows_at_once(target.shape, recipe.sequence, copies=4 * count)
    trainer.train("heads", heads, HeadTraining(target, objective), replace(recipe, micro_rows=rows))
    domains = (DOMAIN,) if DOMAIN in trainer.store.domains else None
    rows = min(rows, max(1, trainer.validation_tokens // recipe.sequence))
    held_out = Batches(trainer.store, part="val", rows=rows, sequence=recipe.sequence, seed=0, domains=domains)
    passes = max(1, trainer.validation_tokens // (rows * recipe.sequence))
    return heads, measure_heads(heads, target, held_out, passes, trainer.follow)


@torch.no_grad()
def measure_heads(
    heads: Heads, target: Decoder, batches: Batches, passes: int, follow: Follow = run_silently
) -> dict[str, float]:
    """Store the heads' chances in them; return how often each first guess is right, and TAR with a tree of `NODES`."""
    by_batch: list[Tensor] = []

    def read_batches() -> Iterator[int]:
        yield 0
        for done in range(1, passes + 1):
            by_batch.append(_ranks(heads, target, torch.from_numpy(batches.next())))
            yield done

    follow("measuring", read_batches(), passes)
    ranks = torch.cat(by_batch)
    heads.chances = chances(ranks)
    tree = best_tree(heads.chances, NODES)
    emitted = iterations = 0
    for row in ranks.tolist():
        position = 0
        while position < len(row):
            accepted = tree.accepted_depth(row[position][: tree.depth])
            emitted, iterations, position = emitted + accepted + 1, iterations + 1, position + accepted + 1
    first_guesses = (ranks == 0).float().mean((0, 1)).tolist()
    matches = {f"match_{head}": share for head, share in enumerate(first_guesses, 1)}
    return matches | {"greedy_tar": emitted / iterations}


def _ranks(heads: Heads, target: Decoder, tokens: Tensor) -> Tensor:
    """Return the rank [B, T - K, K], under the head k + 1, of the target's choice k + 1 tokens after its next one."""
    hidden = target.read(tokens.to(target.device))  # [B, T, C]
    choice = target.head(hidden).argmax(-1)  # [B, T]; the target's next token after each
    length = choice.shape[1] - heads.shape.count
    ranks = []
    for ahead, guess in enumerate(heads(hidden[:, :length]).unbind(2), 1):
        logits = target.head(guess)
        of_choice = logits.gather(2, choice[:, ahead : ahead + length, None])
        ranks.append((logits > of_choice).sum(-1).cpu())
    return torch.stack(ranks, 2)
