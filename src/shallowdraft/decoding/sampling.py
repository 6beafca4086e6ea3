"""From logits to the distribution a token is drawn from, and the draw itself.

Shapes: B rows, V vocabulary, … any leading dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shallowdraft.runs.sampling import Sampling

LIKELY = 128  # tokens in which most nuclei lie


class Samplings:
    """How tokens are chosen in each row of a batch. Where not all rows are greedy, greedy ones draw from a law that has
    one token.
    """

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        self.rows = list(rows)
        self.groups = self._alike()
        self.numbers = torch.tensor([row.numbers for row in rows], device=device)
        """[B, 3] of each row, always in the same place."""

    @property
    def greedy(self) -> bool:
        return all(row.greedy for row in self.rows)

    def put(self, row: int, sampling: Sampling) -> None:
        """Instead of what a row had."""
        self.rows[row] = sampling
        self.groups = self._alike()
        self.numbers[row] = torch.tensor(sampling.numbers)

    def _alike(self) -> dict[Sampling, list[int]]:
        """The rows that choose alike."""
        found: dict[Sampling, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(replace(row, seed=0), []).append(index)
        return found


def probabilities(logits: Tensor, sampling: Sampling | Samplings) -> Tensor:
    """Logits [..., V] -> probabilities [..., V] in float32, after temperature, then top-k, then top-p."""
    if isinstance(sampling, Samplings):
        if len(sampling.groups) == 1:
            return probabilities(logits, *sampling.groups)
        p = torch.empty(logits.shape, device=logits.device)
        for one, rows in sampling.groups.items():
            p[rows] = probabilities(logits[rows], one)
        return p
    if sampling.greedy:
        best, choice = logits.max(-1, keepdim=True)
        certain = torch.where(best.isfinite(), 1.0, math.nan)  # what is no number must not look like a law
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, choice, certain)
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, -1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -math.inf)
    p = scores.softmax(-1)
    return p if sampling.top_p is None or sampling.top_p >= 1 else _nucleus(p, sampling.top_p)


def drawn(logits: Tensor, sampling: Sampling | Samplings, vocab: int, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, V'] -> their law [B, V], a token [B] drawn from it at uniform [B], and the largest logit [B].

    Ids that only one vocabulary has are never drawn.
    """
    if logits.is_cuda:
        from shallowdraft.kernels import gpu_choice

        return gpu_choice.distribution(logits, sampling.numbers, vocab, uniform)
    logits = in_vocabulary(logits, vocab)
    p = probabilities(logits, sampling)
    return p, draw(p, uniform), logits.amax(-1)


def in_vocabulary(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad logits [..., V'] to [..., V]; ids that either lacks are never drawn."""
    missing = vocab - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf) if missing else logits


def without(law: Tensor, token: Tensor) -> Tensor:
    """Laws [..., V] without a token [..., 1] each; zero where it was all."""
    rest = law.scatter(-1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(law.dtype).tiny)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index [B] in proportion to weights [B, V]: invert their cumulative sum at uniform [B] in [0, 1).

    An index of weight 0 is never drawn, however the sum rounds.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64).masked_fill(weights <= 0, 0.0)
    threshold = uniform * cumulative.amax(-1)
    return (cumulative > threshold[:, None]).to(torch.uint8).argmax(-1)


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens, equals in order, until their sum reaches top_p; the one that crosses it stays."""
    likeliest, sums = _until(top_p, p)
    kept = ((sums < top_p).sum(-1, keepdim=True) + 1).clamp(max=sums.shape[-1])
    last = likeliest.gather(-1, kept - 1)
    stays = p >= last
    if not _may_look(p) or bool((stays.count_nonzero(-1) > kept[..., 0]).any()):
        equals, of_equals = p == last, kept - (p > last).sum(-1, keepdim=True)
        stays &= ~equals | (equals.cumsum(-1, dtype=torch.int32) <= of_equals)
    p = p.masked_fill(~stays, 0.0)
    return p / p.sum(-1, keepdim=True)


def _until(top_p: float, p: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of p, falling, and their running sums: as many as it takes, or all where nobody may look.

    On a CPU to sort a vocabulary takes ten times as long as to find its hundred likeliest.
    """
    vocab = p.shape[-1]
    count = min(LIKELY, vocab)
    while _may_look(p):
        likeliest = p.topk(count, -1).values
        sums = likeliest.cumsum(-1)
        if count == vocab or bool((sums[..., -1] >= top_p).all()):
            return likeliest, sums
        count = min(8 * count, vocab)
    likeliest = p.sort(-1, descending=True).values
    return likeliest, likeliest.cumsum(-1)


def _may_look(p: Tensor) -> bool:
    """Whether what is done next may depend on numbers: on a GPU the host would wait for them."""
    return not p.is_cuda
