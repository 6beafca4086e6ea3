"""Traces from other engines: OpenAI-style completions with token ids, and the text format of the paper's authors."""

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
    """A file of completions or chat completions, a JSON object a line, as servers return them.

    Each needs prompt_token_ids and choices with token_ids (vLLM: return_token_ids). The request, as "request" in the
    same object or beside "response", gives temperature, top_k, top_p; nothing given means greedy. Sampled text also
    needs logprobs that are those of the law it was drawn from.
    """
    outputs: list[Output] = []
    law: Sampling | None = None
    for number, line in read_lines(path, RecordError):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            request, response = _parts(line)
            sampling = _sampling(where, request)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RecordError(f"{where}: not a completion as a JSON object ({first_line(error)})") from None
        if law not in (None, sampling):
            raise RecordError(f"{where}: drawn with {sampling}, the lines before with {law}; one file for each")
        law = sampling
        require_fields(response, _Completion, where, RecordError)
        prompt = response.get("prompt_token_ids")
        for sample, choice in enumerate(response.get("choices", ())):
            ids = choice.get("token_ids")
            given = choice.get("prompt_token_ids") or prompt
            if not ids or not given:
                raise RecordError(f"{where}: no prompt_token_ids and token_ids; ask the server to return them")
            logprobs = None if sampling.greedy else _logprobs(where, choice, len(ids))
            name = str(request.get("set", path.stem))
            outputs.append(Output(str(response.get("id", number)), name, sample, given, ids, logprobs))
    if law is None or not outputs:
        raise RecordError(f"{path}: holds no completion")
    return law, outputs


def import_tensors(path: Path, prompts: Path, tokenizer: Any) -> tuple[Sampling, list[Output]]:
    """The authors' format: a printed `tensor([[…]])` of token ids for every prompt of a file of {"prompt": …} lines."""
    bodies = _TENSOR.findall(read_text(path, RecordError))
    found = [_ids(f"{path}: tensor {number}", body) for number, body in enumerate(bodies, 1)]
    given = load_prompts(prompts)
    if not found:
        raise RecordError(f"{path}: holds no tensor([[…]])")
    if len(found) > len(given):
        raise RecordError(
            f"{path}: {len(found)} outputs, and {prompts} has {len(given)} prompts; give the file they belong to"
        )
    pairs = zip(given, found, strict=False)
    return Sampling(), [
        Output(one.id, one.task, 0, list(one.ids or tokenizer.encode(one.text)), ids) for one, ids in pairs
    ]


def write_trace(
    path: Path,
    target: str,
    vocabulary: Record,
    law: Sampling,
    outputs: list[Output],
    source: Path,
    target_digest: str | None = None,
) -> None:
    """Write outputs of another engine as a trace, whole; the digest is there where the target's weights are."""
    if path.exists():
        raise RecordError(f"{path} exists already; name another file")
    largest = max(max(output.prompt + output.output) for output in outputs)
    if largest >= vocabulary["size"]:
        raise RecordError(f"{source}: token id {largest:,} is not in {target}'s vocabulary of {vocabulary['size']:,}")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    file = open_trace(partial, target, target_digest, vocabulary, law, {"imported": source.name})
    append_outputs(file, outputs)
    partial.replace(path)


def _ids(where: str, body: str) -> list[int]:
    """Read token ids as torch prints them, with line ends or their escapes; dots, which stand for more, are refused."""
    printed = [part for part in re.split(r"(?:\\n|[\s,])+", body) if part]
    strange = [part for part in printed if not re.fullmatch(r"\d{1,9}", part, re.ASCII)]
    if strange or not printed:
        what = f"holds {shortened(strange[0])}, which is no token id" if strange else "holds no token ids"
        raise RecordError(f"{where} {what}; print every id")
    return [int(part) for part in printed]


class _Choice(TypedDict, total=False):
    token_ids: list[Count] | None
    prompt_token_ids: list[Count] | None
    logprobs: dict[str, Any] | None


class _Completion(TypedDict, total=False):
    prompt_token_ids: list[Count] | None
    choices: list[_Choice]


def _parts(line: str) -> tuple[Record, Record]:
    """The request and the response of a line."""
    row = parse_json(line)
    response = row.get("response", row)
    return row.get("request", {}), response.get("body", response)


def _sampling(where: str, request: Record) -> Sampling:
    temperature = float(request.get("temperature", 0.0))
    if temperature == 0:
        return Sampling()
    top_k, top_p = request.get("top_k"), request.get("top_p")
    law = Sampling(temperature, top_k if top_k and top_k > 0 else None, top_p if top_p and top_p < 1 else None)
    plain = temperature == 1 and law.top_k is None and law.top_p is None
    if not plain and request.get("logprobs_mode") not in PROCESSED:
        raise RecordError(
            f"{where}: drawn with temperature {temperature:g}, top_k {top_k}, top_p {top_p}, but servers report "
            "log-probabilities from before these; acceptance needs those of the law that was drawn from. Record at "
            'temperature 1, or serve with logprobs_mode "processed_logprobs" and say so in "request"'
        )
    return law


def _logprobs(where: str, choice: Record, count: int) -> list[float]:
    given = choice.get("logprobs") or {}
    try:
        found = given.get("token_logprobs") or [one.get("logprob") for one in given.get("content") or ()]
        logprobs = [float(value) for value in found if value is not None]
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise RecordError(f"{where}: logprobs are no numbers") from None
    if len(found) != count or len(logprobs) != count:
        raise RecordError(f"{where}: {count} tokens and {len(found)} logprobs; sampled text needs one for each token")
    if not all(map(isfinite, logprobs)):
        raise RecordError(f"{where}: a logprob is not finite; its token cannot have been drawn")
    return logprobs
