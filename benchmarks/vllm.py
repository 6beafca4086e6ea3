"""vLLM on a CPU: exported pairs of the zoo, served, against our engine's output, replay and prediction.

One server without a draft and one for each draft are started first. Every prompt then goes to all servers in turn, in a
random order, so that they run under the same conditions. Greedy, one request at a time, float32, without compilation.

- Outputs: the same tokens as our plain decoding, or a difference where logits tie by rounding (docs/lossless.md).
- TAR: the server's counters against our replay of the draft in float32.
- Speed: the time of an iteration, relative to a token of the server without a draft, is measured on the prompts of one
  set (`hellaswag`, the median). With the replayed TAR it predicts the speed-up on another set (`zoo`). Two drafts
  differ clearly if the 95 % interval of the ratio of their speeds, a bootstrap over prompts, excludes 1.

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
from shallowdraft.benchmarking.endpoint import Counters, Endpoint, StreamedAnswer
from shallowdraft.decoding.divergence import explain
from shallowdraft.intervals import bootstrap
from shallowdraft.models import zoo
from shallowdraft.prompts import load_prompts
from shallowdraft.records import Record, commit, processor
from shallowdraft.runs.trace import Output, Trace

PLAIN = "none"
TIMED, JUDGED = "hellaswag", "zoo"
Floats = NDArray[np.float64]
START_S = 900  # limit on the start of a server on a busy machine
MODULE = "vllm.entrypoints.openai.api_server"
OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"]
OPTIONS += ["--enable-per-request-metrics", "--kv-cache-memory-bytes", str(2**28)]
COUNTS = ["--per-request-spec-decode-metrics", "summary"]


@dataclass
class VllmServer:
    """A server and its answers."""

    endpoint: Endpoint
    answers: dict[str, list[StreamedAnswer]] = field(default_factory=lambda: {TIMED: [], JUDGED: []})
    """Answers by set of prompts."""
    counted: Record = field(default_factory=dict)
    """The increase of its Prometheus counters over all answers."""


@contextmanager
def serve(python: str, draft: str, lookahead: int, folder: Path, port: int) -> Iterator[VllmServer]:
    """Export a pair and serve it with the exported settings; with the draft `none`, serve the target alone."""
    exported_draft = "2x192" if draft == PLAIN else draft
    exported = sd.export(f"zoo:{exported_draft}", "zoo:target", "vllm", folder, lookahead=lookahead, progress=False)
    _, _, target, *speculation = exported.setup.command
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
            yield VllmServer(Endpoint(url, target))
        finally:
            process.terminate()
            process.wait(60)


def wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait until a server answers."""
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


def ask(server: VllmServer, prompt: Sequence[int], new_tokens: int) -> StreamedAnswer:
    request = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0.0, "return_token_ids": True}
    return server.endpoint.ask(request, chat=False)


def iterations(answer: StreamedAnswer) -> int:
    """Return the number of iterations; without a draft, every token after the first takes one."""
    return answer.speculation["num_spec_steps"] if answer.speculation else iteration_tokens(answer)


def seconds(answer: StreamedAnswer) -> float:
    """Return the seconds from the first token of an answer to its last."""
    return answer.arrivals_s[-1] - answer.arrivals_s[0]


def iteration_tokens(answer: StreamedAnswer) -> int:
    """Return the number of tokens that iterations produced; the first token comes from the prefill."""
    return answer.tokens - 1


def record_trace(target: sd.Model, path: Path, prompts: int, new_tokens: int) -> Trace:
    """Record our plain decoding of both sets, alternating between them."""
    chosen = []
    for timed, judged in islice(zip(load_prompts(TIMED), load_prompts(JUDGED), strict=False), prompts):
        chosen += [(TIMED, timed), (JUDGED, judged)]
    return sd.record(target, chosen, path, max_new_tokens=new_tokens, progress=False)


def measure(servers: dict[str, VllmServer], trace: Trace, new_tokens: int) -> None:
    """Send every prompt to all servers, in a new random order for each prompt."""
    before = {}
    for name, server in servers.items():
        ask(server, [1, 2, 3], new_tokens)  # warms up
        before[name] = server.endpoint.counters() or Counters()
    for number, output in enumerate(trace.outputs):
        for server in Random(number).sample([*servers.values()], len(servers)):
            server.answers[output.set].append(ask(server, output.prompt, new_tokens))
    for name, server in servers.items():
        server.counted = (server.endpoint.counters() or Counters()).since(before[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python interpreter that has vllm installed")
    parser.add_argument("--drafts", nargs="+", default=zoo.names()[1:])
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8920)
    options = parser.parse_args()
    target = sd.load("zoo:target", "float32", "cpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = record_trace(target, folder / "trace.jsonl", options.prompts, options.new_tokens)
        servers = {
            name: stack.enter_context(
                serve(options.python, name, options.lookahead, folder / name, options.port + number)
            )
            for number, name in enumerate([PLAIN, *options.drafts])
        }
        measure(servers, trace, options.new_tokens)
        version = httpx2.get(f"{servers[PLAIN].endpoint.url}/version").json()["version"]
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {processor()}, vLLM {version} on its CPU backend, eager")
    sizes = f"{options.new_tokens} tokens each, greedy, lookahead {options.lookahead}"
    print(f"{options.prompts} prompts of {JUDGED} and {options.prompts} of {TIMED}, {sizes}")
    compare(target, trace, servers)
    speeds(servers, trace, options.lookahead)


def compare(target: sd.Model, trace: Trace, servers: dict[str, VllmServer]) -> None:
    """Print how many outputs equal our plain decoding, and every difference that is not a tie."""
    pairs: list[tuple[Output, StreamedAnswer]] = []
    for server in servers.values():
        for name, answers in server.answers.items():
            outputs = [output for output in trace.outputs if output.set == name]
            pairs += zip(outputs, answers, strict=True)
    same = sum(output.output == answer.token_ids for output, answer in pairs)
    differences = [explain(target, output.prompt, output.output, answer.token_ids) for output, answer in pairs]
    ties = sum(difference is not None and difference.tie for difference in differences)
    wrong = [str(difference) for difference in differences if difference is not None and not difference.tie]
    print(f"outputs: {same} of {len(pairs)} equal ours token by token, {ties} differ where logits tie by rounding")
    print("\n".join(wrong) or "no other output differs")


def token_seconds(answers: Sequence[StreamedAnswer]) -> Floats:
    """Return the seconds per token of each answer."""
    return np.array([seconds(answer) / iteration_tokens(answer) for answer in answers])


def speeds(servers: dict[str, VllmServer], trace: Trace, lookahead: int) -> None:
    """Print TAR, predicted and measured speed-up of every draft."""
    plain = servers[PLAIN].answers
    times = {name: token_seconds(server.answers[JUDGED]) for name, server in servers.items()}
    predicted: dict[str, float] = {}
    print(f"without a draft: {1 / times[PLAIN].mean():.1f} tokens/s")
    heads = ("TAR", "counters", "replayed", "iteration", "predicted", "measured")
    print(f"{'draft':<16}" + "".join(f"{head:>10}" for head in heads) + "  95 %")
    for name in list(servers)[1:]:
        server = servers[name]
        replayed = sd.replay(trace, [sd.load(f"zoo:{name}", "float32", "cpu")]).drafts[0].replay
        iteration_costs = [  # time of an iteration / time of a plain token
            seconds(answer) / iterations(answer) / plain_token_s
            for answer, plain_token_s in zip(server.answers[TIMED], token_seconds(plain[TIMED]), strict=True)
        ]
        predicted[name] = replayed.tar(JUDGED)[lookahead] / median(iteration_costs)
        answers = [*server.answers[TIMED], *server.answers[JUDGED]]
        tar = sum(map(iteration_tokens, answers)) / sum(map(iterations, answers))
        counted_tar = 1 + server.counted["num_accepted_draft_tokens"] / server.counted["num_spec_steps"]
        measured, low, high = ratio(times[PLAIN], times[name])
        figures = (tar, counted_tar, replayed.tar()[lookahead], median(iteration_costs), predicted[name], measured)
        print(f"{name:<16}" + "".join(f"{figure:>10.3f}" for figure in figures) + f"  {low:.2f} to {high:.2f}")
    print("TAR: tokens kept / iterations; counters: 1 + accepted / drafts, including tokens after the limit")
    print("iteration: its time / time of a token without a draft; predicted, measured: speed-up on the set", JUDGED)
    order(predicted, times)


def ratio(slow: Floats, fast: Floats) -> tuple[float, float, float]:
    """Return the speed-up and its 95 % interval."""
    low, high = bootstrap(lambda draws: slow[draws].sum(1) / fast[draws].sum(1), len(slow))
    return float(slow.sum() / fast.sum()), float(low), float(high)


def order(predicted: dict[str, float], times: dict[str, Floats]) -> None:
    """Print whether pairs of drafts whose speeds differ clearly are ordered as predicted."""
    pairs = [(first, second, ratio(times[second], times[first])) for first, second in combinations(predicted, 2)]
    clear = [(first, second, speed_up) for first, second, (speed_up, low, high) in pairs if low > 1 or high < 1]
    right = [(a, b) for a, b, speed_up in clear if (speed_up > 1) == (predicted[a] > predicted[b])]
    wrong = [f"{first} and {second}" for first, second, _ in clear if (first, second) not in right]
    print("predicted order:", " > ".join(sorted(predicted, key=lambda name: -predicted[name])))
    print("measured order: ", " > ".join(sorted(predicted, key=lambda name: times[name].sum())))
    print(f"{len(clear)} of {len(pairs)} pairs of drafts differ clearly; {len(right)} of these in the predicted order")
    print(f"in the opposite order: {', '.join(wrong)}" if wrong else "none is in the opposite order")


if __name__ == "__main__":
    main()
