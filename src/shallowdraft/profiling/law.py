"""A law for the latency of one draft step, fitted to shapes that were timed with random weights.

    step = fixed + layers * per_layer + weight bytes * per_byte + cached bytes attended to * per_attended_byte

All coefficients are at least 0; the fit minimises relative errors, and says how large they are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from shallowdraft.errors import RecordError
from shallowdraft.shapes import ModelShape


@dataclass(frozen=True)
class Observation:
    """One draft step of a shape."""

    shape: ModelShape
    context: float
    seconds: float


@dataclass(frozen=True)
class LatencyLaw:
    """Seconds by what causes them."""

    fixed_s: float
    layer_s: float
    byte_s: float
    attended_byte_s: float
    dtype: str
    residuals: tuple[float, ...] = ()
    """Relative error on every observation."""

    def step_s(self, shape: ModelShape, context: float) -> float:
        causes = _causes(shape, context, self.dtype)
        return float(np.dot((self.fixed_s, self.layer_s, self.byte_s, self.attended_byte_s), causes))

    @property
    def typical_error(self) -> float:
        return median(abs(error) for error in self.residuals)

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.residuals)


def fit(observations: Sequence[Observation], dtype: str) -> LatencyLaw:
    from scipy.optimize import nnls

    if len(observations) < 5:
        raise RecordError(f"{len(observations)} shapes were timed; a law needs 5, with different depths and widths")
    causes = np.array([_causes(one.shape, one.context, dtype) for one in observations])
    seconds = np.array([one.seconds for one in observations])
    scale = causes.max(0)
    found, _ = nnls(causes / scale / seconds[:, None], np.ones(len(seconds)))
    fixed_s, layer_s, byte_s, attended_byte_s = (found / scale).tolist()
    law = LatencyLaw(fixed_s, layer_s, byte_s, attended_byte_s, dtype)
    errors = tuple(law.step_s(one.shape, one.context) / one.seconds - 1 for one in observations)
    return replace(law, residuals=errors)


def _causes(shape: ModelShape, context: float, dtype: str) -> tuple[float, float, float, float]:
    return 1.0, shape.layers, shape.pass_bytes(dtype), context * shape.kv_bytes_per_token(dtype)


def trial_shapes(parent: ModelShape) -> list[ModelShape]:
    """Depths at fixed width, widths at fixed depth, and both at once, as the paper's Figure 4 has them."""

    def narrower(layers: int, share: float) -> ModelShape:
        heads = max(1, round(share * parent.heads))
        kv_heads = heads if parent.kv_heads == parent.heads else max(1, round(share * parent.kv_heads))
        heads = -(-heads // kv_heads) * kv_heads
        width = max(2, round(share * parent.d_model / 32) * 32) if parent.d_model >= 64 else parent.d_model
        embed = 0 if parent.embed_dim == parent.d_model else parent.embed_dim
        return replace(
            parent,
            layers=layers,
            d_model=width,
            heads=heads,
            kv_heads=kv_heads,
            ffn=max(8, round(share * parent.ffn / 8) * 8),
            embed_dim=embed,
            full_layers=min(layers, parent.full_layers),
        )

    depths = [layers for layers in (1, 2, 4, 8) if layers <= parent.layers]
    shares = (1.0, 0.75, 0.5, 0.375)
    return list(dict.fromkeys(narrower(layers, share) for layers in depths for share in shares))
