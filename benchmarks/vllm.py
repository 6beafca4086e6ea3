"""A real vLLM on a CPU: exported pairs of the zoo, served, against our own engine's output, replay and prediction.

One server without a draft and one for each draft, all started first; every prompt then goes to all of them in turn, in
an order that is drawn anew, so that they meet the same machine. Greedy, one request at a time, float32, without
compilation.

- Outputs: token by token those of our plain decoding, or a tie of rounding (docs/lossless.md).
- TAR: the server's counters against our replay of the draft in float32.
- Speed: how much longer an iteration takes than a token of the server without a draft is measured on the prompts of one
  set (`hellaswag`, the median); with the replayed TAR that predicts the speed-up on those of another (`zoo`). Two
  drafts differ clearly where the 95 % interval of the ratio of their speeds, a bootstrap over prompts, leaves 1 out.

    python benchmarks/vllm.py --python ENVIRONMENT/bin/python [--drafts 4x128 2x192] [--lookahead 2] [--prompts 16]
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import combinations, islice
from pathlib import Path
from random import Random
from statistics import median

import httpx2
import numpy as np
from numpy.typing import NDArray

import shallowdraft as sd
from shallowdraft.bench.endpoint import Counters, Endpoint, StreamedAnswer
from shallowdraft.decoding.divergence import explain
from shallowdraft.export.advice import Advice
from shallowdraft.export.export import export
from shallowdraft.intervals import bootstrap
from shallowdraft.models import zoo
from shallowdraft.prompts import load_prompts
from shallowdraft.records import Record, commit, processor
from shallowdraft.replay.model import replay_model
from shallowdraft.replay.recording import record
from shallowdraft.runs.sampling import Sampling
from shallowdraft.runs.trace import Trace, read_trace

PLAIN = "none"
TIMED, JUDGED = "hellaswag", "zoo"
Floats = NDArray[np.float64]
START_S = 900  # how long a server may take to start on a busy machine
MODULE = "vllm.entrypoints.openai.api_server"
OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"]
OPTIONS += ["--enable-per-request-metrics", "--kv-cache-memory-bytes", str(2**28)]
COUNTS = ["--per-request-spec-decode-metrics", "summary"]


@dataclass
class Served:
    """A server and its answers."""

    endpoint: Endpoint
    answers: dict[str, list[StreamedAnswer]] = field(default_factory=lambda: {TIMED: [], JUDGED: []})
    """By set of prompts."""
    counted: Record = field(default_factory=dict)
    """By its Prometheus counters, over all of them."""


@contextmanager
def serve(python: str, draft: str, lookahead: int, folder: Path, port: int) -> Iterator[Served]:
    """Export a pair and serve it with the settings that were exported; `none` leaves the draft out."""
    of = "2x192" if draft == PLAIN else draft
    made = export(f"zoo:{of}", "zoo:target", "vllm", Advice(lookahead), folder)
    _, _, target, *speculation = made.setup.command
    extra = [] if draft == PLAIN else [*speculation, *COUNTS]
    command = [python, "-m", MODULE, "--model", target, "--port", str(port), *OPTIONS, *extra]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    environment.pop("PYTHONPATH", None)
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait(process, url, folder / "log.txt")
            yield Served(Endpoint(url, target))
        finally:
            process.terminate()
            process.wait(60)


def wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    for _ in range(START_S):
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == httpx2.codes.OK:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(1)
    raise SystemExit(f"vLLM did not start within {START_S} s; see {log}")


def ask(served: Served, prompt: Sequence[int], new_tokens: int) -> StreamedAnswer:
    request = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0.0, "return_token_ids": True}
    return served.endpoint.ask(request, chat=False)


def steps(answer: StreamedAnswer) -> int:
    """Iterations; without a draft every token behind the first is one."""
    return answer.speculation["num_spec_steps"] if answer.speculation else kept(answer)


def seconds(answer: StreamedAnswer) -> float:
    return answer.arrivals_s[-1] - answer.arrivals_s[0]


def kept(answer: StreamedAnswer) -> int:
    """Tokens of iterations: all but the first."""
    return answer.tokens - 1


def traced(target: sd.Model, path: Path, prompts: int, new_tokens: int) -> Trace:
    """Our plain decoding of both sets, which take turns."""
    pairs = zip(load_prompts(TIMED), load_prompts(JUDGED), strict=False)
    chosen = [one for timed, judged in islice(pairs, prompts) for one in ((TIMED, timed), (JUDGED, judged))]
    for _ in record(target, chosen, path, max_new_tokens=new_tokens, sampling=Sampling()):
        pass
    return read_trace(path)


def measure(servers: dict[str, Served], trace: Trace, new_tokens: int) -> None:
    """Every prompt at every server in turn, in an order that is drawn anew."""
    before = {}
    for name, served in servers.items():
        ask(served, [1, 2, 3], new_tokens)  # warms up
        before[name] = served.endpoint.counters() or Counters()
    for number, output in enumerate(trace.outputs):
        for served in Random(number).sample([*servers.values()], len(servers)):
            served.answers[output.set].append(ask(served, output.prompt, new_tokens))
    for name, served in servers.items():
        served.counted = (served.endpoint.counters() or Counters()).since(before[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter that has vllm")
    parser.add_argument("--drafts", nargs="+", default=zoo.names()[1:])
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8920)
    given = parser.parse_args()
    target = sd.load("zoo:target", "float32", "cpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = traced(target, folder / "trace.jsonl", given.prompts, given.new_tokens)
        servers = {
            name: stack.enter_context(serve(given.python, name, given.lookahead, folder / name, given.port + number))
            for number, name in enumerate([PLAIN, *given.drafts])
        }
        measure(servers, trace, given.new_tokens)
        version = httpx2.get(f"{servers[PLAIN].endpoint.url}/version").json()["version"]
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}, vLLM {version} on its CPU backend, eager")
    sizes = f"{given.new_tokens} tokens each, greedy, lookahead {given.lookahead}"
    print(f"{given.prompts} prompts of {JUDGED} and {given.prompts} of {TIMED}, {sizes}")
    compare(target, trace, servers)
    speeds(servers, trace, given.lookahead)


def compare(target: sd.Model, trace: Trace, servers: dict[str, Served]) -> None:
    """Outputs against our plain decoding."""
    pairs = [
        (output, answer)
        for served in servers.values()
        for name, answers in served.answers.items()
        for output, answer in zip((one for one in trace.outputs if one.set == name), answers, strict=True)
    ]
    same = sum(output.output == one.token_ids for output, one in pairs)
    found = [explain(target, output.prompt, output.output, one.token_ids) for output, one in pairs]
    ties = sum(one is not None and one.tie for one in found)
    wrong = [str(one) for one in found if one is not None and not one.tie]
    print(f"outputs: {same} of {len(pairs)} are ours token by token, {ties} differ by a tie of rounding")
    print("\n".join(wrong) or "no output differs by more than rounding")


def speeds(servers: dict[str, Served], trace: Trace, lookahead: int) -> None:
    plain = servers[PLAIN].answers
    times = {
        name: np.array([seconds(one) / kept(one) for one in served.answers[JUDGED]]) for name, served in servers.items()
    }
    predicted: dict[str, float] = {}
    print(f"without a draft: {1 / times[PLAIN].mean():.1f} tokens/s")
    heads = ("TAR", "counters", "replayed", "iteration", "predicted", "measured")
    print(f"{'draft':<16}" + "".join(f"{head:>10}" for head in heads) + "  95 %")
    for name in list(servers)[1:]:
        served, replayed = servers[name], replay_model(sd.load(f"zoo:{name}", "float32", "cpu"), trace)
        longer = [
            seconds(one) / steps(one) / (seconds(other) / kept(other))
            for one, other in zip(served.answers[TIMED], plain[TIMED], strict=True)
        ]
        predicted[name] = replayed.tar(JUDGED)[lookahead] / median(longer)
        everything = [one for some in served.answers.values() for one in some]
        tar = sum(map(kept, everything)) / sum(map(steps, everything))
        raw = 1 + served.counted["num_accepted_draft_tokens"] / served.counted["num_spec_steps"]
        measured, low, high = ratio(times[PLAIN], times[name])
        figures = (tar, raw, replayed.tar()[lookahead], median(longer), predicted[name], measured)
        print(f"{name:<16}" + "".join(f"{one:>10.3f}" for one in figures) + f"  {low:.2f} to {high:.2f}")
    print("TAR: tokens kept / iterations; counters: 1 + accepted / drafts, tokens beyond the limit among them")
    print("iteration: of a token without a draft; predicted, measured: speed-up on the prompts of", JUDGED)
    order(predicted, times)


def ratio(slow: Floats, fast: Floats) -> tuple[float, float, float]:
    """How many times as fast, with its interval."""
    low, high = bootstrap(lambda draws: slow[draws].sum(1) / fast[draws].sum(1), len(slow))
    return float(slow.sum() / fast.sum()), float(low), float(high)


def order(predicted: dict[str, float], times: dict[str, Floats]) -> None:
    """Whether drafts that differ clearly are ordered as predicted."""
    found = [(one, two, ratio(times[two], times[one])) for one, two in combinations(predicted, 2)]
    clear = [(one, two, speed) for one, two, (speed, low, high) in found if low > 1 or high < 1]
    right = [(one, two) for one, two, speed in clear if (speed > 1) == (predicted[one] > predicted[two])]
    wrong = [f"{one} and {two}" for one, two, _ in clear if (one, two) not in right]
    print("predicted order:", " > ".join(sorted(predicted, key=lambda name: -predicted[name])))
    print("measured order: ", " > ".join(sorted(predicted, key=lambda name: times[name].sum())))
    print(f"{len(clear)} of {len(found)} pairs of drafts differ clearly; {len(right)} of these in the predicted order")
    print(f"not so: {', '.join(wrong)}" if wrong else "none is the other way round")


if __name__ == "__main__":
    main()
