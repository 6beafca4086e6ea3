"""What a training run learns: the corpus's own tokens, or a target's distributions."""

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
from shallowdraft.errors import OptionError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.heads import Heads

UNKNOWN = -100  # marks tokens of a target that its draft, with a shorter vocabulary, does not have

Trained = TypeVar("Trained", Decoder, Heads)


class Job(ABC, Generic[Trained]):
    """What the loop asks of a job."""

    learned: nn.Module | None = None
    """What is trained beside the model, and saved with it."""
    may_rise: bool = False
    """Whether a rising loss is part of it."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What makes two runs the same run."""

    @abstractmethod
    def loss(self, model: Trained, tokens: Tensor) -> Tensor:
        """The loss [B, T] of predicting tokens [B, T + 1] from those before them."""

    def learned_rate(self, steps: int) -> float:
        """The learning rate of `learned`."""
        return 0.0

    def begin(self, step: int, steps: int) -> None:
        """Called before each step."""

    def active(self, model: Trained) -> AbstractContextManager[None]:
        """Holds while the model computes: forward, backward, or when it is measured."""
        return nullcontext()

    def penalty(self) -> Tensor | None:
        """Added to a step's loss once."""
        return None

    def end(self) -> dict[str, float]:
        """Called after each step; what to write down about it."""
        return {}


class Pretrain(Job[Decoder]):
    """Next-token cross-entropy on a corpus."""

    @property
    def description(self) -> dict[str, Any]:
        return {"job": "pretrain"}

    def loss(self, model: Decoder, tokens: Tensor) -> Tensor:
        return cross_entropy(model.logits(tokens[:, :-1]), tokens)


class Distil(Pretrain):
    """The target's distributions, by one of the objectives, or the corpus's own tokens with `cross-entropy`.

    With `rollout` that share of the rows ends in the draft's own words: it learns from where it leads itself.
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
        known = min(target.shape[-1], draft.shape[-1])
        return OBJECTIVES[self.objective](target[..., :known], draft[..., :known])

    def _rolled_out(self, model: Decoder, tokens: Tensor) -> Tensor:
        """Rows [B, T + 1], by chance some with their second half written by the draft."""
        draws = np.random.default_rng([self.seed, self._step, data_parallel.rank(), self._calls])
        self._calls += 1
        chosen = torch.from_numpy(draws.random(len(tokens)) < self.rollout).to(tokens.device)
        whole = data_parallel.gathered(model)  # by all processes, even where no row was chosen
        if not chosen.any():
            return tokens
        given = (tokens.shape[1] + 1) // 2
        seed = int(draws.integers(2**31))
        mixed = tokens.clone()
        mixed[chosen] = continuations(whole, tokens[chosen, :given], tokens.shape[1] - given, seed=seed)
        return mixed


class GuessAhead(Job[Heads]):
    """Medusa heads on a frozen target: head k learns what the target will say k tokens after its next one."""

    def __init__(self, target: Decoder, objective: str = "forward-kl") -> None:
        require_objective(objective, 0.0)
        self.target, self.objective = target.requires_grad_(False), objective

    @property
    def description(self) -> dict[str, Any]:
        return {"job": "heads", "objective": self.objective, "target": str(self.target.shape)}

    def loss(self, model: Heads, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.target.read(tokens[:, :-1])
            laws = self.target.head(hidden)
        losses = torch.zeros(hidden.shape[:2], device=tokens.device)
        for ahead, guess in enumerate(model(hidden).unbind(2), 1):
            logits = self.target.head(guess[:, :-ahead])
            if self.objective == "cross-entropy":
                found = cross_entropy(logits, tokens[:, ahead:])
            else:
                found = OBJECTIVES[self.objective](laws[:, ahead:], logits)
            losses = losses + F.pad(found, (0, ahead)) / model.shape.count
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
    """Of tokens [B, T + 1], each against the logits [B, T, V] before it; 0 for a token that the model does not know."""
    wanted = tokens[:, 1:]
    wanted = wanted.masked_fill(wanted >= logits.shape[-1], UNKNOWN)
    losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=UNKNOWN)
    return losses.view(wanted.shape)
