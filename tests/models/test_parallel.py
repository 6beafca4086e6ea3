"""A target split over two processes gives the same output as in one."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import random_heads

import shallowdraft as sd
from shallowdraft import distributed
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import load_decoder
from shallowdraft.models.tensor_parallel import Split, SplitLayers, require_splittable
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.notation import parse_shape

TEXT = "Once upon a time there was"
IDS = [5, 17, 3, 88, 41]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
DRAFTED: list[dict] = [{}, SAMPLED]
MORE = [{"lookahead": "auto"}, {"drafter": "tree"}, {"drafter": "several", **SAMPLED}]
KINDS = ["llama-gqa-tied-head_dim", "llama-biases-linear-rope", "opt-350m"]


def outputs(kinds: dict[str, str], *, parallel: bool) -> dict[str, list[list[int]]]:
    """Generate in every case, with the zoo and with random models."""
    results = {}
    for kind, folder in kinds.items():
        model = sd.load(folder, parallel=parallel)
        draft = sd.load_draft("zoo:4x128" if kind == "zoo" else folder)
        cases = [{}, *({"draft": draft, **case} for case in (DRAFTED if kind == "zoo" else DRAFTED + MORE))]
        if kind != "zoo":
            cases += [{"drafter": "skip"}, {"drafter": "ngram"}]
            cases.append({"drafter": "medusa", "heads": random_heads(model, 2), "lookahead": 2, **SAMPLED})
        prompt = TEXT if kind == "zoo" else IDS
        results[kind] = [sd.generate(model, prompt, max_new_tokens=16, **case).token_ids for case in cases]
    return results


def without_a_sum(folder: str) -> list[int]:
    """What a mutant says, which never adds up the processes' shares."""
    from shallowdraft.models import tensor_parallel

    tensor_parallel.dist.all_reduce = lambda own: None
    return sd.generate(sd.load(folder, parallel=True), IDS, max_new_tokens=16).token_ids


def by_kernels(folder: str, rank: int) -> list[list[list[int]]]:
    """Choose the next token after each of a few, by PyTorch and by the GPU's kernels in Triton's interpreter."""
    from shallowdraft.kernels import gpu

    tiling = gpu.Tiling(outputs=16, inputs=32, warps=4, stages=2, dot=True)
    cpu = torch.device("cpu")
    decoder = load_decoder(Path(folder), dtype=torch.float32, device=cpu, split=Split(rank, 2))
    parts = decoder.local_shape, decoder.blocks, decoder.norm, decoder.head
    tokens, positions = torch.tensor([IDS]), torch.arange(len(IDS))[None]
    results = []
    with torch.inference_mode():
        for layers in (None, SplitLayers(*parts, lambda *_: tiling)):
            decoder.fused = layers
            results.append(decoder.choose(tokens, positions, decoder.new_cache(1, 32), 32, 97)[1].tolist()[0])
    return results


def in_process(job: tuple[int, int, dict[str, str]]) -> dict[str, list[list[int]]]:
    """Return the outputs of one of two processes."""
    rank, port, kinds = job
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    found = outputs(kinds, parallel=True)
    if find_spec("triton"):
        found |= {f"{kind} by kernels": by_kernels(kinds[kind], rank) for kind in KINDS[:2]}
    found["mutant"] = [without_a_sum(kinds[KINDS[0]])]
    distributed.leave()
    return found


@pytest.fixture(scope="module")
def split(folder):
    """Outputs of two processes, and those of a single one."""
    kinds = {"zoo": "zoo:target"} | {kind: str(folder(kind)) for kind in KINDS}
    alone = outputs(kinds, parallel=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("fork").Pool(2) as pool:  # torch is imported already
        return pool.map(in_process, [(rank, port, kinds) for rank in (0, 1)], chunksize=1), alone


def test_every_process_gives_the_output_of_a_single_one(split):
    (first, second), alone = split
    assert first == second
    for kind, tokens in alone.items():
        assert first[kind] == tokens


def test_kernels_with_sums_between_them_are_the_reference(split):
    pytest.importorskip("triton")
    (first, _), _ = split
    for kind in KINDS[:2]:
        reference, kernels = first[f"{kind} by kernels"]
        assert reference == kernels


def test_a_mutant_without_sums_is_caught(split):
    (first, _), alone = split
    assert first["mutant"][0] != alone[KINDS[0]][0]


def test_what_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OptionError, match="torchrun"):
        sd.load("zoo:target", parallel=True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for shape, dtype, why in (
        (NAMED["t5-small"], None, "encoder"),
        (parse_shape("2x96/6h/96"), "int8", "int8"),
        (parse_shape("2x96/4h/96"), None, "4 heads"),
        (parse_shape("2x96/6h/2kv/96"), None, "2 key/value heads"),
        (parse_shape("2x96/6h/100"), None, "100 FFN neurons"),
    ):
        with pytest.raises(OptionError, match=why):
            require_splittable(shape, dtype)


@pytest.mark.slow
def test_generate_prints_once():
    command = ["generate", "--target", "zoo:target", "--prompt", TEXT, "--max-new-tokens", "12", "--json"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0", "-m", "shallowdraft"]
    arguments = [sys.executable, *launch, *command, "--draft", "zoo:4x128", "--tensor-parallel"]
    done = subprocess.run(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["token_ids"] == sd.generate(sd.load("zoo:target"), TEXT, max_new_tokens=12).token_ids
