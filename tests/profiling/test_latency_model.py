"""The latency model of draft steps: a fit finds the coefficients behind its data; trial shapes can be built."""

from math import log10

import pytest

from shallowdraft.errors import RecordError
from shallowdraft.profiling.latency_model import LatencyModel, Observation, figure_4, fit, layer_weights, trial_shapes
from shallowdraft.shapes.notation import parse_shape

PARENT = parse_shape("20x256/4h/688", vocab=8192)


def test_it_finds_what_it_was_made_with():
    truth = LatencyModel(3e-5, 2e-5, 1e-5, 2e-11, 1e-11)
    places = [(shape, d, context) for shape in trial_shapes(PARENT) for d in (2, 8) for context in (64, 1024)]
    fitted = fit([Observation(*place, truth.draft_s(*place)) for place in places])
    assert fitted.worst_error < 1e-6
    for name in ("start_s", "step_s", "layer_s", "weight_s", "attended_s"):
        assert log10(getattr(fitted, name)) == pytest.approx(log10(getattr(truth, name)), abs=1e-3)


def test_it_never_predicts_less_than_nothing():
    fitted = fit([Observation(shape, 4, 64, 1e-4) for shape in trial_shapes(PARENT)])
    assert min(fitted.start_s, fitted.step_s, fitted.layer_s, fitted.weight_s, fitted.attended_s) >= 0


def test_trial_shapes_vary_depth_and_width():
    shapes = trial_shapes(PARENT)
    assert {shape.layers for shape in shapes} == {1, 2, 4, 8}
    assert len({shape.d_model for shape in shapes}) >= 4
    assert all(shape.head_dim == PARENT.head_dim for shape in shapes)
    grouped = trial_shapes(parse_shape("4x64/4h/2kv/96", vocab=512))
    assert all(shape.heads % shape.kv_heads == 0 for shape in grouped)


@pytest.mark.parametrize("notation", ["20x256/4h/688", "32x4096/32h/8kv/14336", "12x768/12h/3072"])
def test_figure_4_keeps_what_it_says(notation: str):
    same, deep, wide = figure_4(parse_shape(notation)).values()
    assert [shape.layers for shape in same] == [shape.layers for shape in deep] == [1, 2, 4, 8]
    sizes = [layer_weights(shape) for shape in same]
    assert max(sizes) < 1.02 * min(sizes)
    assert len({(shape.d_model, shape.heads, shape.ffn) for shape in deep}) == 1
    assert len({shape.layers for shape in wide}) == 1
    assert [shape.d_model for shape in wide] == sorted((shape.d_model for shape in wide), reverse=True)


def test_too_few():
    with pytest.raises(RecordError, match="a latency model needs 5"):
        fit([])
