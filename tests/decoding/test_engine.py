"""An iteration never waits for the device: no call in it needs a value, and no shape depends on one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from conftest import noisy
from torch.utils._python_dispatch import TorchDispatchMode

import shallowdraft as sd
from shallowdraft.decoding import sampling as laws
from shallowdraft.decoding.drafters.drafter import NoDrafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.engine import Engine
from shallowdraft.decoding.state import State
from shallowdraft.models.checkpoint import load_decoder
from shallowdraft.runs.sampling import Sampling

# What makes a host wait for a GPU: reading a value, or a result whose size depends on values.
SYNCHRONISING = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "unique",
    "repeat_interleave.Tensor",
    "bincount",
    "allclose",
)


class SynchronisingCalls(TorchDispatchMode):
    """Counts calls that would make the host wait, boolean indexing included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__ if hasattr(func, "__name__") else str(func)
        self.total += 1
        if any(name.startswith(one) for one in SYNCHRONISING):
            self.calls[name] += 1
        if name.startswith("index.") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.calls["boolean index"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pair(folder):
    """Models on PyTorch's operations, which are what a GPU runs and what can be counted."""

    def make(kind: str, noise: float = 0.05) -> tuple[sd.Model, sd.Model]:
        decoder = load_decoder(folder(kind), dtype=torch.float32, device=torch.device("cpu"))
        target = sd.Model(kind, decoder)
        return target, noisy(target, noise, pack=False)

    return make


def engine(target: sd.Model, draft: sd.Model, sampling: Sampling, rows: int) -> Engine:
    prompts = [[1, 2, 3, 4, 5][: 1 + row] for row in range(rows)]
    drafter = ModelDrafter(draft.decoder, 4, sampling, target.shape.vocab)
    return Engine.for_prompts(target.decoder, drafter, sampling, prompts, [60] * rows)


SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.8, top_k=5, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "temperature", "top-k-p"])
@pytest.mark.parametrize("kind", ["llama-gqa-tied-head_dim", "mistral-window", "qwen3", "opt-350m"])
def test_an_iteration_synchronises_nowhere(pair, kind: str, sampling: Sampling):
    assert_never_waits(engine(*pair(kind), sampling, rows=3))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """On a CPU a look costs nothing, and may save work."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(laws, "_host_may_read", lambda _: False)
        yield


def assert_never_waits(running: Engine) -> None:
    running.prefill()
    with as_on_a_gpu(), SynchronisingCalls() as seen:
        for _ in range(3):
            running.iterate()
    assert seen.total > 300
    assert not seen.calls


def test_the_count_sees_a_synchronising_call(pair, monkeypatch):
    real = State.commit

    def commit(self, verdict):
        real(self, verdict)
        if verdict.accepted.sum() > 2:
            self.length[self.length > 0] += 0

    running = engine(*pair("llama"), Sampling(), rows=2)
    running.prefill()
    monkeypatch.setattr(State, "commit", commit)
    with SynchronisingCalls() as seen:
        for _ in range(5):
            running.iterate()
    assert seen.calls


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "temperature", "top-k-p"])
def test_shapes_do_not_depend_on_acceptance(pair, sampling: Sampling):
    """Two drafts, one that is always right and one that never is: the same operations on the same sizes."""

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, tuple[int, ...]]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.seen.append((func.__name__, tuple(out.shape)))
            return out

    seen = []
    for noise in (0.0, 3.0):
        running = engine(*pair("llama", noise), sampling, rows=3)
        running.prefill()
        with as_on_a_gpu(), Sizes() as sizes:
            running.iterate()
            running.iterate()
        seen.append(sizes.seen)
    assert seen[0] == seen[1]


def test_plain_decoding_is_lookahead_zero(pair):
    target, _ = pair("llama")
    running = Engine.for_prompts(target.decoder, NoDrafter(), Sampling(), [[1, 2, 3]], [20])
    emitted = [out for out, _ in zip(running.run(), range(10), strict=False)]
    assert all(len(out) == 1 and len(out[0]) == 2 and out[0][0] == 0 for out in emitted)
    assert [out[0][1] for out in emitted] == sd.generate(target, [1, 2, 3], max_new_tokens=10).token_ids
