"""The target without some of its parts as its own draft."""

from collections.abc import Collection

from torch import Tensor

from shallowdraft.decoding.drafters.drafter import Drafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.state import State
from shallowdraft.models.cache import KVCache
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.runs.sampling import Sampling


class SkipDrafter(ModelDrafter):
    """The target itself without some of its parts: no second model, and no second KV cache.

    What it writes to the cache for draft tokens, verification overwrites.
    """

    def __init__(
        self,
        target: Decoder,
        skips: Collection[int],
        lookahead: int,
        sampling: Sampling,
        min_confidence: float | None = None,
    ) -> None:
        super().__init__(target.skipping(skips), lookahead, sampling, target.shape.vocab, min_confidence)

    def prefill(self, state: State, cache: KVCache, hidden: Tensor) -> None:
        self.cache = cache

    def _unread(self, state: State, missed: int) -> tuple[Tensor, Tensor]:
        return state.tail(1)  # the target has read all others


def early_exit(layers: int) -> frozenset[int]:
    """Return the parts to skip by default: the second half of the layers."""
    return frozenset(range(2 * -(-layers // 2), 2 * layers))


def create(target: Model, settings: Settings) -> Drafter:
    """Create a drafter that is the target without the parts that the settings name."""
    skips = early_exit(target.shape.layers) if settings.skips is None else settings.skips
    return SkipDrafter(target.decoder, skips, settings.longest_lookahead, settings.sampling, settings.min_confidence)
