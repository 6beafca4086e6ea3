"""The verifier that is chosen, and that all of them emit the same: Triton's kernels here in its interpreter."""

from functools import partial

import pytest
from conftest import noisy

import shallowdraft as sd
from shallowdraft.decoding import engine, verifiers
from shallowdraft.decoding.verifiers import (
    choose_verifier,
    general,
    greedy_choice,
    tree,
    triton_greedy,
    triton_sampled,
)
from shallowdraft.models.synthetic import random_decoder
from shallowdraft.shapes.notation import parse_shape

PROMPTS = [[5, 17, 3, 41] * 3, [60], [8] * 9]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"greedy": True}, greedy_choice),
        ({"greedy": False}, general),
        ({"greedy": False, "rule": "block"}, general),
        ({"greedy": True, "triton": True}, triton_greedy),
        ({"greedy": False, "triton": True}, triton_sampled),
        ({"greedy": False, "triton": True, "rule": "block"}, general),
        ({"greedy": True, "triton": True, "branching": True}, tree),
        ({"greedy": False, "branching": True}, tree),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_verifier_is_chosen(options: dict[str, object], expected: verifiers.Verifier):
    assert choose_verifier(**{"branching": False, "rule": "token", "triton": False} | options) is expected


@pytest.fixture(scope="module")
def models() -> tuple[sd.Model, sd.Model]:
    target = sd.Model("target", random_decoder(parse_shape("3x64/4h/96", vocab=97), seed=1, scale=2.0))
    return target, noisy(target, 0.05, pack=False)


@pytest.mark.parametrize("strategy", [{"lookahead": 4}, {"drafter": "ngram", "lookahead": 4}, {}], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 9}], ids=str)
def test_tritons_kernels_emit_what_pytorch_does(
    models: tuple[sd.Model, sd.Model], strategy: dict, sampling: dict, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton")
    target, draft = models
    options = {"max_new_tokens": 25, "stop_tokens": ()} | strategy | sampling
    if strategy == {"lookahead": 4}:
        options["draft"] = draft
    plain = sd.generate(target, PROMPTS, **options)
    used = []

    def chosen(*, triton: bool, **others: object) -> verifiers.Verifier:
        used.append(partial(choose_verifier, triton=True)(**others))
        return used[-1]

    monkeypatch.setattr(engine, "choose_verifier", chosen)
    kernels = sd.generate(target, PROMPTS, **options)
    assert set(used) == {triton_sampled if sampling else triton_greedy}
    assert [out.token_ids for out in kernels] == [out.token_ids for out in plain]
    assert [out.accepted_by_iteration for out in kernels] == [out.accepted_by_iteration for out in plain]


def test_a_packed_model_verifies_in_one_call(models: tuple[sd.Model, sd.Model], monkeypatch: pytest.MonkeyPatch):
    """And emits the same without that call."""
    target = sd.Model("target", random_decoder(parse_shape("3x64/4h/96", vocab=97), seed=1, scale=2.0).pack())
    if target.decoder.native is None:
        pytest.skip("no C kernel on this machine")
    options = {"draft": noisy(models[0], 0.05), "lookahead": 4, "max_new_tokens": 25}
    with monkeypatch.context() as patched:
        patched.setattr(verifiers, "verify_choice", None)  # would fail if it were called
        fused = sd.generate(target, PROMPTS, **options)
    monkeypatch.setattr(type(target.decoder), "commit_greedy", lambda *_: None)
    assert [out.token_ids for out in sd.generate(target, PROMPTS, **options)] == [out.token_ids for out in fused]
