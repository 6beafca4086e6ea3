"""The distribution that a token is drawn from, computed from logits, and the draw itself.

Shapes: B rows, V vocabulary, V' a model's own vocabulary, … any leading dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shallowdraft.runs.sampling import Sampling

NUCLEUS_TOKENS = 128  # tokens in which most nuclei lie


class Samplings:
    """How tokens are chosen in each row of a batch.

    Unless all rows are greedy, a greedy row draws from a distribution with all probability on one
    token.
    """

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        self.rows = list(rows)
        self.groups = self._group()
        self.numbers = torch.tensor([row.numbers for row in rows], device=device)
        """[B, 3] The kernels' arguments, always at the same address, which CUDA graphs rely on."""

    @property
    def greedy(self) -> bool:
        return all(row.greedy for row in self.rows)

    def replace_row(self, row: int, sampling: Sampling) -> None:
        """Choose the tokens of a row in another way from now on."""
        self.rows[row] = sampling
        self.groups = self._group()
        self.numbers[row] = torch.tensor(sampling.numbers)

    def _group(self) -> dict[Sampling, list[int]]:
        """Return the rows by how they choose; the seed makes no difference to a distribution."""
        groups: dict[Sampling, list[int]] = {}
        for index, row in enumerate(self.rows):
            groups.setdefault(replace(row, seed=0), []).append(index)
        return groups


def probabilities(logits: Tensor, sampling: Sampling | Samplings) -> Tensor:
    """Compute probabilities [..., V] in float32 from logits [..., V]: temperature, then top-k, then top-p."""
    if isinstance(sampling, Samplings):
        if len(sampling.groups) == 1:
            return probabilities(logits, *sampling.groups)
        p = torch.empty(logits.shape, device=logits.device)
        for shared, rows in sampling.groups.items():
            p[rows] = probabilities(logits[rows], shared)
        return p
    if sampling.greedy:
        best, choice = logits.max(-1, keepdim=True)
        certain = torch.where(best.isfinite(), 1.0, math.nan)  # NaN logits must not look like a distribution
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, choice, certain)
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, -1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -math.inf)
    p = scores.softmax(-1)
    return p if sampling.top_p is None or sampling.top_p >= 1 else _nucleus(p, sampling.top_p)


def draw_from_logits(
    logits: Tensor, sampling: Sampling | Samplings, vocab: int, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a draft's distribution [B, V] from its logits [B, V'], and draw a token [B] at uniform [B].

    Return the distribution, the token and the largest logit [B]. Ids that only one of the two
    vocabularies has are never drawn.
    """
    if logits.is_cuda:
        from shallowdraft.kernels import gpu_choice

        return gpu_choice.distribution(logits, sampling.numbers, vocab, uniform)
    logits = in_vocabulary(logits, vocab)
    p = probabilities(logits, sampling)
    return p, draw(p, uniform), logits.amax(-1)


def in_vocabulary(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad logits [..., V'] to [..., V]; ids that one of the vocabularies lacks are never drawn."""
    missing = vocab - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf) if missing else logits


def without(p: Tensor, token: Tensor) -> Tensor:
    """Remove a token [..., 1] from each distribution [..., V] and normalise; zero if the token had all probability."""
    others = p.scatter(-1, token, 0.0)
    return others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index [B] in proportion to weights [B, V]: invert their cumulative sum at uniform [B] in [0, 1).

    An index of weight 0 is never drawn, however the sum rounds.
    """
    # float64, because over a large vocabulary a float32 sum would lose the unlikely tokens. Setting it to 0 where the
    # weight is 0 makes those indices never exceed the threshold, so that argmax, the first that does, skips them.
    cumulative = weights.cumsum(-1, dtype=torch.float64).masked_fill(weights <= 0, 0.0)
    threshold = uniform * cumulative.amax(-1)
    return (cumulative > threshold[:, None]).to(torch.uint8).argmax(-1)


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until their sum reaches top_p, the one that crosses it included.

    Among equally likely tokens those with smaller ids are kept first.
    """
    likeliest, sums = _likeliest_until(top_p, p)
    kept = ((sums < top_p).sum(-1, keepdim=True) + 1).clamp(max=sums.shape[-1])  # [..., 1] tokens to keep
    smallest = likeliest.gather(-1, kept - 1)  # the smallest probability that stays
    stays = p >= smallest
    # More tokens than `kept` stay only if several are exactly as likely as the last one.
    if not _host_may_read(p) or bool((stays.count_nonzero(-1) > kept[..., 0]).any()):
        ties, ties_kept = p == smallest, kept - (p > smallest).sum(-1, keepdim=True)
        stays &= ~ties | (ties.cumsum(-1, dtype=torch.int32) <= ties_kept)
    p = p.masked_fill(~stays, 0.0)
    return p / p.sum(-1, keepdim=True)


def _likeliest_until(top_p: float, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probabilities in falling order and their running sums, enough of them to reach top_p.

    On a CPU sorting a whole vocabulary takes ten times as long as finding its hundred likeliest
    tokens. On a GPU, where the host must not read how many are needed, all are sorted.
    """
    vocab = p.shape[-1]
    count = min(NUCLEUS_TOKENS, vocab)
    while _host_may_read(p):
        likeliest = p.topk(count, -1).values
        sums = likeliest.cumsum(-1)
        if count == vocab or bool((sums[..., -1] >= top_p).all()):
            return likeliest, sums
        count = min(8 * count, vocab)
    likeliest = p.sort(-1, descending=True).values
    return likeliest, likeliest.cumsum(-1)


def _host_may_read(p: Tensor) -> bool:
    """Tell whether the host may read values: on a GPU it would wait for them."""
    return not p.is_cuda
