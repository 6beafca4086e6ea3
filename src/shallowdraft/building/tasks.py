"""Training tasks: the loss of a step, and what else the training loop asks for.

Shapes: B batch rows, T tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallowdraft.building import data_parallel
from shallowdraft.building.generated_text import continuations
from shallowdraft.building.losses import OBJECTIVES
from shallowdraft.distributed import rank
from shallowdraft.errors import OptionError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads

IGNORED = -100  # label of tokens that the model, with a shorter vocabulary than its target, does not have

Trainable = TypeVar("Trainable", Decoder, Heads)


class TrainingTask(ABC, Generic[Trainable]):
    """A loss to train a model on, with hooks around every step."""

    learned: nn.Module | None = None
    """Parameters that are trained beside the model's, and saved with them."""
    may_rise: bool = False
    """Whether the loss may rise in a healthy run."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """JSON fields in which two different runs differ; a saved state with others is refused."""

    @abstractmethod
    def loss(self, model: Trainable, tokens: Tensor) -> Tensor:
        """Return the loss [B, T] of predicting each of tokens [B, T + 1] but the first from those before it."""

    def learned_rate(self, steps: int) -> float:
        """Return the learning rate of `learned` in a run of this many steps."""
        return 0.0

    def begin(self, step: int, steps: int) -> None:
        """Prepare for a step."""

    def active(self, model: Trainable) -> AbstractContextManager[None]:
        """Return the context in which the model computes: forward, backward, or when it is measured."""
        return nullcontext()

    def penalty(self) -> Tensor | None:
        """Return a term that is added once to a step's loss."""
        return None

    def end(self) -> dict[str, float]:
        """Finish a step and return figures of it for the metrics."""
        return {}


class Pretraining(TrainingTask[Decoder]):
    """Next-token cross-entropy on a corpus."""

    @property
    def description(self) -> dict[str, Any]:
        return {"job": "pretrain"}

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        return cross_entropy(model.logits(tokens[:, :-1]), tokens)


class Distillation(Pretraining):
    """An objective between the target's distributions and the draft's, or `cross-entropy` on the text itself.

    With `rollout`, that share of the rows ends in text that the draft wrote: it learns from contexts that it leads to.
    """

    def __init__(self, target: Decoder, objective: str = "forward-kl", *, rollout: float = 0.0, seed: int = 0) -> None:
        require_objective(objective, rollout)
        self.target, self.objective, self.rollout, self.seed = target, objective, rollout, seed
        self._step = self._calls = 0

    @property
    def description(self) -> dict[str, Any]:
        return {
            "job": "distil",
            "objective": self.objective,
            "target": str(self.target.shape),
            "rollout": self.rollout,
        }

    def begin(self, step: int, steps: int) -> None:
        self._step, self._calls = step, 0

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        if self.objective == "cross-entropy":
            return super().loss(model, tokens)
        if self.rollout:
            tokens = self._rolled_out(model, tokens)
        draft = model.logits(tokens[:, :-1])
        with torch.no_grad():
            target = self.target.logits(tokens[:, :-1])
        shared = min(target.shape[-1], draft.shape[-1])  # tokens that both vocabularies have
        return OBJECTIVES[self.objective](target[..., :shared], draft[..., :shared])

    def _rolled_out(self, model: Decoder, tokens: Tensor) -> Tensor:
        """Return rows [B, T + 1], some of them, drawn at random, with their second half written by the draft."""
        # From (step, process, micro-batch) alone, so that a resumed run draws the same rows.
        draws = np.random.default_rng([self.seed, self._step, rank(), self._calls])
        self._calls += 1
        chosen = torch.from_numpy(draws.random(len(tokens)) < self.rollout).to(tokens.device)
        whole = data_parallel.gather_model(model)  # by all processes, even where no row was chosen
        if not chosen.any():
            return tokens
        prompt = (tokens.shape[1] + 1) // 2
        seed = int(draws.integers(2**31))
        mixed = tokens.clone()
        mixed[chosen] = continuations(whole, tokens[chosen, :prompt], tokens.shape[1] - prompt, seed=seed)
        return mixed


class HeadTraining(TrainingTask[Heads]):
    """Medusa heads on a frozen target: head k learns the target's distribution k tokens after its next one."""

    def __init__(self, target: Decoder, objective: str = "forward-kl") -> None:
        require_objective(objective, 0.0)
        self.target, self.objective = target.requires_grad_(False), objective

    @property
    def description(self) -> dict[str, Any]:
        return {"job": "heads", "objective": self.objective, "target": str(self.target.shape)}

    def loss(self, model: Heads, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.target.read(tokens[:, :-1])
            target_logits = self.target.head(hidden)  # [B, T, V]
        losses = torch.zeros(hidden.shape[:2], device=tokens.device)
        for ahead, guess in enumerate(model(hidden).unbind(2), 1):
            # The head at token t is compared with the target at t + ahead, so the last `ahead` tokens have no label.
            logits = self.target.head(guess[:, :-ahead])
            if self.objective == "cross-entropy":
                loss = cross_entropy(logits, tokens[:, ahead:])
            else:
                loss = OBJECTIVES[self.objective](target_logits[:, ahead:], logits)
            losses = losses + F.pad(loss, (0, ahead)) / model.shape.count
        return losses


def require_objective(objective: str, rollout: float) -> None:
    """Raise unless there is such an objective and it can learn from rollouts, if there are any."""
    if objective != "cross-entropy" and objective not in OBJECTIVES:
        raise OptionError(f"objective {objective!r} is unknown; use {', '.join([*OBJECTIVES, 'cross-entropy'])}")
    if not 0 <= rollout <= 1:
        raise OptionError(f"rollout is {rollout}; it is a share of the rows, from 0 to 1")
    if rollout and objective == "cross-entropy":
        raise OptionError("cross-entropy learns from given text; rollouts need an objective that asks the target")


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy [B, T] of tokens [B, T + 1] but the first under the logits [B, T, V] before each.

    It is 0 for a token that the model's vocabulary does not have.
    """
    labels = tokens[:, 1:]
    labels = labels.masked_fill(labels >= logits.shape[-1], IGNORED)
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)
