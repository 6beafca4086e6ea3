"""Matrix products with a weight that stays: plain on a GPU and in training, packed by oneDNN for decoding on a CPU.

With few rows a product is bound by reading its weight. MKL, torch's default, reads an unpacked float32 weight at a third of
the memory's speed on the machines we measured; oneDNN reads one in its own blocked layout at full speed
(docs/decisions/001-packed-weights.md). Packing only permutes: `dense()` gives back the very same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 4  # oneDNN's kernels for one to three rows read memory more slowly than the one for four


class Projection(nn.Module):
    """y = x Wᵀ + b."""

    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[:-1].numel()
        if rows >= MIN_ROWS:
            return _packed_product(x, self.weight, self.bias)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, MIN_ROWS - rows))
        return _packed_product(padded, self.weight, self.bias)[:rows].view(*x.shape[:-1], -1)

    def pack(self) -> None:
        """Repack the weight for decoding on this CPU; afterwards it cannot be trained."""
        if can_pack(self.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self.weight = nn.Parameter(packed, requires_grad=False)


def dense(weight: Tensor) -> Tensor:
    """A weight in its ordinary layout, packed or not."""
    return weight.to_dense() if weight.is_mkldnn else weight


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and not weight.is_mkldnn
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product
