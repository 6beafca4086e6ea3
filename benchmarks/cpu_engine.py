"""Our engine against transformers on a CPU, plain and speculative, in one interleaved run.

A synthetic pair of 60 M and 4 M parameters that agrees on 80 % of tokens, float32, batch 1, a prompt of 32 tokens, 256
new tokens, lookahead 5, two threads. Each round runs every candidate once, in random order. Medians and quartiles of
whole calls are over rounds; ratios are taken within a round, so that both sides met the machine in the same state. All
outputs must be the text that the pair is built to write.

    python benchmarks/cpu_engine.py [--rounds 7] [--threads 2] [--dtype float32]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import torch
import transformers

import shallowdraft as sd
from shallowdraft.models.synthetic import SyntheticPair, make_pair
from shallowdraft.records import commit, processor
from shallowdraft.shapes.notation import parse_shape

TARGET, DRAFT, VOCABULARY, AGREEMENT = "11x640/10h/1728", "2x256/4h/688", 4096, 0.8
PROMPT, NEW_TOKENS, LOOKAHEAD = list(range(1000, 1032)), 256, 5

Decode = Callable[[], list[int]]


def our_candidates(folders: tuple[Path, Path], dtype: str) -> dict[str, Decode]:
    """Return our plain and speculative decoding."""
    target, draft = (sd.load(folder, dtype=dtype, device="cpu") for folder in folders)

    def decode(draft: sd.Model | None) -> list[int]:
        out = sd.generate(target, PROMPT, draft=draft, lookahead=LOOKAHEAD, max_new_tokens=NEW_TOKENS)
        return out.token_ids

    return {"shallowdraft plain": lambda: decode(None), "shallowdraft speculative": lambda: decode(draft)}


def transformers_candidates(folders: tuple[Path, Path], dtype: str) -> dict[str, Decode]:
    """Return transformers' plain decoding and its assisted generation."""
    target, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        for folder in folders
    )
    draft.generation_config.num_assistant_tokens = LOOKAHEAD
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    prompt = torch.tensor([PROMPT])

    def decode(assistant: transformers.PreTrainedModel | None) -> list[int]:
        out = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(PROMPT) :].tolist()

    return {"transformers plain": lambda: decode(None), "transformers assisted": lambda: decode(draft)}


def measure(candidates: dict[str, Decode], expected: list[int], rounds: int) -> dict[str, list[float]]:
    """Return tokens/s of whole calls by candidate, one entry per round; candidates take turns in random order."""
    speeds: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds + 1):
        for name in Random(index).sample(list(candidates), len(candidates)):
            begin_s = time.perf_counter()
            tokens = candidates[name]()
            elapsed_s = time.perf_counter() - begin_s
            assert tokens == expected, f"{name}: the output is not the expected text"
            if index > 0:  # the first round warms up
                speeds[name].append(len(tokens) / elapsed_s)
    return speeds


def spread(values: list[float], unit: str = "") -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:7.2f}{unit}  ({low:.2f} to {high:.2f})"


def report(speeds: dict[str, list[float]]) -> None:
    print(f"{'tokens/s':<52} median (quartiles)")
    for name, values in speeds.items():
        print(f"  {name:<50} {spread(values)}")
    print(f"{'ratio within a round':<52} median (quartiles)")
    for fast, slow in (
        ("shallowdraft speculative", "transformers assisted"),
        ("shallowdraft speculative", "shallowdraft plain"),
        ("shallowdraft plain", "transformers plain"),
        ("transformers assisted", "transformers plain"),
    ):
        ratios = [a / b for a, b in zip(speeds[fast], speeds[slow], strict=True)]
        print(f"  {fast + ' / ' + slow:<50} {spread(ratios, 'x')}")


def print_provenance(pair: SyntheticPair, options: argparse.Namespace) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {options}")
    print(f"{processor()}, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"target {TARGET} ({pair.target.shape.parameters / 1e6:.1f} M), ", end="")
    print(f"draft {DRAFT} ({pair.draft.shape.parameters / 1e6:.1f} M), TAR {pair.tar(LOOKAHEAD):.2f} by construction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pair = make_pair(parse_shape(TARGET, vocab=VOCABULARY), parse_shape(DRAFT, vocab=VOCABULARY), AGREEMENT)
    with tempfile.TemporaryDirectory() as folder:
        folders = pair.save(Path(folder))
        candidates = our_candidates(folders, options.dtype) | transformers_candidates(folders, options.dtype)
        speeds = measure(candidates, pair.walk(PROMPT[-1], NEW_TOKENS), options.rounds)
    print_provenance(pair, options)
    report(speeds)


if __name__ == "__main__":
    main()
