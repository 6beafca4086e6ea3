"""Traces: what a target wrote after each prompt, and how likely each of its tokens was."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from shallowdraft.decoding.generate import BatchRun
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.sampling import Sampling, probabilities
from shallowdraft.errors import NumericsError, OptionError, PromptError, RecordError, VocabularyError
from shallowdraft.files import Count, Range, make, require_fields
from shallowdraft.identity import text_digest
from shallowdraft.limits import LIMITS
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.model import Model
from shallowdraft.models.vocabulary import say_sizes_only, vocabulary_of, why_sizes_only
from shallowdraft.prompts import Prompt
from shallowdraft.records import Record, Records

KIND = "trace"
CHUNK = 512  # tokens of a teacher-forced pass
ROUNDING = 0.01  # of log-probabilities, which some engines know in 16 bits


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

    @property
    def digest(self) -> str:
        """Of what was read and written: another text under the same key is another output."""
        return text_digest(self.prompt, self.output)

    @property
    def stream(self) -> int:
        """The number of its random stream, which follows from its key alone: not from what is recorded beside it."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.key).encode()).digest()[:16])


@dataclass(frozen=True)
class Trace:
    """A target's outputs, and the law they were drawn from."""

    target: str
    vocabulary: Record
    sampling: Sampling
    outputs: list[Output]
    target_digest: str | None = None
    """Content of the target; None where it was recorded elsewhere."""

    @property
    def digest(self) -> str:
        """Content of target and outputs."""
        return text_digest(self.target_digest, [output.digest for output in self.outputs])

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

    def require_target(self, name: str, digest: str | None) -> None:
        """Refuse another model than the one that wrote this; what was recorded elsewhere is taken at its word."""
        if self.target_digest and digest and self.target_digest != digest:
            raise RecordError(
                f"the trace was written by {self.target} (content {self.target_digest}), and {name} is another model "
                f"(content {digest}), or its weights were replaced since; record a trace of it, or name the other"
            )


def require_greedy(trace: Trace) -> None:
    """For what is known exactly of greedy decoding alone."""
    if not trace.sampling.greedy:
        raise OptionError("the trace was sampled; here a greedy one is needed (record without --temperature)")


def read_trace(path: Path) -> Trace:
    file = Records.read(path, KIND)
    require_fields(file.about, _About, f"{path}:1", RecordError)
    sampling = make(Sampling, file.about["sampling"], f"{path}:1", RecordError)
    size = file.about["vocabulary"]["size"]
    outputs = [_output(where, record, sampling, size) for where, record in file.placed()]
    if not outputs:
        raise RecordError(f"{path}: holds no output; record it again")
    about = file.about
    return Trace(about["target"], about["vocabulary"], sampling, outputs, about.get("target_digest"))


class _Vocabulary(TypedDict):
    size: Annotated[int, Range(1, LIMITS["vocab"])]
    tokens: Count | None
    digest: str | None
    added: NotRequired[dict[str, Count]]


class _About(TypedDict):
    """What the first line of a trace says."""

    target: str
    vocabulary: _Vocabulary
    sampling: Record


def _output(where: str, record: Record, sampling: Sampling, vocab: int) -> Output:
    output = make(Output, record, where, RecordError)
    if not output.prompt or not output.output:
        raise RecordError(f"{where}: prompt {output.id} has no tokens; record it again")
    ids = output.prompt + output.output
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RecordError(f"{where}: token id {wrong} is not in the target's vocabulary of {vocab:,}; record it again")
    if sampling.greedy:
        return output
    if output.logprobs is None or len(output.logprobs) != len(output.output):
        raise RecordError(f"{where}: prompt {output.id} lacks log-probabilities, without which no acceptance is known")
    if max(output.logprobs) > ROUNDING:
        raise RecordError(f"{where}: a log-probability is {max(output.logprobs)}; none is above 0, record it again")
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
    Each output draws from a random stream of its own: what it is depends neither on `batch` nor on the other outputs.
    """
    law = {name: value for name, value in asdict(sampling).items() if not sampling.greedy or name == "temperature"}
    about = {
        "target": target.name,
        "target_digest": target.digest,
        "dtype": target.precision,
        "vocabulary": vocabulary(target.tokenizer, target.shape.vocab),
        "sampling": law,
        "max_new_tokens": max_new_tokens,
        "chat": chat,
    }
    file = Records.open(path, KIND, about, Output, device=str(target.device))
    done = {(row["set"], row["id"], row["sample"]): row["prompt"] for row in file}
    wanted = []
    for name, prompt in prompts:
        ids, cut = fitted(target, prompt, max_new_tokens, chat=chat)
        for sample in range(samples):
            if done.get((name, prompt.id, sample), ids) != ids:
                raise RecordError(
                    f"{path} was begun with another text of prompt {prompt.id} of {name}, or another tokenizer; "
                    "name another file or folder, or remove it"
                )
            if (name, prompt.id, sample) not in done:
                wanted.append(Output(prompt.id, name, sample, ids, [], None, cut))
    total = len(prompts) * samples
    yield total - len(wanted)
    for start in range(0, len(wanted), batch):
        rows = wanted[start : start + batch]
        for output in _continue(target, rows, max_new_tokens, sampling):
            file.append(asdict(output))
        yield total - len(wanted) + start + len(rows)


def fitted(target: Model, prompt: Prompt, room: int, *, chat: bool = False) -> tuple[list[int], int]:
    """The prompt's tokens, cut from the left so that there is room for so many new ones; how many were cut."""
    ids = target.encode_chat(prompt.turn) if chat else list(prompt.ids) or target.encode(prompt.text)
    longest = target.shape.context - room
    if longest < 1:
        raise PromptError(f"{target.name} has a context of {target.shape.context:,}, too short for {room:,} new tokens")
    if not ids:
        raise PromptError(f"prompt {prompt.id} has no tokens; remove it from its set")
    return ids[-longest:], max(0, len(ids) - longest)


def _continue(target: Model, rows: list[Output], max_new_tokens: int, sampling: Sampling) -> Iterator[Output]:
    streams = [row.stream for row in rows]
    settings = Settings(max_new_tokens=max_new_tokens, **asdict(sampling), streams=streams)
    results = BatchRun(target, [row.prompt for row in rows], settings).finish()
    for row, result in zip(rows, results, strict=True):
        written = replace(row, output=result.token_ids)
        if not sampling.greedy:
            p = torch.cat(list(_likelihoods(target, written, sampling)))
            written = replace(written, logprobs=p.log().tolist())
        yield written


@torch.inference_mode()
def predictions(model: Model, output: Output, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One teacher-forced pass: logits [T, V] for the output's tokens from the `first` on, and these tokens [T].

    A model whose logits are no numbers is an error, as it is for the engine.
    """
    for hidden, tokens in hidden_states(model.decoder, output, first=first):
        logits = model.decoder.head(hidden)
        require_numbers(logits.amax(-1), model.name)
        yield logits, tokens


def require_numbers(largest: Tensor, models: str) -> None:
    """Refuse models of which some largest logit is NaN or infinite; this waits for the device."""
    if not bool(largest.isfinite().all()):
        raise NumericsError.of(models)


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
    for logits, tokens in predictions(target, output, first=0):
        yield probabilities(logits, sampling).gather(1, tokens[:, None]).squeeze(1)


def vocabulary(tokenizer: Any | None, size: int) -> Record:
    """What a draft's tokenizer must be: the target's number of ids, how many have a token, the map's digest.

    Tokens that were added to the target's are named, as a draft may do without those at the end.
    """
    names = vocabulary_of(tokenizer)
    added = {} if tokenizer is None else dict(tokenizer.get_added_vocab())
    return {"size": size, "tokens": len(names) if names else None, "digest": _digest(names, None), "added": added}


def fits(recorded: Record, draft: Model) -> bool:
    """Whether a draft's tokens are those recorded; either may have more at the end."""
    names = vocabulary_of(draft.tokenizer)
    if names is None or recorded["digest"] is None:
        return bool(draft.shape.vocab == recorded["size"])
    end = max(names.values(), default=-1)
    beyond = {name: index for name, index in recorded.get("added", {}).items() if index > end}
    return bool(_digest(names | beyond, recorded["tokens"]) == recorded["digest"])


def _digest(names: dict[str, int] | None, limit: Any) -> str | None:
    if names is None:
        return None
    kept = sorted((index, token) for token, index in names.items() if limit is None or index < limit)
    return hashlib.sha256(repr(kept).encode()).hexdigest()
