"""Recording: let the target continue every prompt, and write its outputs as a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from shallowdraft.decoding.generate import BatchRun
from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.sampling import probabilities
from shallowdraft.errors import RecordError
from shallowdraft.models.model import Model
from shallowdraft.prompts import Prompt, fit_prompt
from shallowdraft.replaying.teacher_forcing import predictions
from shallowdraft.replaying.vocabulary import vocabulary
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, append_outputs, open_trace


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
    """Write a trace of prompts, each with the name of its set, and yield how many outputs are done.

    Outputs that the file has already are not written again. A prompt that leaves no room for `max_new_tokens` is cut
    from the left. Each output draws from a random stream of its own, so it depends neither on `batch` nor on the other
    outputs.
    """
    file = open_trace(
        path,
        target.name,
        target.digest,
        vocabulary(target.tokenizer, target.shape.vocab),
        sampling,
        {"dtype": target.precision, "max_new_tokens": max_new_tokens, "chat": chat},
        device=str(target.device),
    )
    recorded = {(row["set"], row["id"], row["sample"]): row["prompt"] for row in file}
    missing = []
    for set_name, prompt in prompts:
        ids, cut = fit_prompt(target, prompt, max_new_tokens, chat=chat)
        for sample in range(samples):
            if recorded.get((set_name, prompt.id, sample), ids) != ids:
                raise RecordError(
                    f"{path} was begun with another text of prompt {prompt.id} of {set_name}, or another tokenizer; "
                    "name another file or folder, or remove it"
                )
            if (set_name, prompt.id, sample) not in recorded:
                missing.append(Output(prompt.id, set_name, sample, ids, [], None, cut))
    total = len(prompts) * samples
    yield total - len(missing)
    for start in range(0, len(missing), batch):
        rows = missing[start : start + batch]
        append_outputs(file, list(_continued(target, rows, max_new_tokens, sampling)))
        yield total - len(missing) + start + len(rows)


def _continued(target: Model, rows: list[Output], max_new_tokens: int, sampling: Sampling) -> Iterator[Output]:
    """Yield the rows with their new tokens, and the log-probabilities of those if they were drawn."""
    streams = [row.stream for row in rows]
    settings = Settings(max_new_tokens=max_new_tokens, **asdict(sampling), streams=streams)
    results = BatchRun(target, [row.prompt for row in rows], settings).finish()
    for row, result in zip(rows, results, strict=True):
        output = replace(row, output=result.token_ids)
        if not sampling.greedy:
            likelihoods = torch.cat(list(_likelihoods(target, output, sampling)))
            output = replace(output, logprobs=likelihoods.log().tolist())
        yield output


def _likelihoods(target: Model, output: Output, sampling: Sampling) -> Iterator[Tensor]:
    """Yield the probability [T] of each new token under the distribution that it was drawn from, in chunks."""
    for logits, tokens in predictions(target, output, first=0):
        yield probabilities(logits, sampling).gather(1, tokens[:, None]).squeeze(1)
