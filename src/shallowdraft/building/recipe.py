"""Options of training, and the recipe that follows from them and the model. No torch here."""

import math
from dataclasses import dataclass

from shallowdraft.errors import OptionError
from shallowdraft.shapes.shape import ModelShape

# Float32 copies of a micro-batch's logits that a step holds: both models', their log-softmax, gradients.
LOGITS_COPIES = 6
LOGITS_BYTES = 2**32  # of memory for all copies
MOST_MICRO_ROWS = 64


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    tokens: int
    batch_tokens: int = 16384
    sequence: int = 256
    """Tokens in a sequence."""
    micro_rows: int = 64
    """Sequences in memory at once; the gradients of a batch are accumulated over its micro-batches."""
    learning_rate: float = 1e-3
    """Peak of the learning rate."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    final_rate: float = 0.1
    """Share of the peak to which the learning rate decays, along a cosine."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    seed: int = 0
    save_every: int = 50
    """Steps between two saved states."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "sequence", "micro_rows", "save_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch_tokens < self.sequence:
            raise OptionError(f"a batch of {self.batch_tokens:,} tokens holds no sequence of {self.sequence:,}")
        if not 0 < self.learning_rate < 1:
            raise OptionError(f"learning_rate is {self.learning_rate}; it must be between 0 and 1")

    @property
    def rows(self) -> int:
        """Sequences in a batch."""
        return self.batch_tokens // self.sequence

    @property
    def steps(self) -> int:
        """Batches in a run."""
        return math.ceil(self.tokens / (self.rows * self.sequence))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise, then half a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        # AdamW's second moments are poor estimates in the first steps, where a high rate would scatter the weights.
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """A user's choices about training; the rest of the recipe follows from the model that is trained."""

    tokens: int
    """Tokens to train on."""
    batch_tokens: int = 16384
    """Tokens in a batch."""
    sequence: int = 256
    """Tokens in a sequence."""
    learning_rate: float | None = None
    """Peak of the learning rate. None: what the model's width suggests; `prune` and `distill` try three around it."""
    seed: int = 0
    """Seed of the order of the text, and of fresh weights."""
    compile: bool = False
    """Whether to train through torch.compile."""
    recompute: bool = False
    """Whether to compute activations again in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        Recipe(  # refuses what is out of range
            tokens=self.tokens,
            batch_tokens=self.batch_tokens,
            sequence=self.sequence,
            learning_rate=Recipe.learning_rate if self.learning_rate is None else self.learning_rate,
        )

    @property
    def rows(self) -> int:
        """Sequences in a batch."""
        return self.batch_tokens // self.sequence

    def recipe(self, shape: ModelShape) -> Recipe:
        """Return the recipe to train a model of this shape."""
        return Recipe(
            tokens=self.tokens,
            batch_tokens=self.batch_tokens,
            sequence=self.sequence,
            micro_rows=rows_at_once(shape, self.sequence),
            learning_rate=usual_rate(shape) if self.learning_rate is None else self.learning_rate,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(TrainingOptions):
    """A user's choices about training on a target's distributions."""

    objective: str = "forward-kl"
    """One of `losses.OBJECTIVES`, or cross-entropy."""
    generated: int = 0
    """Tokens that the target writes itself after prompts from the corpus."""
    generated_share: float = 1.0
    """Share of every batch that comes from the target's own text; the rest is from the corpus."""
    rollout: float = 0.0
    """Share of the rows in which the draft writes the second half, which the target scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generated < 0:
            raise OptionError(f"--generated is {self.generated}; it is a number of tokens")
        if not 0 < self.generated_share <= 1:
            raise OptionError(f"--generated-share is {self.generated_share}; it is above 0 and at most 1")


def rows_at_once(shape: ModelShape, sequence: int, copies: int = LOGITS_COPIES) -> int:
    """Return how many sequences fit at once if `copies` float32 copies of their logits take `LOGITS_BYTES` at most."""
    return max(1, min(MOST_MICRO_ROWS, LOGITS_BYTES // (4 * copies * sequence * shape.vocab)))


def usual_rate(shape: ModelShape) -> float:
    """Return a learning rate to start from: wider models need smaller ones."""
    return min(4e-3, max(1e-4, 0.4 / shape.d_model))
