"""The page: one HTML file that needs nothing else."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shallowdraft.display.tabular import format_cell
from shallowdraft.reporting.figures import UNFINISHED, Figure, Gap, Section, interval
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.reporting.sections import bottleneck, drafts, improvement, lookaheads, servers, speed_up
from shallowdraft.reporting.sections.comparison import compare_speed_ups, compare_tar, name_runs
from shallowdraft.reporting.sections.tokens import SOURCE_MEANINGS, ShownPrompt, shown_prompts
from shallowdraft.reporting.sections.what_if import what_if

SNIPPET = "window.vegaEmbed = vegaEmbed;"  # makes the bundled library visible to page.js


@dataclass(frozen=True)
class Page:
    """The content of a page, before it is HTML."""

    title: str
    verdict: str
    facts: list[tuple[str, dict[str, str]]]
    """The name of each run and its facts."""
    sections: list[Section]
    warnings: list[str] = field(default_factory=list)
    prompts: list[ShownPrompt] | Gap | None = None
    """Outputs token by token; None on a page of several runs."""

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def make_page(runs: Sequence[RunView]) -> Page:
    """Make the page of one run, or of several that are compared."""
    return page_of(runs[0]) if len(runs) == 1 else page_of_several(runs)


def page_of(run: RunView) -> Page:
    """Make the page of one run."""
    sections = [
        Section(
            "speed-up-section",
            "Does speculation pay?",
            [speed_up.speed_ups(run), speed_up.predicted_against_measured(run)],
        ),
        Section(
            "drafts-section",
            "Which draft?",
            [drafts.throughput_against_tar(run), drafts.tar_by_set(run), drafts.accuracy_against_tar(run)],
        ),
        Section(
            "lookaheads-section",
            "Which lookahead?",
            [lookaheads.speed_by_lookahead(run), lookaheads.acceptance_by_position(run)],
        ),
        Section(
            "bottleneck-section",
            "What limits the speed-up?",
            [bottleneck.time_split(run), bottleneck.waterfall(run), bottleneck.latency_of_shapes(run)],
        ),
        Section(
            "improvement-section",
            "What would make it faster?",
            [improvement.required_tar(run), improvement.extra_tar(run), improvement.parity(run), what_if(run)],
        ),
        Section(
            "servers-section",
            "How fast is it on a server?",
            [servers.server_speed_ups(run), *servers.server_throughput(run)],
        ),
    ]
    return Page(
        f"Speculative decoding of {run.target}",
        verdict_of(run),
        [("", facts_of(run))],
        sections,
        _warnings(run),
        shown_prompts(run),
    )


def page_of_several(runs: Sequence[RunView]) -> Page:
    """Make the page that compares several runs."""
    by_name = name_runs(runs)
    sections = [Section("comparison-section", "How do the runs compare?", compare_speed_ups(by_name))]
    if len({run.target for run in runs}) > 1:
        sections.append(Section("targets-section", "How does TAR depend on the target?", compare_tar(by_name)))
    first = sections[0].parts[0]
    return Page(
        ", ".join(by_name),
        first.finding if isinstance(first, Figure) else first.sentence,
        [(name, {"verdict": verdict_of(run)} | facts_of(run)) for name, run in by_name.items()],
        sections,
        [f"{name}: {warning}" for name, run in by_name.items() for warning in _warnings(run)],
    )


def _warnings(run: RunView) -> list[str]:
    warnings = [f"{name} was left out: {why}" for name, why in run.failed.items()]
    again = f"To measure again, remove {run.folder}/live.jsonl and run the study."
    warnings += [f"{entry.name}: {entry.disturbed}. {again}" for entry in run.entries if entry.disturbed]
    warnings += [f"{entry.name} is {entry.best.silence}." for entry in run.predicted if entry.best.silence]
    if run.stalled:
        warnings.append(f"Measured speed-ups leave out {', '.join(run.stalled)}, where the machine stalled. {again}")
    return warnings


def verdict_of(run: RunView) -> str:
    """Return the headline, which says whether speculation pays."""
    if run.verdict is None:
        return UNFINISHED
    verdict = run.verdict.replace(" %", "\N{NO-BREAK SPACE}%")
    return f"{verdict[0].upper()}{verdict[1:]}."


def facts_of(run: RunView) -> dict[str, str]:
    """Return the facts under the headline, by their names."""
    about = run.about
    facts = {"target": " ".join(filter(None, (run.target, about.get("shape"), about.get("dtype"))))}
    for fastest in run.predicted[:1]:
        facts["fastest"] = f"{fastest.label} {fastest.best.where}"
        facts["speed-up"] = _speed_up(fastest)
    if run.plain_tokens_per_s:
        facts["plain decoding"] = f"{format_cell(run.plain_tokens_per_s)} tokens per second"
    facts["outputs"] = _outputs(run)
    threads = f", threads: {about['threads']}" if about.get("threads") else ""
    facts["hardware"] = f"{about.get('device', 'unknown: nothing was timed')}{threads}"
    facts["date"] = run.time.replace("T", " ").replace("Z", " UTC")
    return facts


def _speed_up(entry: Entry) -> str:
    basis = entry.basis if entry.live else "predicted, not measured"
    return f"{entry.speed_up:.2f} times ({interval(entry.bounds)}), {basis}"


def _outputs(run: RunView) -> str:
    if not run.outputs:
        return "not compared: nothing was run live"
    wrong, ties = run.outputs.count(False), run.outputs.count(None)
    if wrong:
        return f"{wrong} of {len(run.outputs)} live runs differ from plain decoding, see live.jsonl"
    same = f"identical to plain decoding in all {len(run.outputs)} live runs"
    return same if not ties else f"{same}, except for rounding ties in {ties}"


def render(page: Page) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("shallowdraft.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        page=page,
        source_meanings=SOURCE_MEANINGS,
        specs=_script({figure.id: figure.spec() for figure in page.figures}),
        style=Markup(_text("page.css")),
        script=Markup(_text("page.js")),
        bundle=_bundle(),
        is_gap=lambda part: isinstance(part, Gap),
    )


@cache
def _bundle() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed."""
    return Markup(vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script"))


def _text(name: str) -> str:
    return resources.files("shallowdraft.reporting").joinpath(name).read_text(encoding="utf-8")


def _script(content: dict[str, Any]) -> Markup:
    """Return JSON in which no browser finds markup."""
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))
