"""Show and use a run and its drafts: accuracy, report, export, bench, open_run."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.api.defaults import ServingEngine
from shallowdraft.api.inputs import (
    Names,
    as_list,
    gather_prompts,
    load_draft_model,
    open_trace,
    require_at_least,
    require_lookahead,
)
from shallowdraft.display.progress import Progress, following, saying
from shallowdraft.errors import OptionError
from shallowdraft.results import BenchResult, ReportFiles, Run
from shallowdraft.runs.accuracy import AccuracyResult, DraftScores, TaskScore, write_accuracy
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.trace import Trace

if TYPE_CHECKING:
    from shallowdraft.exporting.export import Exported
    from shallowdraft.prompts import Prompt


REPORT, COMPARISON = "report.html", "comparison.html"


def open_run(folder: str | Path) -> Run:
    """Open the folder of a run; its records are read when they are asked for: `.study`, `.trace`, `.profile` …"""
    path = Path(folder)
    if not path.is_dir():
        raise OptionError(f"{path}: there is no such folder; name the one that was given to study --out")
    return Run(path)


def accuracy(
    drafts: Names,
    *,
    sets: Names = ("mmlu", "hellaswag"),
    trace: Trace | str | Path | None = None,
    lookahead: int = 5,
    limit: int | None = None,
    out: str | Path | None = None,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> AccuracyResult:
    """Measure the drafts' accuracy on tasks by the likelihood of choices, and with a trace whether it foretells TAR.

    sets: samples that ship with the package, or files of {"prompt", "choices", "answer"} lines.
    trace: drafts are replayed on it, and TAR is taken at `lookahead`.
    limit: at most this many questions of each set. out: folder of a run, for `report` to show.
    """
    from shallowdraft.models.checkpoint import require_decoder_only
    from shallowdraft.replaying.model import replay_model
    from shallowdraft.studying.accuracy import claim, load_questions, score

    names = as_list(drafts)
    if not names:
        raise OptionError("no draft is named; name one or more checkpoints")
    require_lookahead(lookahead)
    require_at_least(1, **({} if limit is None else {"limit": limit}))
    require_decoder_only(*names)
    whole = None if trace is None else open_trace(trace)
    questions = {name: load_questions(name, limit) for name in as_list(sets)}
    scores: list[DraftScores] = []

    def steps() -> Iterator[int]:
        done = 0
        for name in names:
            draft = load_draft_model(name, draft_dtype or dtype, device)
            tar = replay_model(draft, whole).tar()[lookahead] if whole else None
            tasks: dict[str, TaskScore] = {}
            for task, asked in questions.items():
                for step in score(draft, asked):
                    if isinstance(step, TaskScore):
                        tasks[task] = step
                    else:
                        yield done + step
                done += len(asked)
            scores.append(DraftScores(name, tar, tasks, draft.digest))

    following(progress)("asking", steps(), len(names) * sum(map(len, questions.values())))
    claims = {task: claim(task, scores) for task in questions} if whole else {}
    target = (whole.target, whole.target_digest) if whole else ("", None)
    result = AccuracyResult(tuple(scores), claims, lookahead, *target)
    if out is not None:
        write_accuracy(RunFolder(Path(out)).accuracy, result)
    return result


def report(
    runs: "Names | Path | Sequence[str | Path]", out: str | Path | None = None, *, figures: str | Path | None = None
) -> ReportFiles:
    """Write one HTML page about a run, or a comparison of several.

    out: the file; by default report.html in the run, of several runs comparison.html in the first.
    figures: folder for every chart as SVG and PNG and every table as CSV and Markdown.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise OptionError("no run is named; name the folder that was given to study --out")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise OptionError("a run is named twice; name each once")
    try:
        from shallowdraft.reporting.figure_files import write_figures
        from shallowdraft.reporting.page import make_page, render
    except ImportError as error:
        raise OptionError(
            "the report needs altair and vl-convert; install them: pip install 'shallowdraft[report]'"
        ) from error
    from shallowdraft.records import write_whole
    from shallowdraft.reporting.reading import read_run

    page = make_page([read_run(folder) for folder in folders])
    path = Path(out) if out else folders[0] / (REPORT if len(folders) == 1 else COMPARISON)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(page))
    return ReportFiles(path, tuple(write_figures(page.figures, Path(figures))) if figures else ())


def export(
    draft: str,
    target: str,
    engine: ServingEngine,
    out: str | Path,
    *,
    study: str | Path | None = None,
    lookahead: int | None = None,
    dtype: str | None = None,
    progress: Progress = True,
) -> "Exported":
    """Write a draft for another engine, with the lookahead that a study found best and the command that starts it.

    study: folder of a study of this target and draft; or give the `lookahead` by hand.
    dtype: float32, bfloat16 or float16; by default what the checkpoint's config says.
    """
    from shallowdraft.exporting.advice import Advice, advise
    from shallowdraft.exporting.export import export as write_export
    from shallowdraft.models.checkpoint import require_decoder_only

    if dtype == "int8":
        raise OptionError("no other engine reads our int8; use float32, bfloat16 or float16")
    require_decoder_only(target, draft)
    if lookahead is not None:
        if study is not None:
            raise OptionError("--study says how far to look ahead; leave out --lookahead, or the study")
        require_lookahead(lookahead)
        advice = Advice(lookahead)
    elif study is None:
        raise OptionError("give --study with the folder of a study, or --lookahead with a number")
    else:
        advice = advise(Path(study), target, draft)
    for note in advice.notes:
        saying(progress)(note)
    return write_export(draft, target, engine, advice, Path(out), dtype)


def bench(
    url: str,
    model: str,
    prompts: "Names | Iterable[tuple[str, Prompt]]",
    out: str | Path,
    *,
    limit: int | None = None,
    concurrency: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 1,
    chat: bool = False,
    draft: str | None = None,
    lookahead: int | None = None,
    api_key: str | None = None,
    progress: Progress = True,
) -> BenchResult:
    """Measure any server that speaks OpenAI's protocol: latencies, tokens per second, and TAR where it counts it.

    out: file for the records, a line per request; in the folder of a study, `report` shows them beside its prediction.
    concurrency: requests at a time, measured in turn. repeats: how often each prompt is asked.
    draft, lookahead: what the server speculates with, by the name it has in a study.
    api_key: by default the environment's OPENAI_API_KEY; it is never written down.
    """
    from shallowdraft.benchmarking.endpoint import Endpoint
    from shallowdraft.benchmarking.levels import summarise
    from shallowdraft.benchmarking.load import Load, run_load

    if not concurrency:
        raise OptionError("--concurrency is empty; it must have a number of at least 1")
    require_at_least(1, concurrency=min(concurrency), max_new_tokens=max_new_tokens, repeats=repeats)
    if (draft is None) != (lookahead is None):
        raise OptionError("--draft and --lookahead go together: what the server speculates with, and how far")
    require_at_least(1, **({} if lookahead is None else {"lookahead": lookahead}))
    chosen, numbers = gather_prompts(prompts, limit), list(dict.fromkeys(concurrency))
    load = Load(
        chosen,
        numbers,
        max_new_tokens,
        rounds=repeats,
        temperature=temperature,
        chat=chat,
        draft=draft,
        lookahead=lookahead,
    )
    with closing(Endpoint(url, model, api_key or os.environ.get("OPENAI_API_KEY"))) as endpoint:
        endpoint.check()
        following(progress)(
            "asking the server", run_load(endpoint, load, Path(out)), len(chosen) * repeats * len(numbers)
        )
    levels = tuple(summarise(Path(out)))
    answered = {level.concurrency for level in levels}
    unanswered = tuple(number for number in numbers if number not in answered)
    return BenchResult(f"{model} at {endpoint.url}", levels, unanswered)
