"""The sliders' formula is that of cost.py: Vega computes it, cost.py says what it must be."""

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
    """Throughput and speed-up of every point, as the page's expressions give them."""
    rows = [
        {"number": number, "most_tar": one.most_tar, "tar": one.tar, "plain_s": one.plain_s, **one.iteration.to_json()}
        for number, one in enumerate(POINTS)
    ]
    chart = alt.Chart(alt.InlineData(values=rows))
    for name, expression in EXPRESSIONS.items():
        chart = chart.transform_calculate(**{name: expression})
    said = "'=' + datum.number + ' ' + datum.tokens_per_s + ' ' + datum.speed_up + '='"
    chart = chart.transform_calculate(said=said).mark_text().encode(text="said:N")
    params = [alt.param(name=name, value=value) for name, value in settings.items()]
    svg = vl_convert.vegalite_to_svg(chart.add_params(*params).to_dict())
    found = {int(number): (float(a), float(b)) for number, a, b in re.findall(r">=(\d+) (\S+) (\S+)=<", svg)}
    return [found[number] for number in range(len(POINTS))]


def expected(one: Prediction, settings: dict[str, float]) -> Prediction:
    draft, target, acceptance, bandwidth = (settings[name] for name in SLIDERS)
    times = one.iteration
    tar = min(one.most_tar, 1 + (one.tar - 1) * acceptance)
    new = Iteration(times.draft_s * draft / bandwidth, times.verify_s * target / bandwidth, times.other_s)
    return Prediction(one.lookahead, tar, new, one.plain_s * target / bandwidth)


@pytest.mark.parametrize(
    "shares", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0), (1, 0, 0, 1), (0.3, 0.6, 0.8, 0.1)], ids=str
)
def test_the_page_computes_what_cost_does(shares: tuple[float, ...]):
    """With every slider at so much of its range."""
    ranges = {name: (low, high) for name, (_, low, high, _) in SLIDERS.items()}
    settings = {name: low + at * (high - low) for (name, (low, high)), at in zip(ranges.items(), shares, strict=True)}
    for one, (tokens_per_s, speed_up) in zip(POINTS, in_vega(settings), strict=True):
        wanted = expected(one, settings)
        assert tokens_per_s == pytest.approx(wanted.tokens_per_s, rel=1e-9)
        assert speed_up == pytest.approx(wanted.speed_up, rel=1e-9)


def test_untouched_sliders_change_nothing():
    found = in_vega(dict.fromkeys(SLIDERS, 1.0))
    assert [speed_up for _, speed_up in found] == pytest.approx([one.speed_up for one in POINTS], rel=1e-9)
