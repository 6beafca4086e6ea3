"""Where the time of one iteration goes: every kernel of a replayed graph, in order and added up.

And how often the host waits for the GPU in a hundred iterations: what it calls there, counted.

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
    """What the host asks of CUDA from the first of so many iterations to the last; PyTorch fails where it waits."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(ITERATIONS):
            engine.iterate()
        torch.cuda.set_sync_debug_mode("default")
    asked = [event for event in seen.events() if event.name.startswith("cuda")]
    launches = [event.time_range.start for event in asked if event.name == "cudaGraphLaunch"]
    return Counter(event.name for event in asked if launches[0] <= event.time_range.start <= launches[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="7b-wide", choices=list(CASES))
    parser.add_argument("--full", action="store_true", help="every kernel, in order")
    given = parser.parse_args()
    case = CASES[given.pair]
    pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        model.decoder.pack()
    drafter = ModelDrafter(pair.draft.decoder, case.lookahead, Sampling(), case.target.vocab)
    engine = Engine.for_prompts(pair.target.decoder, drafter, Sampling(), [list(range(PROMPT))], [PROMPT + 1000])
    engine.prefill()
    for _ in range(20):
        engine.iterate()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.iterate()
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    print(provenance())
    length = kernels[-1].time_range.end - kernels[0].time_range.start
    busy = sum(event.time_range.end - event.time_range.start for event in kernels)
    print(f"{given.pair}: an iteration of {length:.0f} us, {len(kernels)} kernels, {busy:.0f} us in them\n")
    added: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        added[event.name].append(event.time_range.end - event.time_range.start)
    for name, times in sorted(added.items(), key=lambda item: -sum(item[1])):
        whole, count = sum(times), len(times)
        print(f"{whole:9.1f} us {whole / length:6.1%} {count:5} x {whole / count:7.2f} us  {name[:90]}")
    asked = calls(engine)
    waits = sum(count for name, count in asked.items() if "Synchronize" in name or name == "cudaMemcpy")
    print(f"\n{ITERATIONS} iterations: the host waits {waits} times; it calls {dict(asked)}")
    if given.full:
        print("\nbegin, us   length, us   kernel")
        begin = kernels[0].time_range.start
        for event in kernels:
            took = event.time_range.end - event.time_range.start
            print(f"{event.time_range.start - begin:9.1f} {took:12.1f}   {event.name[:90]}")


if __name__ == "__main__":
    main()
