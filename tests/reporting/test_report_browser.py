"""The page in Chromium, without a network: charts, sliders, tooltips, themes; screenshots are left in build/."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_run import make_run
from test_report_page import ACCURACY, CHARTS

from shallowdraft.cli import main

pytestmark = pytest.mark.browser
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
READY_S = 3.0


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium")
    assert executable, "there is no chromium; apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of two drafts with a hostile prompt, of twenty drafts with everything, and of several runs."""
    folder = tmp_path_factory.mktemp("reports")
    evil = "document.title = 'owned'"
    image = f'<img src=x onerror="{evil}">'
    hostile = make_run(folder / "one", 2, prompt=f"</script><script>{evil}</script>", name=image)
    sets = ["mmlu", "hellaswag", "arena", "spec-bench", "humaneval", "gsm8k"]
    many = make_run(folder / "many", 20, sets=sets, lookaheads=12, shapes=True)
    (many / "accuracy.json").write_text(json.dumps(ACCURACY))
    for run in (hostile, many):
        assert main(["report", str(run)]) == 0
    other = make_run(folder / "other", 3, sets=sets[:2], target="made/other")
    assert main(["report", str(hostile), str(many)]) == 0
    assert main(["report", str(other), str(hostile), str(many)]) == 0
    return {
        "one": hostile / "report.html",
        "many": many / "report.html",
        "two": hostile / "comparison.html",
        "three": other / "comparison.html",
    }


@pytest.fixture
def visit(chromium):
    """Return a function that opens a page; every message on the console is an error at the end."""
    complaints: list[str] = []

    def opened(path: Path, width: int = 1100, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_function("window.drawn")
        page.evaluate("window.drawn.then(() => null)")
        return page

    yield opened
    assert complaints == []


def drawn(page: Any) -> set[str]:
    """Charts that have marks."""
    return set(
        page.evaluate("""
        [...document.querySelectorAll("[data-chart]")]
            .filter(place => place.querySelector("svg .role-mark path, svg .role-mark line"))
            .map(place => place.dataset.chart)
    """)
    )


@pytest.mark.parametrize("name", ["one", "many", "two", "three"])
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (1100, "dark"), (390, "light")])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_page(visit, reports, name: str, width: int, scheme: str):
    page = visit(reports[name], width, scheme)
    expected = {
        "one": CHARTS,
        "many": CHARTS | {"latency", "accuracy"},
        "two": {"comparison"},
        "three": {"comparison", "targets"},
    }
    assert drawn(page) == expected[name]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ready_ms = page.evaluate("performance.now()")
    assert ready_ms < 1000 * READY_S or name != "many"
    assert page.title() != "owned"
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)


def test_a_slider_changes_the_best_choice(visit, reports):
    page = visit(reports["many"])
    said = page.locator("#what-if svg text", has_text="tokens/s").first
    before = said.text_content()
    slider = page.locator("#what-if input[name=draft_latency]")
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("before => !document.querySelector('#what-if').textContent.includes(before)", arg=before)
    assert said.text_content() != before


def test_a_tooltip_opens(visit, reports):
    page = visit(reports["one"])
    page.locator("#throughput svg .role-mark path").first.hover()
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "tokens per second" in tooltip.text_content()
    assert "onerror" in tooltip.text_content()
    assert page.title() != "owned"


def test_the_rejected_proposal_is_shown_on_focus(visit, reports):
    page = visit(reports["one"])
    token = page.locator(".token[data-tip]").first
    token.focus()
    content = token.evaluate("token => getComputedStyle(token, '::after').content")
    assert "<b>sits" in content


def test_the_theme_switches_and_charts_follow(visit, reports):
    page = visit(reports["one"])
    colours = """() => [
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector("svg .role-axis-label text")).fill,
    ]"""
    before = page.evaluate(colours)
    page.get_by_role("button").click()
    after = page.evaluate(colours)
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after[0]  # it is remembered
