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

from shallowdraft.reporting.figures import UNFINISHED, Figure, Gap, Section, shown
from shallowdraft.reporting.run import Entry, RunView
from shallowdraft.reporting.sections import bottleneck, drafts, improvement, lookaheads, servers, speed_up, wishes
from shallowdraft.reporting.sections.comparison import named, side_by_side, tar_across
from shallowdraft.reporting.sections.tokens import SOURCES, Generation, generations
from shallowdraft.reporting.sections.what_if import what_if

SNIPPET = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Page:
    """What a page says, before it is HTML."""

    title: str
    verdict: str
    facts: list[tuple[str, dict[str, str]]]
    """By run."""
    sections: list[Section]
    warnings: list[str] = field(default_factory=list)
    generations: list[Generation] | Gap | None = None

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def page_of(run: RunView) -> Page:
    sections = [
        Section("pays", "Does it pay?", [speed_up.speed_ups(run), speed_up.predicted_against_measured(run)]),
        Section(
            "draft",
            "Which draft?",
            [drafts.throughput_against_tar(run), drafts.tar_by_set(run), drafts.accuracy_against_tar(run)],
        ),
        Section(
            "lookahead-section",
            "Which lookahead?",
            [lookaheads.speed_by_lookahead(run), lookaheads.acceptance_by_position(run)],
        ),
        Section(
            "why", "Why?", [bottleneck.time_split(run), bottleneck.waterfall(run), bottleneck.latency_of_shapes(run)]
        ),
        Section(
            "better",
            "What would be better?",
            [wishes.required_tar(run), improvement.extra_tar(run), improvement.parity(run), what_if(run)],
        ),
        Section("production", "And in production?", [servers.gains(run), *servers.speeds(run)]),
    ]
    return Page(
        f"Speculation for {run.target}",
        verdict_of(run),
        [("", facts_of(run))],
        sections,
        _warnings(run),
        generations(run),
    )


def page_of_several(found: Sequence[RunView]) -> Page:
    runs = named(found)
    sections = [Section("comparison-section", "Side by side", side_by_side(runs))]
    if len({run.target for run in found}) > 1:
        sections.append(Section("targets-section", "TAR across targets and prompt sets", tar_across(runs)))
    first = sections[0].parts[0]
    return Page(
        ", ".join(runs),
        first.finding if isinstance(first, Figure) else first.sentence,
        [(name, {"verdict": verdict_of(run)} | facts_of(run)) for name, run in runs.items()],
        sections,
        [f"{name}: {warning}" for name, run in runs.items() for warning in _warnings(run)],
    )


def _warnings(run: RunView) -> list[str]:
    warnings = [f"{name} was left out: {why}" for name, why in run.failed.items()]
    again = f"To measure again, remove {run.folder}/live.jsonl and run the study."
    warnings += [f"{one.name}: {one.disturbed}. {again}" for one in run.entries if one.disturbed]
    warnings += [f"{one.name} is {one.best.silence}." for one in run.predicted if one.best.silence]
    if run.stalled:
        warnings.append(f"The machine stalled on {', '.join(run.stalled)}: left out of what was measured. {again}")
    return warnings


def verdict_of(run: RunView) -> str:
    if run.verdict is None:
        return UNFINISHED
    first = run.entries[0]
    said = run.verdict.replace(first.name, first.label)
    return f"{said[0].upper()}{said[1:]}."


def facts_of(run: RunView) -> dict[str, str]:
    """What the first screen says beside the verdict."""
    about = run.about
    found = {"target": " ".join(filter(None, (run.target, about.get("shape"), about.get("dtype"))))}
    for first in run.predicted[:1]:
        found["fastest"] = f"{first.label} {first.best.where}"
        found["speed-up"] = _speed_up(first)
    if run.plain_tokens_per_s:
        found["plain decoding"] = f"{shown(run.plain_tokens_per_s)} tokens a second"
    found["outputs"] = _outputs(run)
    threads = f", threads: {about['threads']}" if about.get("threads") else ""
    found["hardware"] = f"{about.get('device', 'unknown: nothing was timed')}{threads}"
    found["date"] = run.time.replace("T", " ").replace("Z", " UTC")
    return found


def _speed_up(first: Entry) -> str:
    low, high = first.bounds
    return f"{first.speed_up:.2f} times ({low:.2f} to {high:.2f}), {first.how}{'' if first.live else ', not measured'}"


def _outputs(run: RunView) -> str:
    if not run.outputs:
        return "not compared: nothing was run live"
    wrong, ties = run.outputs.count(False), run.outputs.count(None)
    if wrong:
        return f"{wrong} of {len(run.outputs)} differ from plain decoding, see live.jsonl"
    same = f"identical to plain decoding in all {len(run.outputs)} live runs"
    return same if not ties else f"{same}, but for ties of rounding in {ties}"


def render(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("shallowdraft.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        page=page,
        sources=SOURCES,
        specs=_script({figure.id: figure.spec() for figure in page.figures}),
        style=Markup(_text("page.css")),
        script=Markup(_text("page.js")),
        bundle=_bundle(),
        is_gap=lambda one: isinstance(one, Gap),
    )


@cache
def _bundle() -> Markup:
    """Vega, Vega-Lite and Vega-Embed."""
    return Markup(vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script"))


def _text(name: str) -> str:
    return resources.files("shallowdraft.reporting").joinpath(name).read_text(encoding="utf-8")


def _script(content: dict[str, Any]) -> Markup:
    """JSON that no browser takes for markup."""
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))


def make(runs: Sequence[RunView]) -> Page:
    """Of one run, or of several that are compared."""
    return page_of(runs[0]) if len(runs) == 1 else page_of_several(runs)
