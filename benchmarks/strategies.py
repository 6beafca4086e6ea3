"""Every drafter on the same footing: tokens per iteration, times, speed against plain decoding, extra memory.

Greedy, batch 1, the zoo on a CPU or a GPU. On each prompt all candidates take turns, in a new random order each round,
and the fastest round of each counts, because other processes may use the machine. The speed-up is the ratio of the
sums of decoding time, its interval a bootstrap over prompts. Outputs must be those of plain decoding. A set may be a
file, and SET@TASK selects one task of it. Spec-Bench's summarisation may not be shipped, so name your copy.

    python benchmarks/strategies.py [--sets zoo humaneval spec_bench.jsonl@summarization] [--skips FILE]
"""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # as the commands set it
import torch
from zoo import speed_up

import shallowdraft as sd
from shallowdraft.decoding.divergence import explain
from shallowdraft.models.memory import dtype_name
from shallowdraft.prompts import load_prompts
from shallowdraft.records import commit, processor
from shallowdraft.studying.skip_search import read_trials

DRAFT = "zoo:4x128"


def options_by_name(
    target: sd.Model, draft: sd.Model, heads: Path | None, skips: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the options of `generate` for every candidate, plain decoding first."""
    candidates: dict[str, dict[str, Any]] = {
        "plain": {},
        "draft, d = 2": {"draft": draft, "lookahead": 2},
        "draft, d = 4": {"draft": draft, "lookahead": 4},
        "tree, d = 2, 4 nodes": {"draft": draft, "drafter": "tree", "lookahead": 2, "nodes": 4},
        "tree, d = 4, 12 nodes": {"draft": draft, "drafter": "tree", "lookahead": 4, "nodes": 12},
        "n-gram, d <= 4": {"drafter": "ngram", "lookahead": 4},
        "n-gram, d <= 12": {"drafter": "ngram", "lookahead": 12},
        "early exit, d = 1": {"drafter": "skip", "lookahead": 1},
    }
    if target.device.type == "cpu":  # on a GPU all iterations have the same length
        candidates["draft while sure, d <= 6"] = {"draft": draft, "lookahead": 6, "min_confidence": 0.1}
    medusa_heads = sd.load_heads(target, heads)
    for nodes in (4, 16, 48):
        candidates[f"medusa, {nodes} nodes"] = {"drafter": "medusa", "heads": medusa_heads, "nodes": nodes}
    trials = read_trials(skips) if skips else []  # the best first
    for kind, ranked in (("regular", [trial for trial in trials if trial.uniform]), ("searched", trials)):
        for best in ranked[:1]:
            options = {"drafter": "skip", "skips": best.skips, "lookahead": best.lookahead}
            candidates[f"skip, {kind}, d = {best.lookahead}"] = options
    return candidates


def extra_bytes(target: sd.Model, options: dict[str, Any], tokens: int) -> int:
    """Return the memory needed beyond plain decoding: a draft's weights and KV cache, and slots for draft tokens."""
    total = 0
    if draft := options.get("draft"):
        parameters = (*draft.decoder.parameters(), *draft.decoder.buffers())
        total += sum(tensor.numel() * tensor.element_size() for tensor in parameters)
        total += tokens * draft.shape.kv_bytes_per_token(dtype_name(draft.decoder.dtype))
    if heads := options.get("heads"):
        total += sum(tensor.numel() * tensor.element_size() for tensor in heads.parameters())
    lookahead = options.get("lookahead", 0)
    slots = options.get("nodes", lookahead if isinstance(lookahead, int) else 8)
    return total + slots * target.shape.kv_bytes_per_token(dtype_name(target.decoder.dtype))


def prompts_of(name: str, limit: int) -> list[str]:
    """Return the prompts of a set, or of one task of it."""
    prompt_set, _, task = name.partition("@")
    texts = [prompt.text for prompt in load_prompts(prompt_set) if prompt.task.endswith(task)][:limit]
    if not texts:
        raise SystemExit(f"{prompt_set} has no prompts of the task {task}; name one of its tasks after @")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["zoo", "humaneval", "gsm8k"])
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--rounds", type=int, default=2, help="rounds on each prompt; the fastest counts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--heads", type=Path, help="output of shallowdraft heads for zoo:target; default: the heads that ship"
    )
    parser.add_argument("--skips", type=Path, help="output of skip-search for zoo:target")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, draft = sd.load("zoo:target", device=args.device), sd.load_draft(DRAFT, device=args.device)
    room = target.shape.context - args.new_tokens
    candidates = options_by_name(target, draft, args.heads, args.skips)
    on_cpu = args.device == "cpu"
    device = f"{processor()}, {args.threads} threads" if on_cpu else torch.cuda.get_device_name(target.device)
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {device}, torch {torch.__version__}")
    print(f"zoo:target, drafts by {DRAFT}; {args.new_tokens} tokens a prompt, greedy")
    for prompt_set in args.sets:
        texts = prompts_of(prompt_set, args.limit)
        statistics: dict[str, list[sd.Statistics]] = {name: [] for name in candidates}
        for text in texts:
            prompt = target.encode(text)[-room:]
            runs: dict[str, list[sd.Generation]] = {name: [] for name in candidates}
            for number in range(args.rounds):
                for name in Random(f"{number} {text}").sample(list(candidates), len(candidates)):
                    options = candidates[name] | {"max_new_tokens": args.new_tokens, "stop_tokens": ()}
                    runs[name].append(sd.generate(target, prompt, **options))
            expected = runs["plain"][0].token_ids
            for name, generations in runs.items():
                for run in generations:
                    difference = explain(target, prompt, expected, run.token_ids)
                    assert difference is None or difference.tie, f"{name}: {difference}"
                statistics[name].append(
                    min((run.stats for run in generations), key=lambda stats: stats.total_s - stats.prefill_s)
                )
        print(f"\n{Path(prompt_set).name}, {len(texts)} prompts; outputs of all candidates are the same")
        print(f"{'candidate':<28}   TAR  draft ms verify ms  tokens/s       speed-up (90 %)    MiB")
        ratios = {name: speed_up(statistics["plain"], stats) for name, stats in statistics.items() if name != "plain"}
        for name, stats in statistics.items():
            total = sd.total(stats, one_batch=False)
            ratio, low, high = ratios.get(name, (1.0, 1.0, 1.0))
            draft_ms, verify_ms = (1e3 * seconds / total.iterations for seconds in (total.draft_s, total.verify_s))
            extra = extra_bytes(target, candidates[name], room) / 2**20 if name != "plain" else 0.0
            print(
                f"{name:<28} {total.tar:5.2f} {draft_ms:9.2f} {verify_ms:9.2f} "
                f"{total.decode_tokens_per_s:9.0f} {ratio:7.2f} ({low:.2f} to {high:.2f}) {extra:6.1f}",
                flush=True,
            )
        print("fastest: " + max(ratios, key=lambda name: ratios[name][0]))
        print("slower than plain decoding: " + ("; ".join(name for name in ratios if ratios[name][0] < 1) or "none"))


if __name__ == "__main__":
    main()
