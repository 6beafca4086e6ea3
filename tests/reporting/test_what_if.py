"""The sliders' expressions, as Vega evaluates them, against cost.py."""

import re
from dataclasses import replace

import altair as alt
import pytest
import vl_convert
from made_run import prediction

from shallowdraft.cost import Iteration, Prediction, Silence
from shallowdraft.reporting.sections.what_if import EXPRESSIONS, SLIDERS

POINTS = [prediction(at, lookahead) for at in (0, 3, 15) for lookahead in (1, 2, 7, 32)]
POINTS.append(replace(POINTS[-2], silence=Silence(200, 0.3, 0.1)))


def in_vega(settings: dict[str, float]) -> list[tuple[float, float]]:
    """Return throughput and speed-up of every point, as Vega computes them from the page's expressions."""
    rows = [
        {
            "number": number,
            "most_tar": point.most_tar,
            "tar": point.tar,
            "plain_s": point.plain_s,
            **point.iteration.to_json(),
        }
        for number, point in enumerate(POINTS)
    ]
    chart = alt.Chart(alt.InlineData(values=rows))
    for name, expression in EXPRESSIONS.items():
        chart = chart.transform_calculate(**{name: expression})
    said = "'=' + datum.number + ' ' + datum.tokens_per_s + ' ' + datum.speed_up + '='"
    chart = chart.transform_calculate(said=said).mark_text().encode(text="said:N")
    params = [alt.param(name=name, value=value) for name, value in settings.items()]
    svg = vl_convert.vegalite_to_svg(chart.add_params(*params).to_dict())
    results = {int(number): (float(a), float(b)) for number, a, b in re.findall(r">=(\d+) (\S+) (\S+)=<", svg)}
    return [results[number] for number in range(len(POINTS))]


def expected(point: Prediction, settings: dict[str, float]) -> Prediction:
    draft, target, acceptance, bandwidth = (settings[name] for name in SLIDERS)
    times = point.iteration
    tar = min(point.most_tar, 1 + (point.tar - 1) * acceptance)
    new = Iteration(times.draft_s * draft / bandwidth, times.verify_s * target / bandwidth, times.other_s)
    return Prediction(point.lookahead, tar, new, point.plain_s * target / bandwidth)


@pytest.mark.parametrize(
    "shares", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0), (1, 0, 0, 1), (0.3, 0.6, 0.8, 0.1)], ids=str
)
def test_the_page_computes_what_cost_does(shares: tuple[float, ...]):
    """Every slider is set at a share of its range."""
    ranges = {name: (low, high) for name, (_, low, high, _) in SLIDERS.items()}
    settings = {name: low + at * (high - low) for (name, (low, high)), at in zip(ranges.items(), shares, strict=True)}
    for point, (tokens_per_s, speed_up) in zip(POINTS, in_vega(settings), strict=True):
        reference = expected(point, settings)
        assert tokens_per_s == pytest.approx(reference.tokens_per_s, rel=1e-9)
        assert speed_up == pytest.approx(reference.speed_up, rel=1e-9)


def test_untouched_sliders_change_nothing():
    results = in_vega(dict.fromkeys(SLIDERS, 1.0))
    assert [speed_up for _, speed_up in results] == pytest.approx([point.speed_up for point in POINTS], rel=1e-9)
