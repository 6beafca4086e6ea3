"""Traces: a target's output for each prompt, and the log-probability of each of its tokens.

The first line of a trace describes the target and how tokens were chosen; every other line is one output.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from shallowdraft.display.tabular import Cell, Tabular
from shallowdraft.errors import OptionError, RecordError
from shallowdraft.files import Count, Range, from_record, require_fields
from shallowdraft.identity import text_digest
from shallowdraft.limits import LIMITS
from shallowdraft.records import Record, Records
from shallowdraft.runs.sampling import Sampling

KIND = "trace"
ROUNDING = 0.01  # of log-probabilities, which some engines compute in 16 bits

PromptKey = tuple[str, str]
"""Set and id of a prompt."""
OutputKey = tuple[str, str, int]
"""Set and id of a prompt, and the number of the sample."""


@dataclass(frozen=True)
class Output:
    """One prompt and one continuation of it."""

    id: str
    set: str
    sample: int
    prompt: list[int]
    output: list[int]
    """New tokens. The prefill yields the first of them, so no draft proposes it."""
    logprobs: list[float] | None = None
    """Log-probability of each new token, after temperature, top-k and top-p; None for a greedy trace."""
    cut: int = 0
    """Number of tokens that were cut from the left of the prompt."""

    @property
    def key(self) -> OutputKey:
        return self.set, self.id, self.sample

    @property
    def prompt_key(self) -> PromptKey:
        return self.set, self.id

    @property
    def mean_context(self) -> float:
        """Tokens before a new one, on average over the output."""
        return len(self.prompt) + len(self.output) / 2

    @property
    def digest(self) -> str:
        """Digest of prompt and output: another text under the same key is another output."""
        return text_digest(self.prompt, self.output)

    @property
    def stream(self) -> int:
        """The number of its random stream. It depends on the key only, not on other outputs."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.key).encode()).digest()[:16])


class Vocabulary(TypedDict):
    """The properties of a vocabulary that a draft's tokenizer must match."""

    size: Annotated[int, Range(1, LIMITS["vocab"])]
    """Number of token ids."""
    tokens: Count | None
    """Number of ids that have a token; None without a tokenizer."""
    digest: str | None
    """Digest of the map from tokens to ids; None without a tokenizer."""
    added: NotRequired[dict[str, Count]]
    """Tokens that were added to the tokenizer; a draft's may end before them."""


@dataclass(frozen=True, repr=False)
class Trace(Tabular):
    """A target's outputs, and how their tokens were chosen."""

    target: str
    vocabulary: Record
    """The fields of Vocabulary."""
    sampling: Sampling
    outputs: list[Output]
    target_digest: str | None = None
    """Content of the target; None if its weights were not at hand when the trace was written."""

    @property
    def digest(self) -> str:
        """Digest of target and outputs."""
        return text_digest(self.target_digest, [output.digest for output in self.outputs])

    @property
    def sets(self) -> list[str]:
        """Names of the prompt sets, in order."""
        return list(dict.fromkeys(output.set for output in self.outputs))

    @property
    def mean_context(self) -> float:
        """Tokens before a new one, on average over all new tokens."""
        tokens = sum(len(output.output) for output in self.outputs)
        return sum(len(output.output) * output.mean_context for output in self.outputs) / tokens

    @property
    def caption(self) -> str:
        tokens = sum(len(output.output) for output in self.outputs)
        kind = "greedy" if self.sampling.greedy else f"temperature {self.sampling.temperature:g}"
        return f"trace of {self.target}: {len(self.outputs):,} outputs, {tokens:,} new tokens, {kind}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("set", "id", "sample", "prompt tokens", "new tokens")

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        return [(*output.key, len(output.prompt), len(output.output)) for output in self.outputs]

    def to_json(self) -> Record:
        """Return target, vocabulary, sampling and all outputs."""
        return asdict(self)

    def require_target(self, name: str, digest: str | None) -> None:
        """Refuse a model that did not write this trace, as far as the digests are known."""
        if self.target_digest and digest and self.target_digest != digest:
            raise RecordError(
                f"the trace was written by {self.target} (content {self.target_digest}), and {name} is another model "
                f"(content {digest}), or its weights were replaced since; record a trace of it, or name the other"
            )

    def require_greedy(self) -> None:
        """Refuse a sampled trace, where a replay is exact for greedy decoding only."""
        if not self.sampling.greedy:
            raise OptionError("the trace was sampled; here a greedy one is needed (record without --temperature)")


class _About(TypedDict):
    """The description in the first line of a trace."""

    target: str
    vocabulary: Vocabulary
    sampling: Record


def open_trace(
    path: Path,
    target: str,
    target_digest: str | None,
    vocabulary: Record,
    sampling: Sampling,
    settings: Record,
    **origin: Any,
) -> Records:
    """Begin a trace, or go on with one of the same description; `settings` are further fields of it."""
    numbers = {"temperature": 0.0} if sampling.greedy else asdict(sampling)
    about = {"target": target, "target_digest": target_digest, "vocabulary": vocabulary, "sampling": numbers}
    return Records.open(path, KIND, about | settings, Output, **origin)


def append_outputs(file: Records, outputs: Sequence[Output]) -> None:
    """Write outputs to the end of a trace."""
    file.append(*(asdict(output) for output in outputs))


def read_trace(path: Path) -> Trace:
    """Read a trace, and check every token id and log-probability in it."""
    file = Records.read(path, KIND)
    about = file.about
    require_fields(about, _About, f"{path}:1", RecordError)
    sampling = from_record(Sampling, about["sampling"], f"{path}:1", RecordError)
    size = about["vocabulary"]["size"]
    outputs = [_checked_output(where, record, sampling, size) for where, record in file.placed()]
    if not outputs:
        raise RecordError(f"{path}: holds no output; record it again")
    return Trace(about["target"], about["vocabulary"], sampling, outputs, about.get("target_digest"))


def _checked_output(where: str, record: Record, sampling: Sampling, vocab: int) -> Output:
    output = from_record(Output, record, where, RecordError)
    if not output.prompt or not output.output:
        raise RecordError(f"{where}: prompt {output.id} has no tokens; record it again")
    ids = output.prompt + output.output
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RecordError(f"{where}: token id {wrong} is not in the target's vocabulary of {vocab:,}; record it again")
    if sampling.greedy:
        return output
    if output.logprobs is None or len(output.logprobs) != len(output.output):
        raise RecordError(f"{where}: prompt {output.id} lacks log-probabilities, which acceptance is computed from")
    if max(output.logprobs) > ROUNDING:
        raise RecordError(f"{where}: a log-probability is {max(output.logprobs)}; none is above 0, record it again")
    return output
