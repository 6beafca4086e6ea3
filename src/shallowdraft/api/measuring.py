"""Record, replay, profile, predict, study."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shallowdraft.api.defaults import ALL_LOOKAHEADS, PROFILED_LOOKAHEADS, StudyDrafter
from shallowdraft.api.inputs import (
    Lookaheads,
    Names,
    as_list,
    executor,
    gather_prompts,
    load_draft_model,
    load_target,
    open_profile,
    open_trace,
    parse_lookaheads,
    require_at_least,
    require_lookahead,
    shape_of,
)
from shallowdraft.display.progress import Progress, following, saying
from shallowdraft.errors import OptionError, ShallowdraftError
from shallowdraft.results import DraftPrediction, DraftReplay, DraftTree, Predictions, Replays
from shallowdraft.runs.profile import Profile
from shallowdraft.runs.study import StudyResult
from shallowdraft.runs.trace import Trace

if TYPE_CHECKING:
    from shallowdraft.models.model import Model
    from shallowdraft.prompts import Prompt
    from shallowdraft.studying.proposers import Proposer


def record(
    target: "str | Model",
    prompts: "Names | Iterable[tuple[str, Prompt]]",
    out: str | Path,
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    samples: int = 1,
    seed: int = 0,
    batch: int = 8,
    chat: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> Trace:
    """Record what a target writes after each prompt; `replay` then knows the acceptance of any draft.

    target: the model, loaded or by name.
    prompts: sets that ship with the package (see `shallowdraft record --help`), and files of {"prompt"} lines.
    out: the trace, a file of JSON lines.
    limit: at most this many prompts of each set.
    max_new_tokens: tokens to write after each prompt.
    temperature, top_k, top_p, samples, seed: how tokens are drawn, and how often; temperature 0 is greedy.
    batch: prompts at a time. chat: put each prompt through the target's chat template as the user's turn.
    dtype, device: as for `load`.
    """
    from shallowdraft.replaying import recording
    from shallowdraft.runs.sampling import Sampling
    from shallowdraft.runs.trace import read_trace

    require_at_least(1, max_new_tokens=max_new_tokens, samples=samples, batch=batch)
    sampling = Sampling(temperature, top_k, top_p, seed)
    if sampling.greedy and samples > 1:
        raise OptionError("greedy samples are all the same; give a temperature above 0")
    chosen = gather_prompts(prompts, limit)
    steps = recording.record(
        load_target(target, dtype, device),
        chosen,
        Path(out),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        samples=samples,
        batch=batch,
        chat=chat,
    )
    following(progress)("recording", steps, len(chosen) * samples)
    return read_trace(Path(out))


def import_trace(
    file: str | Path,
    target: str,
    out: str | Path,
    *,
    format: Literal["completions", "tensors"] = "completions",  # noqa: A002
    prompts: str | Path | None = None,
) -> Trace:
    """Write a trace from another engine's outputs; only config and tokenizer of the target are read.

    file: OpenAI-style responses with token ids, one a line; or with `format="tensors"` the paper authors' printed
    tensors, one for each prompt of the file `prompts`.
    """
    from shallowdraft.identity import folder_digest
    from shallowdraft.models.checkpoint import find_folder, read_shape, require_decoder_only
    from shallowdraft.models.vocabulary import load_tokenizer
    from shallowdraft.replaying.trace_import import import_completions, import_tensors, write_trace
    from shallowdraft.replaying.vocabulary import vocabulary
    from shallowdraft.runs.trace import read_trace

    require_decoder_only(target)
    folder = find_folder(target, weights=False)
    tokenizer = load_tokenizer(folder)
    if format == "completions":
        sampling, outputs = import_completions(Path(file))
    elif prompts is None or tokenizer is None:
        raise OptionError("tensors need the prompts that they belong to, and a target with a tokenizer")
    else:
        sampling, outputs = import_tensors(Path(file), Path(prompts), tokenizer)
    ids = vocabulary(tokenizer, read_shape(folder).vocab)
    write_trace(Path(out), target, ids, sampling, outputs, Path(file), folder_digest(folder))
    return read_trace(Path(out))


def replay(
    trace: Trace | str | Path,
    drafts: "Names | Iterable[Model]",
    *,
    nodes: int | None = None,
    min_confidence: Sequence[float] = (),
    lookahead: int = 5,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
    cluster: str | None = None,
) -> Replays:
    """Run each draft once over a trace: tokens per iteration (TAR) at every lookahead from 1 to 32.

    trace: what `record` returned, or its file.
    drafts: models, loaded or by name.
    nodes: also find the tree of this many nodes that keeps most of each draft's choices.
    min_confidence: also find what drafting only while the draft is this sure would keep, of at most `lookahead` tokens.
    dtype, draft_dtype, device: as for `load` and `load_draft`. cluster: address of a Ray cluster to replay on.
    """
    require_lookahead(lookahead)
    whole = open_trace(trace)
    listed: list[str | Model] = [drafts] if isinstance(drafts, str) else list(drafts)
    by_name = {draft if isinstance(draft, str) else draft.name: draft for draft in listed}
    if not by_name:
        raise OptionError("no draft is named; name one or more checkpoints")
    load = partial(load_draft_model, dtype=draft_dtype or dtype, device=device)
    work = partial(_replay_draft, whole, load, by_name, nodes, tuple(min_confidence), lookahead)
    results = dict(executor(cluster, device).map(work, list(by_name)))
    replays, failed = [], {}
    for number, name in enumerate(by_name):
        result = results[number]
        if isinstance(result, ShallowdraftError):
            if len(by_name) == 1:
                raise result
            failed[name] = str(result)
        else:
            replays.append(result)
    return Replays(whole, tuple(replays), failed)


def _replay_draft(
    trace: Trace,
    load: "Callable[[str | Model], Model]",
    drafts: "Mapping[str, str | Model]",
    nodes: int | None,
    min_confidence: tuple[float, ...],
    lookahead: int,
    name: str,
) -> DraftReplay | ShallowdraftError:
    from shallowdraft.replaying.confidence import replay_confidences
    from shallowdraft.replaying.model import replay_model
    from shallowdraft.replaying.tree import replay_ranks

    try:
        draft = load(drafts[name])
        tree = None
        if nodes is not None:
            ranks = replay_ranks(draft, trace)
            best = ranks.tree(nodes)
            tree = DraftTree(best.parents, best.depth, ranks.tar(best))
        confidence = tuple(replay_confidences(draft, trace, lookahead, min_confidence)) if min_confidence else ()
        return DraftReplay(name, replay_model(draft, trace), tree, confidence)
    except ShallowdraftError as error:
        return error


def profile(
    target: "str | Model",
    drafts: Names,
    out: str | Path,
    *,
    shapes: Names = (),
    parent: str | None = None,
    lookaheads: Lookaheads = PROFILED_LOOKAHEADS,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    rounds: int = 3,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> Profile:
    """Time a target and drafts on this machine, each sample between two of plain decoding.

    drafts: names of draft models; may be empty if there are shapes.
    out: the profile, a file of JSON lines; another draft adds to it.
    shapes: shapes to time with random weights, like 2x256/4h/688; "auto" for those that `design` needs.
    parent: the model whose family and sizes the shapes take; by default the target.
    lookaheads, contexts, batches: where to time; without contexts at 64 and 256 tokens, as far as models have room.
    rounds: samples of each.
    """
    from shallowdraft.models.checkpoint import require_decoder_only
    from shallowdraft.profiling.models import profile_models, random_shapes

    names, notations, tried = as_list(drafts), as_list(shapes), parse_lookaheads(lookaheads)
    if not (names or notations):
        raise OptionError("there is nothing to time; name a draft, or shapes (auto)")
    if not batches or min((*contexts, *batches, rounds)) < 1:
        raise OptionError("contexts, batches and rounds must be at least 1")
    require_decoder_only(*names, *([parent] if parent else []))
    by_name = random_shapes(notations, shape_of(parent or target))
    return profile_models(
        load_target(target, dtype, device),
        {name: load_draft_model(name, draft_dtype or dtype, device) for name in names},
        by_name,
        Path(out),
        lookaheads=tried,
        contexts=tuple(contexts),
        batches=tuple(batches),
        rounds=rounds,
        draft_dtype=draft_dtype,
        follow=following(progress),
        say=saying(progress),
    )


def predict(
    replays: Replays | Trace | str | Path,
    profile: Profile | str | Path,
    *,
    drafts: "Names | None" = None,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
) -> Predictions:
    """Predict throughput and the best lookahead of drafts, from their acceptance and the machine's times.

    replays: what `replay` returned; or a trace, over which `drafts` (by default those in the profile) are replayed now.
    profile: what `profile` returned, or its file; measured on this machine.
    """
    from shallowdraft import cost
    from shallowdraft.models.model import resolve_device
    from shallowdraft.profiling.measure import require_machine
    from shallowdraft.studying.forecast import forecast, interval

    timed = open_profile(profile)
    trace = replays.trace if isinstance(replays, Replays) else open_trace(replays)
    timed.require_target(f"{trace.target}, whose trace this is,", trace.target_digest)
    names = as_list(drafts) if drafts is not None else timed.drafts
    if not isinstance(replays, Replays) and not names:
        raise OptionError("the profile has the times of no draft model; name one with profile --drafts")
    require_machine(timed, resolve_device(device))
    if not isinstance(replays, Replays):
        loaded = [load_draft_model(name, draft_dtype or dtype, device) for name in names]
        replays = replay(trace, loaded)
    predictions = []
    for draft in replays.drafts:
        curve = forecast(draft.replay, timed)
        best = cost.best(curve)
        predictions.append(DraftPrediction(draft.draft, best, interval(draft.replay, best), tuple(curve.values())))
    predictions.sort(key=lambda draft: -draft.prediction.tokens_per_s)
    return Predictions(tuple(predictions), tuple(timed.notes))


def study(
    target: "str | Model",
    drafts: Names = (),
    *,
    prompts: "Names | Iterable[tuple[str, Prompt]]",
    out: str | Path,
    drafters: Sequence[StudyDrafter] = ("model",),
    node_counts: Sequence[int] = (),
    heads: str | Path | None = None,
    skips: str | Path | None = None,
    lookaheads: Lookaheads = ALL_LOOKAHEADS,
    max_new_tokens: int = 64,
    limit: int | None = None,
    rounds: int = 3,
    live: int = 3,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    device: str | None = None,
    cluster: str | None = None,
    progress: Progress = True,
) -> StudyResult:
    """Find the fastest draft and lookahead on this machine: record, replay, profile, predict, verify live.

    drafts: names of draft models, for the drafters model and tree.
    out: folder of the run; all raw records are kept there, and reused.
    drafters: what proposes: each draft (model); each draft, branching into a tree; repeated text (ngram); the target
    without some parts (skip); heads on the target (medusa).
    node_counts: sizes of trees. heads: folder of Medusa heads. skips: what `skip-search` wrote.
    rounds: samples of each timing. live: how many of the best to run live.
    """
    from shallowdraft.studying.skip_search import read_trials
    from shallowdraft.studying.study import NODES, Plan
    from shallowdraft.studying.study import study as run_study

    require_at_least(1, rounds=rounds)
    require_at_least(0, live=live)
    require_at_least(2, max_new_tokens=max_new_tokens)
    names = list(dict.fromkeys(as_list(drafts)))
    check_drafters(drafters, names, node_counts, heads, skips, max_new_tokens)
    sizes = sorted(set(node_counts)) or NODES
    chosen = gather_prompts(prompts, limit)
    plan = Plan(chosen, parse_lookaheads(lookaheads), max_new_tokens, rounds=rounds, live=live, nodes=sizes)
    left_out = None if skips is None else read_trials(Path(skips))[0].skips
    where = executor(cluster, device)
    model = load_target(target, dtype, device)
    load = partial(load_draft_model, dtype=draft_dtype or dtype, device=device)
    proposers, failed = _proposers(model, drafters, names, load, left_out, heads)
    return run_study(model, proposers, plan, Path(out), following(progress), failed, where)


def _proposers(
    target: "Model",
    drafters: Sequence[StudyDrafter],
    drafts: Sequence[str],
    load: "Callable[[str], Model]",
    skips: Sequence[int] | None,
    heads: str | Path | None,
) -> "tuple[list[Proposer], dict[str, str]]":
    """Return the proposers in the order of the drafters, and the drafts that cannot be loaded, with the reason."""
    from shallowdraft.models.heads import load_heads
    from shallowdraft.studying import proposers

    loaded, failed = proposers.load_drafts(target, load, drafts)
    makers: dict[StudyDrafter, Callable[[], list[Proposer]]] = {
        "model": lambda: [proposers.model_proposer(draft) for draft in loaded],
        "tree": lambda: [proposers.tree_proposer(draft) for draft in loaded],
        "ngram": lambda: [proposers.ngram_proposer(target)],
        "skip": lambda: [proposers.skip_proposer(target, skips)],
        "medusa": lambda: [proposers.medusa_proposer(target, load_heads(target, heads), str(heads or "heads"))],
    }
    return [proposer for drafter in dict.fromkeys(drafters) for proposer in makers[drafter]()], failed


def check_drafters(
    drafters: Sequence[StudyDrafter],
    drafts: Sequence[str],
    node_counts: Sequence[int],
    heads: str | Path | None,
    skips: str | Path | None,
    max_new_tokens: int,
) -> None:
    """Refuse drafters that lack what they need, and options that no drafter takes."""
    from shallowdraft.limits import MOST_NODES
    from shallowdraft.replaying.tree import DEEPEST

    chosen = set(drafters)
    if not chosen:
        raise OptionError("--drafters is empty; name model, tree, ngram, skip or medusa")
    for option, present, takers in (
        ("--drafts", bool(drafts), {"model", "tree"}),
        ("--node-counts", bool(node_counts), {"tree", "medusa"}),
        ("--heads", heads is not None, {"medusa"}),
        ("--skips", skips is not None, {"skip"}),
    ):
        if present and not chosen & takers:
            raise OptionError(f"{option} is for --drafters {' or '.join(sorted(takers))}")
    if chosen & {"model", "tree"} and not drafts:
        raise OptionError("give --drafts; the drafters model and tree need them, ngram, skip and medusa do not")
    if not all(1 <= count <= MOST_NODES for count in node_counts):
        raise OptionError(f"--node-counts is {' '.join(map(str, node_counts))}; a tree has 1 to {MOST_NODES}")
    if "tree" in chosen and max_new_tokens <= DEEPEST:
        raise OptionError(f"the drafter tree chooses trees by outputs of more than {DEEPEST} --max-new-tokens")
