"""The settings file and the start command of each engine. No torch here.

Paths in the exported folder are relative, so that it can be moved; commands run inside it.
"""

import json
import shlex
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import yaml

Engine = Literal["vllm", "sglang", "trtllm", "llama.cpp", "transformers"]
DRAFT = "draft"
TARGET = "target"
GGUF = ".gguf"
_COMMON = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES: dict[Engine, tuple[str, ...]] = {
    "vllm": (*_COMMON, "opt"),
    "sglang": _COMMON,
    "trtllm": _COMMON,
    "llama.cpp": _COMMON,
    "transformers": (*_COMMON, "opt"),
}
"""The families of models exported, by engine."""

_GENERATE = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    'target, draft = "{target}", "{draft}"; t = T.from_pretrained(target); m = M.from_pretrained(target); '
    'print(t.decode(m.generate(**t("Once upon a time", return_tensors="pt"), do_sample=False, max_new_tokens=64, '
    "assistant_model=M.from_pretrained(draft))[0]))"
)


PYTHON = "python3"
VARIABLES = {PYTHON: "PYTHON", "vllm": "VLLM", "trtllm-serve": "TRTLLM_SERVE", "llama-server": "LLAMA_SERVER"}
"""The environment variable that names another executable, by program."""

_SCRIPT = """\
#!/bin/sh
# Started with another {program}: {variable}=/path/to/{program} ./start.sh
program=$(command -v "${{{variable}:-{program}}}") || {{
    echo "$0: there is no ${{{variable}:-{program}}} here; {install}, or name one: {variable}=/path/to/{program} $0" >&2
    exit 127
}}
case $program in /*) ;; *) program=$PWD/$program ;; esac
{check}cd "$(dirname "$0")" && exec "$program" {arguments} "$@"
"""
_CHECK = """\
"$program" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("{package}") is None)' || {{
    echo "$0: $program has no {package}; {install}, or name another one: {variable}=/path/to/{program} $0" >&2
    exit 127
}}
"""


@dataclass(frozen=True)
class Setup:
    """The command that starts an engine, and the files it reads."""

    command: list[str]
    install: str
    """The advice to print if the program is missing."""
    files: dict[str, str] = field(default_factory=dict)
    """Contents of settings files, by name."""
    package: str | None = None
    """The package that a Python interpreter must have."""

    @property
    def variable(self) -> str:
        """The environment variable that names another executable."""
        return VARIABLES[self.command[0]]

    def script(self) -> str:
        """Return a shell script that runs the command, or says that the engine is missing."""
        program, *arguments = self.command
        words = {"program": program, "variable": self.variable, "install": self.install, "package": self.package}
        check = _CHECK.format(**words) if self.package else ""
        return _SCRIPT.format(**words, check=check, arguments=shlex.join(arguments))


def setup(engine: Engine, target: str, lookahead: int, by_batch: dict[int, int]) -> Setup:
    """Return the set-up for the draft in the exported folder and a target, which is a path or a hub id."""
    by_batch = supported_lookaheads(engine, by_batch)
    if engine == "vllm":
        return _vllm(target, lookahead, by_batch)
    if engine == "sglang":
        return _sglang(target, lookahead)
    if engine == "trtllm":
        return _trtllm(target, lookahead, by_batch)
    if engine == "llama.cpp":
        return _llama_cpp(target, lookahead)
    command = [PYTHON, "-c", _GENERATE.format(target=target, draft=DRAFT)]
    return Setup(command, "pip install transformers torch", package="transformers")


def supported_lookaheads(engine: Engine, by_batch: dict[int, int]) -> dict[int, int]:
    """Return the lookaheads by batch size that an engine can be set to; none if it has one for all batches.

    TensorRT-LLM takes no lookahead longer than that of batch size 1, which must not be 0.
    """
    if engine == "vllm":
        return by_batch
    first = by_batch.get(1, 0) if engine == "trtllm" else 0
    return {batch: min(d, first) for batch, d in by_batch.items()} if first else {}


def _vllm(target: str, lookahead: int, by_batch: dict[int, int]) -> Setup:
    config: dict[str, object] = {"method": "draft_model", "model": DRAFT}
    config["num_speculative_tokens"] = max(lookahead, *by_batch.values()) if by_batch else lookahead
    if by_batch:
        config["num_speculative_tokens_per_batch_size"] = _ranges(by_batch)
    text = json.dumps(config)
    command = ["vllm", "serve", target, "--speculative-config", text]
    return Setup(command, "pip install vllm", {"speculative.json": text + "\n"})


def _ranges(by_batch: dict[int, int]) -> list[tuple[int, int, int]]:
    """Return (first batch size, last, lookahead); a size that was not timed has that of the next smaller one."""
    ends = [*by_batch, max(by_batch) + 1]
    return [(start, end - 1, by_batch[start]) for start, end in pairwise(ends)]


def _sglang(target: str, lookahead: int) -> Setup:
    options = {
        "model-path": target,
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": DRAFT,
        "speculative-num-steps": lookahead,
        "speculative-eagle-topk": 1,  # a chain, not a tree
        "speculative-num-draft-tokens": lookahead + 1,  # verified together with the last token of the text
        "enable-metrics": True,
    }
    command = [PYTHON, "-m", "sglang.launch_server", "--config", "sglang.yaml"]
    return Setup(command, "pip install sglang", {"sglang.yaml": _yaml(options)}, "sglang")


def _trtllm(target: str, lookahead: int, by_batch: dict[int, int]) -> Setup:
    config = {"decoding_type": "Draft_Target", "speculative_model": DRAFT, "max_draft_len": lookahead}
    if by_batch:  # each lookahead holds up to its batch size; beyond the last there is no speculation
        config["max_draft_len"] = by_batch[1]
        config["draft_len_schedule"] = {end: d for _, end, d in _ranges(by_batch)}
    options = {"speculative_config": config, "disable_overlap_scheduler": True}
    command = ["trtllm-serve", target, "--config", "trtllm.yaml"]
    return Setup(command, "pip install tensorrt_llm", {"trtllm.yaml": _yaml(options)})


def _llama_cpp(target: str, lookahead: int) -> Setup:
    speculation = {"--spec-type": "draft-simple", "--spec-draft-n-max": lookahead, "--spec-draft-n-min": 0}
    options = {"-m": target, "-md": DRAFT + GGUF} | speculation | {"--spec-draft-p-min": 0}  # draft at any confidence
    command = ["llama-server"]
    for option, value in options.items():
        command += [option, str(value)]
    return Setup(command, "install llama.cpp")


def _yaml(options: object) -> str:
    return str(yaml.safe_dump(options, sort_keys=False))
