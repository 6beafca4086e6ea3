"""Import of traces from other engines: OpenAI-style completions with token ids, and the paper's printed tensors."""

import re
from math import isfinite
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypedDict

from shallowdraft.errors import RecordError, first_line
from shallowdraft.files import Count, parse_json, read_lines, read_text, require_fields
from shallowdraft.prompts import load_prompts
from shallowdraft.records import Record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Output, append_outputs, open_trace

_TENSOR = re.compile(r"tensor\(\[\[(.*?)\]\]", re.DOTALL)
PROCESSED = ("processed_logprobs",)  # vLLM's name for log-probabilities after temperature, top-k and top-p


def import_completions(path: Path) -> tuple[Sampling, list[Output]]:
    """Read a file of completions or chat completions, a JSON object per line, as servers return them.

    Each needs prompt_token_ids, and choices with token_ids (vLLM: return_token_ids). The request gives temperature,
    top_k and top_p; it is the field "request" of the same object or stands beside "response". Without one, tokens were
    chosen greedily. Sampled text also needs logprobs of the distribution that its tokens were drawn from.
    """
    outputs: list[Output] = []
    sampling: Sampling | None = None
    for number, line in read_lines(path, RecordError):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            request, response = _parts(line)
            of_line = _sampling(where, request)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RecordError(f"{where}: not a completion as a JSON object ({first_line(error)})") from None
        if sampling not in (None, of_line):
            raise RecordError(f"{where}: drawn with {of_line}, the lines before with {sampling}; one file for each")
        sampling = of_line
        require_fields(response, _Completion, where, RecordError)
        prompt_set, name = str(request.get("set", path.stem)), str(response.get("id", number))
        for sample, choice in enumerate(response.get("choices", ())):
            ids = choice.get("token_ids")
            prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
            if not ids or not prompt_ids:
                raise RecordError(f"{where}: no prompt_token_ids and token_ids; ask the server to return them")
            logprobs = None if sampling.greedy else _logprobs(where, choice, len(ids))
            outputs.append(Output(name, prompt_set, sample, prompt_ids, ids, logprobs))
    if sampling is None or not outputs:
        raise RecordError(f"{path}: holds no completion")
    return sampling, outputs


def import_tensors(path: Path, prompts: Path, tokenizer: Any) -> tuple[Sampling, list[Output]]:
    """Read the authors' format: a printed `tensor([[…]])` of token ids per prompt of a file of {"prompt": …} lines."""
    bodies = _TENSOR.findall(read_text(path, RecordError))
    continuations = [_ids(f"{path}: tensor {number}", body) for number, body in enumerate(bodies, 1)]
    all_prompts = load_prompts(prompts)
    if not continuations:
        raise RecordError(f"{path}: holds no tensor([[…]])")
    if len(continuations) > len(all_prompts):
        raise RecordError(
            f"{path}: {len(continuations)} outputs, and {prompts} has {len(all_prompts)} prompts; "
            "give the file they belong to"
        )
    outputs = []
    for prompt, ids in zip(all_prompts, continuations, strict=False):
        prompt_ids = list(prompt.ids or tokenizer.encode(prompt.text))
        outputs.append(Output(prompt.id, prompt.task, 0, prompt_ids, ids))
    return Sampling(), outputs


def write_trace(
    path: Path,
    target: str,
    vocabulary: Record,
    sampling: Sampling,
    outputs: list[Output],
    source: Path,
    target_digest: str | None = None,
) -> None:
    """Write outputs of another engine as a trace, whole; without the target's weights its digest is unknown."""
    if path.exists():
        raise RecordError(f"{path} exists already; name another file")
    largest = max(max(output.prompt + output.output) for output in outputs)
    if largest >= vocabulary["size"]:
        raise RecordError(f"{source}: token id {largest:,} is not in {target}'s vocabulary of {vocabulary['size']:,}")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    file = open_trace(partial, target, target_digest, vocabulary, sampling, {"imported": source.name})
    append_outputs(file, outputs)
    partial.replace(path)


def _ids(where: str, body: str) -> list[int]:
    """Read token ids as torch prints them, with line ends or their escapes; refuse the dots of a shortened print."""
    printed = [part for part in re.split(r"(?:\\n|[\s,])+", body) if part]
    strange = [part for part in printed if not re.fullmatch(r"\d{1,9}", part, re.ASCII)]
    if strange or not printed:
        problem = f"holds {shortened(strange[0])}, which is no token id" if strange else "holds no token ids"
        raise RecordError(f"{where} {problem}; print every id")
    return [int(part) for part in printed]


class _Choice(TypedDict, total=False):
    token_ids: list[Count] | None
    prompt_token_ids: list[Count] | None
    logprobs: dict[str, Any] | None


class _Completion(TypedDict, total=False):
    prompt_token_ids: list[Count] | None
    choices: list[_Choice]


def _parts(line: str) -> tuple[Record, Record]:
    """Return the request and the response of a line."""
    row = parse_json(line)
    response = row.get("response", row)
    return row.get("request", {}), response.get("body", response)


def _sampling(where: str, request: Record) -> Sampling:
    """Return the sampling of a request, if its log-probabilities are those of the distribution drawn from."""
    temperature = float(request.get("temperature", 0.0))
    if temperature == 0:
        return Sampling()
    top_k, top_p = request.get("top_k"), request.get("top_p")
    sampling = Sampling(temperature, top_k if top_k and top_k > 0 else None, top_p if top_p and top_p < 1 else None)
    unprocessed = temperature == 1 and sampling.top_k is None and sampling.top_p is None
    if not unprocessed and request.get("logprobs_mode") not in PROCESSED:
        raise RecordError(
            f"{where}: drawn with temperature {temperature:g}, top_k {top_k}, top_p {top_p}, but servers report "
            "log-probabilities from before these; acceptance needs those of the distribution that tokens were drawn "
            'from. Record at temperature 1, or serve with logprobs_mode "processed_logprobs" and say so in "request"'
        )
    return sampling


def _logprobs(where: str, choice: Record, count: int) -> list[float]:
    """Return the log-probabilities of a choice's tokens, from either of the two formats of the API."""
    reported = choice.get("logprobs") or {}
    try:
        values = reported.get("token_logprobs") or [token.get("logprob") for token in reported.get("content") or ()]
        logprobs = [float(value) for value in values if value is not None]
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise RecordError(f"{where}: logprobs are no numbers") from None
    if len(values) != count or len(logprobs) != count:
        raise RecordError(f"{where}: {count} tokens and {len(values)} logprobs; sampled text needs one for each token")
    if not all(map(isfinite, logprobs)):
        raise RecordError(f"{where}: a logprob is not finite; its token cannot have been drawn")
    return logprobs
