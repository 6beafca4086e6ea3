"""Throughput of the server's batch against `generate` on the same number of prompts.

A served batch reads each iteration's tokens before it begins the next, because a request may leave or join then. The
cost of this, and the gain from CUDA graphs, are measured in turns with `generate`. The output must be the text that the
pair is built to write.

    python benchmarks/gpu/serving.py [--pair 7b-wide] [--rows 1 2 4 8] [--rounds 5]
"""

import argparse
import time
from random import Random

import torch
from decoding import AGREEMENT, CASES, PROMPT, SIZE
from floor import bandwidth, provenance, spread

import shallowdraft as sd
from shallowdraft.decoding.batch import Batch
from shallowdraft.decoding.options import Settings
from shallowdraft.models.synthetic import SyntheticPair, make_pair

NEW = 192
DRAWN = 0.05  # a temperature so low that drawn text equals the greedy text


def generated(pair: SyntheticPair, lookahead: int, rows: int, temperature: float) -> float:
    """Return tokens per second of one `generate` call, without the prefill."""
    outs = sd.generate(
        pair.target, prompts(rows), draft=pair.draft, lookahead=lookahead, max_new_tokens=NEW, stop_tokens=(),
        temperature=temperature,
    )  # fmt: skip
    for prompt, out in zip(prompts(rows), outs, strict=True):
        assert out.token_ids == pair.walk(prompt[-1], NEW), "the output is not the expected text"
    stats = outs[0].stats
    return sum(out.stats.emitted for out in outs) / (stats.total_s - stats.prefill_s)


def served(pair: SyntheticPair, running: Batch, rows: int, temperature: float) -> float:
    """Return tokens per second of requests that join a batch, until all have finished, without the prefill."""
    settings = Settings(max_new_tokens=NEW, temperature=temperature, stop_tokens=())
    joined = [running.join(prompt, settings) for prompt in prompts(rows)]
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    while running.rows:
        running.step()
    elapsed_s = time.perf_counter() - begin_s
    for prompt, row in zip(prompts(rows), joined, strict=True):
        assert row.tokens == pair.walk(prompt[-1], NEW), "the output is not the expected text"
    return sum(len(row.tokens) - 1 for row in joined) / elapsed_s


def prompts(rows: int) -> list[list[int]]:
    """Return a different prompt for each batch row."""
    starts = range(0, 7 * rows, 7)
    return [[token % SIZE["vocab"] for token in range(start, start + PROMPT)] for start in starts]


def launched_one_by_one(running: Batch) -> Batch:
    """Disable the CUDA graphs of a batch, for comparison."""
    for engine in running._kept.values():
        engine._graphs = None
    return running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="7b-wide", choices=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    case = CASES[args.pair]
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        assert model.decoder.pack().fused is not None, "the fused kernels cannot run this shape"
    models = pair.target, pair.draft, case.lookahead, SIZE["context"] - case.lookahead, max(args.rows)
    begin_s = time.perf_counter()
    captured = Batch(*models)
    captured.warm()
    warm_s = time.perf_counter() - begin_s
    uncaptured = Batch(*models)
    uncaptured.warm()
    launched_one_by_one(uncaptured)
    print(provenance())
    print(
        f"{args.pair}, lookahead {case.lookahead}, memory is read at {bytes_s / 1e12:.2f} TB/s; a batch of up to "
        f"{max(args.rows)} rows is ready after {warm_s:.1f} s\ntokens/s of all rows, medians (min to max) of "
        f"{args.rounds} rounds\n"
    )
    print(f"{'rows':>4} {'text':<7} {'generate':>25} {'served':>25} {'served, not captured':>25} {'share':>7}")
    for rows in args.rows:
        for text, temperature in (("greedy", 0.0), ("drawn", DRAWN)):
            speeds: list[list[float]] = [[], [], []]  # of generate, and of both batches
            for number in range(args.rounds + 2):
                for index in Random(number).sample(range(3), 3):
                    batch = (None, captured, uncaptured)[index]
                    speed = (
                        served(pair, batch, rows, temperature)
                        if batch
                        else generated(pair, case.lookahead, rows, temperature)
                    )
                    speeds[index].extend([speed] if number > 1 else [])  # the first rounds compile and capture
            ratios = [batch_speed / generate_speed for generate_speed, batch_speed, _ in zip(*speeds, strict=True)]
            columns = "".join(f"{spread(values):>26}" for values in speeds)
            print(f"{rows:>4} {text:<7}{columns} {sorted(ratios)[len(ratios) // 2]:7.1%}", flush=True)


if __name__ == "__main__":
    main()
