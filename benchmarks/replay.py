"""The time to measure a draft's TAR: one replay for all lookaheads, against live decoding at each lookahead.

Both run in one process, a draft at a time. Neither time includes plain decoding, as the trace is recorded once for all
drafts. Both must find the same TAR.

    python benchmarks/replay.py [--prompts 40] [--new-tokens 64] [--lookaheads 12]
"""

import argparse
import tempfile
import time
from pathlib import Path

import shallowdraft as sd
from shallowdraft.models import zoo
from shallowdraft.records import commit, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="zoo")
    parser.add_argument("--drafts", nargs="+", default=[name for name in zoo.names() if name != "target"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lookaheads", type=int, default=12)
    args = parser.parse_args()
    target = sd.load("zoo:target", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        size = {"limit": args.prompts, "max_new_tokens": args.new_tokens}
        trace = sd.record(target, args.set, Path(folder) / "trace.jsonl", **size, progress=False)
    date = time.strftime("%Y-%m-%d")
    print(f"{date}, commit {commit()}, {processor()}; {len(trace.outputs)} prompts, {args.new_tokens} tokens")
    print(f"{'draft':<20}{'replay s':>10}{f'live, 1 to {args.lookaheads}, s':>20}{'times cheaper':>16}")
    for name in args.drafts:
        draft = sd.load_draft(f"zoo:{name}", device="cpu")
        sd.replay(trace, [draft])  # warms up
        begin_s = time.perf_counter()
        tars = sd.replay(trace, [draft]).drafts[0].replay.tar()
        replay_s, live_s = time.perf_counter() - begin_s, 0.0
        for lookahead in range(1, args.lookaheads + 1):
            begin_s = time.perf_counter()
            options = {"draft": draft, "lookahead": lookahead, "max_new_tokens": args.new_tokens}
            stats = [sd.generate(target, output.prompt, **options).stats for output in trace.outputs]
            live_s += time.perf_counter() - begin_s
            tar = sum(run.emitted for run in stats) / sum(run.iterations for run in stats)
            assert abs(tar - tars[lookahead]) < 1e-9
        print(f"{name:<20}{replay_s:>10.2f}{live_s:>20.1f}{live_s / replay_s:>15.0f}x", flush=True)


if __name__ == "__main__":
    main()
