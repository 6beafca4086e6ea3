"""Traces: what a target wrote after each prompt, and how likely each of its tokens was."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft.decoding.generation import generate
from shallowdraft.decoding.sampling import Sampling, probabilities
from shallowdraft.errors import OptionError, PromptError, RecordError, VocabularyError
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.models.vocabulary import say_sizes_only, vocabulary_of, why_sizes_only
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records

KIND = "trace"
CHUNK = 512  # tokens of a teacher-forced pass


@dataclass(frozen=True)
class Output:
    """One prompt and one continuation of it."""

    id: str
    set: str
    sample: int
    prompt: list[int]
    output: list[int]
    """New tokens; the first is what prefill yields, no draft is asked for it."""
    logprobs: list[float] | None = None
    """Of each new token, after temperature, top-k and top-p; None for a greedy trace."""
    cut: int = 0
    """Tokens that were cut from the prompt's left."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.set, self.id, self.sample


@dataclass(frozen=True)
class Trace:
    """A target's outputs, and the law they were drawn from."""

    target: str
    vocabulary: Record
    sampling: Sampling
    outputs: list[Output]

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(output.set for output in self.outputs))

    @property
    def mean_context(self) -> float:
        """Tokens before a new one, on average over all of them."""
        tokens = sum(len(output.output) for output in self.outputs)
        return sum(len(one.output) * (len(one.prompt) + len(one.output) / 2) for one in self.outputs) / tokens

    def require_vocabulary(self, draft: Model) -> None:
        """Refuse a draft whose tokens are not those of the trace."""
        if fits(self.vocabulary, draft):
            if reason := why_sizes_only(self.vocabulary["digest"], draft.tokenizer):
                say_sizes_only(self.target, draft.name, reason)
            return
        raise VocabularyError(
            f"{draft.name} does not have the tokenizer of {self.target}, whose trace this is; "
            "use a draft with the target's tokenizer"
        )


def require_greedy(trace: Trace) -> None:
    """For what is known exactly of greedy decoding alone."""
    if not trace.sampling.greedy:
        raise OptionError("the trace was sampled; here a greedy one is needed (record without --temperature)")


def read_trace(path: Path) -> Trace:
    file = Records.read(path, KIND)
    sampling = Sampling(**file.about["sampling"])
    outputs = [_output(path, record, sampling) for record in file]
    if not outputs:
        raise RecordError(f"{path}: holds no output; record it again")
    return Trace(file.about["target"], file.about["vocabulary"], sampling, outputs)


def _output(path: Path, record: Record, sampling: Sampling) -> Output:
    output = Output(**record)
    if not output.prompt or not output.output:
        raise RecordError(f"{path}: prompt {output.id} has no tokens; record it again")
    if not sampling.greedy and (output.logprobs is None or not all(map(isfinite, output.logprobs))):
        raise RecordError(f"{path}: prompt {output.id} lacks log-probabilities, without which no acceptance is known")
    return output


def record(
    target: Model,
    prompts: Sequence[tuple[str, Prompt]],
    path: Path,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    samples: int = 1,
    batch: int = 8,
    chat: bool = False,
) -> Iterator[int]:
    """Write a trace of prompts (each with the name of its set); yields how many outputs are done.

    What is there already is not done again. A prompt that leaves no room for `max_new_tokens` is cut from the left.
    """
    law = {name: value for name, value in asdict(sampling).items() if not sampling.greedy or name == "temperature"}
    about = {
        "target": target.name,
        "vocabulary": vocabulary(target.tokenizer, target.shape.vocab),
        "sampling": law,
        "max_new_tokens": max_new_tokens,
        "chat": chat,
    }
    file = Records.open(path, KIND, about, device=str(target.device), dtype=str(target.decoder.dtype))
    done = {(row["set"], row["id"], row["sample"]) for row in file}
    wanted = [
        Output(prompt.id, name, sample, ids, [], None, cut)
        for name, prompt in prompts
        for sample in range(samples)
        if (name, prompt.id, sample) not in done
        for ids, cut in [fitted(target, prompt, max_new_tokens, chat=chat)]
    ]
    total = len(prompts) * samples
    yield total - len(wanted)
    for start in range(0, len(wanted), batch):
        rows = wanted[start : start + batch]
        for output in _continue(target, rows, max_new_tokens, sampling, start):
            file.append(asdict(output))
        yield total - len(wanted) + start + len(rows)


def fitted(target: Model, prompt: Prompt, room: int, *, chat: bool = False) -> tuple[list[int], int]:
    """The prompt's tokens, cut from the left so that there is room for so many new ones; how many were cut."""
    ids = target.encode_chat([{"role": "user", "content": prompt.text}]) if chat else target.encode(prompt.text)
    longest = target.shape.context - room
    if longest < 1:
        raise PromptError(f"{target.name} has a context of {target.shape.context:,}, too short for {room:,} new tokens")
    if not ids:
        raise PromptError(f"prompt {prompt.id} has no tokens; remove it from its set")
    return ids[-longest:], max(0, len(ids) - longest)


def _continue(
    target: Model, rows: list[Output], max_new_tokens: int, sampling: Sampling, number: int
) -> Iterator[Output]:
    found = generate(
        target,
        [row.prompt for row in rows],
        max_new_tokens=max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed + number,
    )
    for row, made in zip(rows, found, strict=True):
        written = Output(**(asdict(row) | {"output": made.token_ids}))
        if not sampling.greedy:
            p = torch.cat(list(_likelihoods(target, written, sampling)))
            written = Output(**(asdict(written) | {"logprobs": p.log().tolist()}))
        yield written


@torch.inference_mode()
def predictions(decoder: Decoder, output: Output, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One teacher-forced pass: logits [T, V] for the output's tokens from the `first` on, and these tokens [T]."""
    for hidden, tokens in hidden_states(decoder, output, first=first):
        yield decoder.head(hidden), tokens


@torch.inference_mode()
def hidden_states(decoder: Decoder, output: Output, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One teacher-forced pass: hidden states [T, C] before the output's tokens from the `first` on, and these [T].

    In chunks; it ends where the model's context does.
    """
    ids = torch.tensor(output.prompt + output.output, device=decoder.device)
    length = min(len(ids) - 1, decoder.shape.context)
    cache = decoder.new_cache(1, length)
    behind = len(output.prompt) - 1 + first
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        positions = torch.arange(start, stop, device=decoder.device)[None]
        hidden = decoder(ids[None, start:stop], positions, cache, stop)[0]
        skip = max(0, behind - start)
        if skip < stop - start:
            yield hidden[skip:], ids[start + skip + 1 : stop + 1]


def _likelihoods(target: Model, output: Output, sampling: Sampling) -> Iterator[Tensor]:
    for logits, tokens in predictions(target.decoder, output, first=0):
        yield probabilities(logits, sampling).gather(1, tokens[:, None]).squeeze(1)


def vocabulary(tokenizer: Any | None, size: int) -> Record:
    """What a draft's tokenizer must be: the target's number of ids, how many have a token, the map's digest."""
    names = vocabulary_of(tokenizer)
    return {"size": size, "tokens": len(names) if names else None, "digest": _digest(names, None)}


def fits(recorded: Record, draft: Model) -> bool:
    """Whether a draft's tokens are those recorded, tokens added at the end aside."""
    names = vocabulary_of(draft.tokenizer)
    if names is None or recorded["digest"] is None:
        return bool(draft.shape.vocab == recorded["size"])
    return bool(_digest(names, recorded["tokens"]) == recorded["digest"])


def _digest(names: dict[str, int] | None, limit: Any) -> str | None:
    if names is None:
        return None
    kept = sorted((index, token) for token, index in names.items() if limit is None or index < limit)
    return hashlib.sha256(repr(kept).encode()).hexdigest()
