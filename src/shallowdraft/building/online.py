"""Online speculative decoding (Liu et al. 2023): while it serves, a draft learns from what the target corrected.

Of every text the places are kept where a proposal was first refused. Between requests the draft learns the target's law
at these places; what is served is a copy, replaced when that is done, in memory and on disk, in one step each. So what
is served is the old draft or the new one, whole, and whatever it proposes, the output is the target's.

Shapes: B rows, T tokens, V vocabulary.
"""

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shallowdraft.building.losses import forward_kl
from shallowdraft.decoding.results import Generation
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, check_vocabulary, int8_by_default

CURRENT = "draft"  # a link to the one of the folders that is served
VERSIONS = ("draft-a", "draft-b")
IGNORED = 0  # stands behind the end of a shorter text


@dataclass(frozen=True)
class Lesson:
    """A text, and the places of it that were corrected."""

    tokens: list[int]
    corrected: list[int]


@dataclass(frozen=True)
class Habits:
    """How a draft learns while it serves."""

    room: int = 262_144
    """Tokens of text that are remembered; the oldest are forgotten first."""
    longest: int = 256
    """Tokens of a text that are remembered, its last."""
    batch: int = 8
    """Texts of a step."""
    learning_rate: float = 1e-3
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.room, self.batch) < 1 or self.longest < 2 or not 0 < self.learning_rate < 1:
            raise OptionError(f"{self}: sizes must be at least 1, the learning rate between 0 and 1")


class OnlineDraft:
    """A draft that is served and learns."""

    def __init__(self, target: Model, draft: Model, folder: Path, habits: Habits | None = None) -> None:
        """`draft` as it was loaded to be trained; `folder` for what becomes of it."""
        if draft.decoder.packing != "none":
            raise OptionError(f"{draft.name} is packed for decoding; load it with trainable=True")
        check_vocabulary(target, draft).require()
        self.habits = habits or Habits()
        self.target, self.folder = target, folder
        self.learned = self.seen = 0
        self._learning, self._pupil = draft, draft.decoder
        self._lessons: deque[Lesson] = deque()
        self._remembered = 0
        self._draws = np.random.default_rng(self.habits.seed)
        self._optimiser = self._new_optimiser()
        self.draft = self._served()

    def _new_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._pupil.parameters(), lr=self.habits.learning_rate, weight_decay=0.0)

    def see(self, prompt: Sequence[int], made: Generation, lookahead: int) -> None:
        """Remember where proposals for this text were refused."""
        places = [len(prompt) + place for place in corrections(made, lookahead)]
        self.seen += len(made.token_ids)
        text = [*prompt, *made.token_ids]
        cut = max(0, len(text) - self.habits.longest)
        kept = [place - cut for place in places if place > cut]
        if not kept:
            return
        self._lessons.append(Lesson(text[cut:], kept))
        self._remembered += len(text) - cut
        while self._remembered > self.habits.room and len(self._lessons) > 1:
            self._remembered -= len(self._lessons.popleft().tokens)

    def learn(self, budget: int) -> float:
        """Read so many tokens of what is remembered, then serve what was learned; the mean loss.

        Nothing changes for those served if it is interrupted or fails.
        """
        if not self._lessons:
            return 0.0
        before = {name: tensor.clone() for name, tensor in self._pupil.state_dict().items()}
        try:
            loss = self._read(budget)
            served = self._served()
            self._write()
        except BaseException:
            self._pupil.load_state_dict(before)
            self._pupil.zero_grad(set_to_none=True)
            self._optimiser = self._new_optimiser()
            raise
        self.draft = served
        return loss

    def _read(self, budget: int) -> float:
        self._pupil.requires_grad_(True).train()
        read, losses = 0, []
        while read < budget:
            chosen = self._draws.choice(len(self._lessons), min(self.habits.batch, len(self._lessons)), replace=False)
            lessons = [self._lessons[int(one)] for one in chosen]
            loss = self._loss(lessons)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._pupil.parameters(), self.habits.clip)
            if not bool((loss.detach() + norm).isfinite()):
                raise TrainingError(f"the loss is {loss.item()}; the draft stays as it was, learn at a smaller rate")
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
            read += sum(len(lesson.tokens) for lesson in lessons)
        self._pupil.requires_grad_(False).eval()
        self.learned += read
        return float(np.mean(losses))

    def _loss(self, lessons: Sequence[Lesson]) -> Tensor:
        """KL(p || q), the mean over the corrected places."""
        longest = max(len(lesson.tokens) for lesson in lessons)
        rows = [lesson.tokens + [IGNORED] * (longest - len(lesson.tokens)) for lesson in lessons]
        tokens = torch.tensor(rows, device=self._pupil.device)
        row = torch.tensor([at for at, lesson in enumerate(lessons) for _ in lesson.corrected])
        place = torch.tensor([place - 1 for lesson in lessons for place in lesson.corrected])
        hidden = self._pupil.read(tokens)[row, place]
        with torch.no_grad():
            p = _laws(self.target.decoder, tokens, row, place)
        q = self._pupil.head(hidden)
        known = min(p.shape[1], q.shape[1])
        return forward_kl(p[:, :known], q[:, :known]).mean()

    def _served(self) -> Model:
        """What was learned so far, in weights of its own, as `load_draft` would have it."""
        dtype = self._pupil.dtype if self._pupil.device.type == "cpu" else self.target.decoder.dtype
        state = {name: tensor.to(dtype, copy=True) for name, tensor in self._pupil.dense_state().items()}
        decoder = assemble(self._pupil.shape, state)
        small = int8_by_default(decoder.shape, decoder.device)
        return replace(self._learning, decoder=decoder.pack("int8" if small else None))

    def _write(self) -> None:
        """Into the one of two folders that is not served, then a link to it that is replaced whole."""
        current = self.folder / CURRENT
        served = current.readlink().name if current.is_symlink() else ""
        new = self.folder / next(name for name in VERSIONS if name != served)
        shutil.rmtree(new, ignore_errors=True)
        self._learning.save(new)
        link = self.folder / f"{CURRENT}.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(new.name)
        link.replace(current)


def corrections(made: Generation, lookahead: int) -> list[int]:
    """Places in the new tokens where the target refused a proposal and said something else."""
    found, at = [], 1  # prefill yields the first
    for kept in made.accepted_by_iteration:
        if kept < lookahead and at + kept < len(made.token_ids):
            found.append(at + kept)
        at += kept + 1
    return found


def _laws(target: Decoder, tokens: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """The target's logits [N, V] behind these places of texts [B, T]."""
    rows, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(rows, -1)
    hidden = target(tokens, positions, target.new_cache(rows, length), length)
    found: Tensor = target.head(hidden[row, place])
    return found
