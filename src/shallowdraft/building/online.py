"""Online speculative decoding (Liu et al. 2023): while it serves, a draft learns from what the target corrected.

In every text the positions are kept at which a draft token was first rejected. Between requests the draft learns the
target's distribution at these positions. What is served is a copy, replaced when that is done, in memory and on disk,
in one step each. So the served draft is always a whole one, the old or the new; whatever it proposes, the output is
the target's.

Shapes: B batch rows, T tokens, N corrected positions, C width of the hidden state, V vocabulary.
"""

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from shallowdraft.building.losses import forward_kl
from shallowdraft.decoding.generate import generate
from shallowdraft.decoding.results import Generation
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.files import Count, replacing
from shallowdraft.models.checkpoint import assemble, require_decoder_only
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model, check_vocabulary, int8_by_default, load
from shallowdraft.progress import Follow, run_silently
from shallowdraft.prompts import Prompt, fit_prompt
from shallowdraft.records import Record, Records

CURRENT = "draft"  # a link to the folder that is served, one of VERSIONS
VERSIONS = ("draft-a", "draft-b")
PADDING = 0  # token behind the end of a shorter text; causal attention keeps it out of all others

KIND = "online outputs"
COUNTS = ("emitted", "iterations", "drafted", "accepted")
STRETCHES = 10


@dataclass(frozen=True)
class CorrectedText:
    """A text, and the positions in it at which the target corrected the draft."""

    tokens: list[int]
    corrected: list[int]


@dataclass(frozen=True)
class OnlineOptions:
    """How a draft learns while it serves."""

    memory_tokens: int = 262_144
    """Tokens of text that are remembered; the oldest texts are forgotten first."""
    longest_text: int = 256
    """Tokens that are remembered of a text, its last."""
    batch: int = 8
    """Texts in a step."""
    learning_rate: float = 1e-3
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.memory_tokens, self.batch) < 1 or self.longest_text < 2 or not 0 < self.learning_rate < 1:
            raise OptionError(f"{self}: sizes must be at least 1, the learning rate between 0 and 1")


class OnlineDraft:
    """A draft that is served and learns.

    `draft` is the model to serve; it is replaced, never changed.
    """

    def __init__(self, target: Model, draft: Model, folder: Path, options: OnlineOptions | None = None) -> None:
        """Serve `draft`, which was loaded with trainable=True, and write what it becomes to `folder`."""
        if draft.decoder.packing != "none":
            raise OptionError(f"{draft.name} is packed for decoding; load it with trainable=True")
        check_vocabulary(target, draft).require()
        self.options = options or OnlineOptions()
        self.target, self.folder = target, folder
        self.tokens_learned = self.tokens_seen = 0
        self._learning, self._student = draft, draft.decoder
        self._texts: deque[CorrectedText] = deque()
        self._remembered_tokens = 0
        self._random = np.random.default_rng(self.options.seed)
        self._optimiser = self._new_optimiser()
        self.draft = self._copy_to_serve()

    def _new_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._student.parameters(), lr=self.options.learning_rate, weight_decay=0.0)

    def remember(self, prompt: Sequence[int], result: Generation, lookahead: int) -> None:
        """Remember where draft tokens for this text were rejected."""
        positions = [len(prompt) + position for position in corrections(result, lookahead)]
        self.tokens_seen += len(result.token_ids)
        text = [*prompt, *result.token_ids]
        start = max(0, len(text) - self.options.longest_text)
        # A position is predicted from the tokens before it, of which one at least must be remembered too.
        corrected = [position - start for position in positions if position > start]
        if not corrected:
            return
        self._texts.append(CorrectedText(text[start:], corrected))
        self._remembered_tokens += len(text) - start
        while self._remembered_tokens > self.options.memory_tokens and len(self._texts) > 1:
            self._remembered_tokens -= len(self._texts.popleft().tokens)

    def learn(self, budget: int) -> float:
        """Train on at least `budget` tokens of the remembered texts, then serve the new draft; return the mean loss.

        If this is interrupted or fails, the served draft stays as it was.
        """
        if not self._texts:
            return 0.0
        before = {name: tensor.clone() for name, tensor in self._student.state_dict().items()}
        try:
            loss = self._train(budget)
            served = self._copy_to_serve()
            self._write()
        except BaseException:
            self._student.load_state_dict(before)
            self._student.zero_grad(set_to_none=True)
            self._optimiser = self._new_optimiser()
            raise
        self.draft = served
        return loss

    def _train(self, budget: int) -> float:
        self._student.requires_grad_(True).train()
        tokens_read, losses = 0, []
        while tokens_read < budget:
            batch = min(self.options.batch, len(self._texts))
            chosen = self._random.choice(len(self._texts), batch, replace=False)
            texts = [self._texts[int(index)] for index in chosen]
            loss = self._loss(texts)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._student.parameters(), self.options.clip)
            if not bool((loss.detach() + norm).isfinite()):
                raise TrainingError(f"the loss is {loss.item()}; the draft stays as it was, learn at a smaller rate")
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
            tokens_read += sum(len(text.tokens) for text in texts)
        self._student.requires_grad_(False).eval()
        self.tokens_learned += tokens_read
        return float(np.mean(losses))

    def _loss(self, texts: Sequence[CorrectedText]) -> Tensor:
        """Return KL(p || q), the mean over the corrected positions."""
        longest = max(len(text.tokens) for text in texts)
        padded = [text.tokens + [PADDING] * (longest - len(text.tokens)) for text in texts]
        tokens = torch.tensor(padded, device=self._student.device)  # [B, T]
        rows = torch.tensor([row for row, text in enumerate(texts) for _ in text.corrected])
        # The distribution of the token at a position is read off the token before it.
        positions = torch.tensor([position - 1 for text in texts for position in text.corrected])
        hidden = self._student.read(tokens)[rows, positions]  # [N, C]
        with torch.no_grad():
            p = _target_logits(self.target.decoder, tokens, rows, positions)
        q = self._student.head(hidden)
        shared = min(p.shape[1], q.shape[1])  # tokens that both vocabularies have
        return forward_kl(p[:, :shared], q[:, :shared]).mean()

    def _copy_to_serve(self) -> Model:
        """Return the student with weights of its own, in the format in which `load_draft` would load it."""
        dtype = self._student.dtype if self._student.device.type == "cpu" else self.target.decoder.dtype
        state = {name: tensor.to(dtype, copy=True) for name, tensor in self._student.dense_state().items()}
        decoder = assemble(self._student.shape, state)
        int8 = int8_by_default(decoder.shape, decoder.device)
        return replace(self._learning, decoder=decoder.pack("int8" if int8 else None))

    def _write(self) -> None:
        """Write the student to the folder that is not served, then point the link to it."""
        current = self.folder / CURRENT
        served = current.readlink().name if current.is_symlink() else ""
        new = self.folder / next(name for name in VERSIONS if name != served)
        shutil.rmtree(new, ignore_errors=True)
        self._learning.save(new)
        with replacing(current) as link:
            link.unlink(missing_ok=True)  # of an update that was killed
            link.symlink_to(new.name)


def corrections(result: Generation, lookahead: int) -> list[int]:
    """Return the positions in the new tokens at which the target rejected a draft token and emitted another."""
    positions, position = [], 1  # prefill yields the first token, without a draft
    for accepted in result.accepted_by_iteration:
        if accepted < lookahead and position + accepted < len(result.token_ids):
            positions.append(position + accepted)
        position += accepted + 1
    return positions


def _target_logits(target: Decoder, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return the target's logits [N, V] after the tokens at these rows and positions of texts [B, T]."""
    batch, length = tokens.shape
    all_positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    hidden = target(tokens, all_positions, target.new_cache(batch, length), length)
    logits: Tensor = target.head(hidden[rows, positions])
    return logits


class OnlineOutput(TypedDict):
    """Fields of a line of outputs.jsonl that are read again."""

    set: str
    id: str
    emitted: Count
    iterations: Count
    drafted: Count
    accepted: Count


@dataclass(frozen=True)
class OnlineStretch:
    """Figures of a stretch of consecutive prompts."""

    prompts: int
    """Prompts up to its end."""
    tar: float
    acceptance: float


@dataclass(frozen=True)
class OnlineResult:
    """Result of `learn_online`: where outputs and draft are, and how the acceptance rate rose."""

    outputs: Path
    """File with the text after every prompt."""
    draft: Path | None
    """Folder of the newest draft; None if it has learned nothing."""
    stretches: tuple[OnlineStretch, ...]
    """The prompts in ten stretches, the first to the last."""
    seconds: float


def learn_online(
    *,
    target: str,
    draft: str,
    prompts: Sequence[tuple[str, Prompt]],
    out: str | Path,
    lookahead: int = 4,
    max_new_tokens: int = 64,
    every: int = 8,
    budget: int = 4096,
    learning_rate: float = 1e-3,
    dtype: str | None = None,
    device: str | None = None,
    follow: Follow = run_silently,
) -> OnlineResult:
    """Decode prompts one after the other; after every `every`-th the draft learns where the target corrected it.

    `prompts` come with the name of their set. The draft trains on `budget` tokens each time; 0 means that it does not
    learn. Interrupted, the same call continues with the newest draft and the prompts that are not in OUT/outputs.jsonl.
    """
    if every < 1 or budget < 0:
        raise OptionError("--every is at least 1, --budget at least 0")
    options, folder, begin_s = OnlineOptions(learning_rate=learning_rate), Path(out), time.perf_counter()
    require_decoder_only(target, draft)
    newest = folder / CURRENT
    engine = load(target, dtype, device)
    student = load(str(newest) if newest.exists() else draft, "float32", device, trainable=True)
    online = OnlineDraft(engine, student, folder, options)
    about = {"target": target, "draft": draft, "lookahead": lookahead, "max_new_tokens": max_new_tokens}
    file = Records.open(folder / "outputs.jsonl", KIND, about, OnlineOutput)
    done = {(row["set"], row["id"]) for row in file}
    remaining = [(name, prompt) for name, prompt in prompts if (name, prompt.id) not in done]

    def steps() -> Iterator[int]:
        for number, (name, prompt) in enumerate(remaining, 1):
            ids, cut = fit_prompt(engine, prompt, max_new_tokens)
            result = generate(engine, ids, draft=online.draft, lookahead=lookahead, max_new_tokens=max_new_tokens)
            online.remember(ids, result, lookahead)
            counts = {count: getattr(result.stats, count) for count in COUNTS}
            file.append({"set": name, "id": prompt.id, "cut": cut, "text": result.text} | counts)
            if budget and ((len(done) + number) % every == 0 or number == len(remaining)):
                online.learn(budget)
            yield number

    follow("decoding and learning", steps(), len(remaining))
    learned = newest if newest.exists() else None
    return OnlineResult(file.path, learned, tuple(_stretches(list(file))), time.perf_counter() - begin_s)


def _stretches(rows: Sequence[Record]) -> Iterator[OnlineStretch]:
    """Sum up ten stretches of the prompts, the first to the last."""
    size = max(1, -(-len(rows) // STRETCHES))
    for start in range(0, len(rows), size):
        sums = {name: sum(row[name] for row in rows[start : start + size]) for name in COUNTS}
        tar, acceptance = sums["emitted"] / max(1, sums["iterations"]), sums["accepted"] / max(1, sums["drafted"])
        yield OnlineStretch(min(start + size, len(rows)), tar, acceptance)
