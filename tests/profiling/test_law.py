"""The law of draft steps: it finds the coefficients it was made with, and trial shapes are such as can be."""

from math import log10

import pytest

from shallowdraft.errors import RecordError
from shallowdraft.profiling.law import LatencyLaw, Observation, fit, trial_shapes
from shallowdraft.shapes import parse

PARENT = parse("20x256/4h/688", vocab=8192)


def test_it_finds_what_it_was_made_with():
    truth = LatencyLaw(2e-5, 1e-5, 2e-11, 1e-11, "float32")
    seen = [Observation(shape, c, truth.step_s(shape, c)) for shape in trial_shapes(PARENT) for c in (64, 1024)]
    found = fit(seen, "float32")
    assert found.worst_error < 1e-6
    for name in ("fixed_s", "layer_s", "byte_s", "attended_byte_s"):
        assert log10(getattr(found, name)) == pytest.approx(log10(getattr(truth, name)), abs=1e-3)


def test_it_never_predicts_less_than_nothing():
    seen = [Observation(shape, 64, 1e-4) for shape in trial_shapes(PARENT)]
    found = fit(seen, "float32")
    assert min(found.fixed_s, found.layer_s, found.byte_s, found.attended_byte_s) >= 0


def test_trial_shapes_vary_depth_and_width():
    shapes = trial_shapes(PARENT)
    assert {shape.layers for shape in shapes} == {1, 2, 4, 8}
    assert len({shape.d_model for shape in shapes}) == 4
    assert all(shape.head_dim == PARENT.head_dim for shape in shapes)
    grouped = trial_shapes(parse("4x64/4h/2kv/96", vocab=512))
    assert all(shape.heads % shape.kv_heads == 0 for shape in grouped)


def test_too_few():
    with pytest.raises(RecordError, match="a law needs 5"):
        fit([], "float32")
