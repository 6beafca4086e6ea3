from shallowdraft.decoding.options import Options
from shallowdraft.decoding.timing import time_beside_plain
from shallowdraft.models.synthetic import make_pair
from shallowdraft.shapes.shape import ModelShape


def test_times_stand_beside_plain_ones():
    shapes = (ModelShape(layers, 32, 2, 48, 400, context=96) for layers in (2, 1))
    synthetic = make_pair(*shapes, 0.7, seed=3)
    candidates = [Options(draft=synthetic.draft, lookahead=d) for d in (1, 4)]
    found = time_beside_plain(synthetic.target, [[1, 2, 3]], candidates, warm_up=1, count=2, turns=3)
    assert [len(turn) for turn in found] == [2, 2, 2]
    for plain, times, state in (sample for turn in found for sample in turn):
        assert state.plain_s == plain.total_s / 2
        assert min(state.handover_s, state.arithmetic_s) >= 0
        assert plain.draft_s < plain.verify_s < plain.total_s
        assert 0 < times.draft_s < times.total_s
        assert times.prefill_s == 0
