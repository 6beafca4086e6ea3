"""What `serve` does between two requests, against `generate` with as many prompts: iterations of rows that joined.

A served batch reads each iteration's tokens before it begins the next, because a request may leave or join there; what
that costs, and what captured iterations save, is measured in turns with `generate`. The output is the known one.

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
DRAWN = 0.05  # a temperature at which drawn text is the known one too


def generated(pair: SyntheticPair, lookahead: int, rows: int, temperature: float) -> float:
    """Tokens a second of one batch, prompts not counted."""
    outs = sd.generate(
        pair.target, prompts(rows), draft=pair.draft, lookahead=lookahead, max_new_tokens=NEW, stop_tokens=(),
        temperature=temperature,
    )  # fmt: skip
    for prompt, out in zip(prompts(rows), outs, strict=True):
        assert out.token_ids == pair.walk(prompt[-1], NEW), "the output is not the known one"
    stats = outs[0].stats
    return sum(out.stats.emitted for out in outs) / (stats.total_s - stats.prefill_s)


def served(pair: SyntheticPair, running: Batch, rows: int, temperature: float) -> float:
    """The same for requests that joined a batch, until all have left."""
    settings = Settings(max_new_tokens=NEW, temperature=temperature, stop_tokens=())
    joined = [running.join(prompt, settings) for prompt in prompts(rows)]
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    while running.rows:
        running.step()
    took_s = time.perf_counter() - begin_s
    for prompt, row in zip(prompts(rows), joined, strict=True):
        assert row.tokens == pair.walk(prompt[-1], NEW), "the output is not the known one"
    return sum(len(row.tokens) - 1 for row in joined) / took_s


def prompts(rows: int) -> list[list[int]]:
    return [[(7 * row + one) % SIZE["vocab"] for one in range(PROMPT)] for row in range(rows)]


def launched_one_by_one(running: Batch) -> Batch:
    """For comparison: as a batch is where nothing is captured."""
    for engine in running._kept.values():
        engine._graphs = None
    return running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="7b-wide", choices=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    case = CASES[given.pair]
    bytes_s = bandwidth()
    torch.cuda.empty_cache()
    pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        assert model.decoder.pack().fused is not None, "a kernel fell back"
    models = pair.target, pair.draft, case.lookahead, SIZE["context"] - case.lookahead, max(given.rows)
    begin_s = time.perf_counter()
    running = Batch(*models)
    running.warm()
    warm_s = time.perf_counter() - begin_s
    plain = Batch(*models)
    plain.warm()
    launched_one_by_one(plain)
    print(provenance())
    print(
        f"{given.pair}, lookahead {case.lookahead}, memory is read with {bytes_s / 1e12:.2f} TB/s; a batch of up to "
        f"{max(given.rows)} rows is ready after {warm_s:.1f} s\ntokens/s of all rows, medians (min to max) of "
        f"{given.rounds} rounds\n"
    )
    print(f"{'rows':>4} {'text':<7} {'generate':>25} {'served':>25} {'served, not captured':>25} {'share':>7}")
    for rows in given.rows:
        for text, temperature in (("greedy", 0.0), ("drawn", DRAWN)):
            found: list[list[float]] = [[], [], []]
            for round_ in range(given.rounds + 2):
                for way in Random(round_).sample(range(3), 3):
                    batch = (None, running, plain)[way]
                    speed = (
                        served(pair, batch, rows, temperature)
                        if batch
                        else generated(pair, case.lookahead, rows, temperature)
                    )
                    found[way].extend([speed] if round_ > 1 else [])  # the first run the kernels, and capture
            ratio = [served / alone for alone, served, _ in zip(*found, strict=True)]
            columns = "".join(f"{spread(one):>26}" for one in found)
            print(f"{rows:>4} {text:<7}{columns} {sorted(ratio)[len(ratio) // 2]:7.1%}", flush=True)


if __name__ == "__main__":
    main()
