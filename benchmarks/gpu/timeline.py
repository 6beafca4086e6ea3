"""The time of one iteration by kernel: every kernel of a replayed CUDA graph, in order and summed by name.

Also counts the host's CUDA calls in a hundred iterations, and how many of them wait for the GPU.

python benchmarks/gpu/timeline.py [--pair 7b-wide] [--full]
"""

import argparse
from collections import Counter, defaultdict

import torch
from decoding import AGREEMENT, CASES, PROMPT
from floor import provenance
from torch.profiler import ProfilerActivity, profile

from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.models.synthetic import make_pair
from shallowdraft.runs.sampling import Sampling

ITERATIONS = 100


def calls(engine: Engine) -> Counter[str]:
    """Count the host's CUDA calls from the first of the iterations to the last; PyTorch raises an error if it waits."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(ITERATIONS):
            engine.iterate()
        torch.cuda.set_sync_debug_mode("default")
    cuda_calls = [event for event in profiled.events() if event.name.startswith("cuda")]
    launches = [event.time_range.start for event in cuda_calls if event.name == "cudaGraphLaunch"]
    return Counter(event.name for event in cuda_calls if launches[0] <= event.time_range.start <= launches[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="7b-wide", choices=list(CASES))
    parser.add_argument("--full", action="store_true", help="every kernel, in order")
    args = parser.parse_args()
    case = CASES[args.pair]
    pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        model.decoder.pack()
    drafter = ModelDrafter(pair.draft.decoder, case.lookahead, Sampling(), case.target.vocab)
    engine = Engine.for_prompts(pair.target.decoder, drafter, Sampling(), [list(range(PROMPT))], [PROMPT + 1000])
    engine.prefill()
    for _ in range(20):
        engine.iterate()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.iterate()
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    print(provenance())
    iteration_us = kernels[-1].time_range.end - kernels[0].time_range.start
    busy_us = sum(event.time_range.end - event.time_range.start for event in kernels)
    print(
        f"{args.pair}: an iteration takes {iteration_us:.0f} us; {len(kernels)} kernels take {busy_us:.0f} us of it\n"
    )
    times_by_name: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        times_by_name[event.name].append(event.time_range.end - event.time_range.start)
    for name, times in sorted(times_by_name.items(), key=lambda item: -sum(item[1])):
        total_us, count = sum(times), len(times)
        print(f"{total_us:9.1f} us {total_us / iteration_us:6.1%} {count:5} x {total_us / count:7.2f} us  {name[:90]}")
    counts = calls(engine)
    waits = sum(count for name, count in counts.items() if "Synchronize" in name or name == "cudaMemcpy")
    print(f"\n{ITERATIONS} iterations: the host waits {waits} times; it calls {dict(counts)}")
    if args.full:
        print("\nbegin, us   length, us   kernel")
        begin = kernels[0].time_range.start
        for event in kernels:
            duration_us = event.time_range.end - event.time_range.start
            print(f"{event.time_range.start - begin:9.1f} {duration_us:12.1f}   {event.name[:90]}")


if __name__ == "__main__":
    main()
