"""shallowdraft design: which shape a draft should have on this machine, and building it."""

import json
from dataclasses import asdict, dataclass
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shallowdraft.commands.options import ClusterCommand, Name, Number, require_decoder_only
from shallowdraft.commands.study import parse_lookaheads
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shallowdraft.profiling.latency_model import LatencyModel
    from shallowdraft.records import Record
    from shallowdraft.runs.profile import Profile
    from shallowdraft.shapes.shape import ModelShape
    from shallowdraft.study.design import Design as Found
    from shallowdraft.study.design import Requirement
    from shallowdraft.study.search import SearchResult


@dataclass(frozen=True, kw_only=True)
class DesignCommand(ClusterCommand):
    """Shapes that a parent can be pruned to: how long each would draft here, and what TAR it needs to be worth it.

    Times come from a profile with `--shapes auto`. With --trace, the drafts in that profile are replayed, and the TAR
    that beats the best of them is shown too. With --search the best are built: successive halving over shapes, each
    distilled on text that the target writes, until the fastest is left. Stopped half-way, the same command goes on. A
    candidate that fails is passed over; OUT/search.jsonl says why, and without that line it is tried again.
    Example: shallowdraft design --target DIR --profile profile.jsonl --trace trace.jsonl --search --out found
    """

    target: str
    """Checkpoint folder, hub id or zoo name."""
    profile: str
    """What `profile --shapes auto` wrote, on this machine."""
    parent: tuple[str, ...] = ()
    """What a draft would be pruned from; with --search also several, drafts at hand among them. Default: the target."""
    trace: Name = None
    """What `record` wrote for the target: which of the profile's drafts is best, and how fast."""
    max_params: Number = None
    """Leave out shapes with more parameters."""
    lookaheads: str = "1:12"
    """Lookaheads to consider: from:to, or several numbers like 1,2,4."""
    context: int = 128
    """Tokens before a new one, without --trace."""
    search: bool = False
    """Build drafts and find the fastest; needs --trace and --out."""
    out: Name = None
    """Folder for what --search builds: OUT/draft is the winner."""
    candidates: int = 6
    """Shapes to begin with; a third of them goes on from each rung to the next."""
    tokens: int = 500_000
    """Tokens to distil on, over all candidates."""
    text: int = 200_000
    """Tokens that the target writes to learn from; they are read several times."""
    corpus: Name = None
    """Folder of text to begin the target's from, and to learn from beside it. Default: the target begins by itself."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print {"best", "law", "shapes": [{"shape", "parameters", "step_s", "break_even", "to_win", …}, …]}; with --search
    {"best", "found", "draft", "failed"}."""

    def run(self) -> int:
        from shallowdraft.commands.progress import notes
        from shallowdraft.identity import folder_digest
        from shallowdraft.models.checkpoint import find_folder, read_shape
        from shallowdraft.models.model import resolve_device
        from shallowdraft.profiling.latency_model import fit, observations
        from shallowdraft.profiling.measure import require_machine
        from shallowdraft.runs.profile import read_profile
        from shallowdraft.study.design import design, enumerate_shapes

        if self.search and not (self.trace and self.out):
            raise OptionError("--search needs --trace, to replay what it builds on, and --out")
        if not self.search and len(self.parent) > 1:
            raise OptionError("several parents are for --search; name one")
        if self.cluster is not None and not self.search:
            raise OptionError("--cluster is for --search, all else is quick; leave one out or give both")
        lookaheads = parse_lookaheads(self.lookaheads)
        profile = read_profile(Path(self.profile))
        notes(profile.notes)
        require_machine(profile, resolve_device(self.device))
        profile.require_target(self.target, folder_digest(find_folder(self.target)))
        names = self.parent or (self.target,)
        require_decoder_only(self.target, *names)
        target, *parents = (read_shape(find_folder(name)) for name in (self.target, *names))
        for parent in parents:
            if target.vocab != parent.vocab:
                raise OptionError(f"a parent has a vocabulary of {parent.vocab:,}, the target of {target.vocab:,}")
        law = fit(observations(profile, parents[0]))
        best, context = self._best(profile) if self.trace else ({}, float(self.context))
        goal = best.get("tokens_per_s")
        if self.search:
            return self._search(dict(zip(names, parents, strict=True)), law, profile, lookaheads, best, context)
        shapes = enumerate_shapes(parents[0], self.max_params)
        found = design(shapes, law, profile, context, lookaheads, goal)
        if self.json_output:
            made = [as_json(one) for one in found]
            print(json.dumps({"best": best or None, "law": asdict(law), "shapes": made}))
        else:
            show(found, best, f"typically {law.typical_error:.0%} off, {law.worst_error:.0%} at worst")
        return 0

    def _search(
        self,
        parents: "dict[str, ModelShape]",
        law: "LatencyModel",
        profile: "Profile",
        lookaheads: list[int],
        best: dict[str, Any],
        context: float,
    ) -> int:
        import shutil

        from shallowdraft.building.token_store import open_store
        from shallowdraft.commands import training
        from shallowdraft.commands.progress import follow
        from shallowdraft.models.model import load
        from shallowdraft.runs.folder import RunFolder
        from shallowdraft.runs.search import read_search
        from shallowdraft.runs.trace import read_trace
        from shallowdraft.study.search import (
            Builder,
            Search,
            choose_candidates,
            plan_rungs,
            write_text,
        )

        assert self.trace is not None
        assert self.out is not None
        out = Path(self.out)
        out.mkdir(parents=True, exist_ok=True)
        executor = self.executor()
        target = load(self.target, "float32", self.device, trainable=True)
        if not RunFolder(out).profile.exists():
            shutil.copy(self.profile, RunFolder(out).profile)
        goal = best.get("tokens_per_s")
        chosen = choose_candidates(parents, law, profile, context, lookaheads, goal, self.candidates, self.max_params)
        rungs = plan_rungs(len(chosen), self.tokens)
        plan = ", then ".join(f"{rung.candidates} on {rung.tokens:,} tokens each" for rung in rungs)
        training.say(f"{plan}; candidates: {', '.join(one.name for one in chosen)}")
        follow(
            "the target writes",
            write_text(target, out, self.text, Path(self.corpus) if self.corpus else None),
            self.text,
        )
        builder = Builder(
            target=target,
            parents={name: load(name, "float32", self.device, trainable=True) for name in parents},
            store=open_store(out / "text"),
            folder=out,
            follow=training.follow,
        )
        search = Search(
            builder=builder,
            engine=load(self.target, self.dtype, self.device),
            load_draft=self.load_draft,
            trace=read_trace(Path(self.trace)),
            profile=RunFolder(out).profile,
            lookaheads=lookaheads,
            follow=follow,
            executor=executor,
            say=training.say,
        )
        found = search.run(chosen, rungs)
        if not (out / "draft").exists():
            shutil.rmtree(out / "draft.partial", ignore_errors=True)
            shutil.copytree(found.folder, out / "draft.partial").rename(out / "draft")
        rows = read_search(RunFolder(out).search)
        if self.json_output:
            failed = [row for row in rows if "failed" in row]
            report = {"best": best or None, "found": found.record, "draft": str(out / "draft"), "failed": failed}
            print(json.dumps(report))
        else:
            show_search([row for row in rows if "failed" not in row], found, best, out / "draft")
        return 0

    def _best(self, profile: "Profile") -> tuple[dict[str, Any], float]:
        """The fastest of the profile's drafts, by prediction; and the trace's context."""
        from shallowdraft import cost
        from shallowdraft.replay.model import replay_model
        from shallowdraft.runs.trace import read_trace
        from shallowdraft.study.forecast import forecast

        assert self.trace is not None
        self.set_threads()
        trace = read_trace(Path(self.trace))
        trace.require_target(self.target, profile.about.get("target_digest"))
        made = {
            name: cost.best(forecast(replay_model(self.load_draft(name), trace), profile)) for name in profile.drafts
        }
        if not made:
            return {}, trace.mean_context
        name = max(made, key=lambda one: made[one].tokens_per_s)
        one = made[name]
        best = {"draft": name, "lookahead": one.lookahead, "tokens_per_s": one.tokens_per_s, "speed_up": one.speed_up}
        return best | {"silence": asdict(one.silence) if one.silence else None}, trace.mean_context


def show_search(rows: "Iterable[Record]", found: "SearchResult", best: dict[str, Any], draft: Path) -> None:
    from shallowdraft.commands.tables import new_table, table_console

    table = new_table("candidate", "rung", "tokens", "d", "TAR", "predicted")
    for row in sorted(rows, key=lambda one: (one["rung"], -one["tokens_per_s"])):
        figures = (str(row["rung"]), f"{row['tokens']:,}", str(row["lookahead"]), f"{row['tar']:.2f}")
        table.add_row(row["candidate"], *figures, f"{row['speed_up']:.2f}x")
    console = table_console()
    console.print(table)
    at_hand = f"; best at hand: {best['draft']}, {best['speed_up']:.2f}x" if best else ""
    speed_up, lookahead = found.record["speed_up"], found.record["lookahead"]
    console.print(
        f"{found.candidate.name} is predicted {speed_up:.2f}x at lookahead {lookahead}{at_hand}",
        style="bold",
        soft_wrap=True,
    )
    console.print(f"the draft is in {draft}; study --drafts {draft} … runs it live", style="dim", soft_wrap=True)


def as_json(one: "Found") -> dict[str, Any]:
    def needed(what: "Requirement") -> dict[str, Any]:
        return asdict(what) | {"acceptance_rate": None if isinf(what.acceptance_rate) else what.acceptance_rate}

    return {
        "shape": str(one.shape),
        "parameters": one.shape.parameters,
        "step_s": one.step_s,
        "break_even": needed(one.break_even),
        "to_win": needed(one.to_win),
        "latency_set": one.latency_set,
        "on_front": one.on_front,
    }


def show(found: "list[Found]", best: dict[str, Any], accuracy: str) -> None:
    from collections import Counter

    from shallowdraft.commands.tables import new_table, table_console
    from shallowdraft.cost import Silence

    goal = f"to beat {best['draft']}" if best else ""
    columns = ("shape", "parameters", "as fast", "ms a step", "breaks even at", *([goal] if goal else []))
    table = new_table(*columns, title="the most weights in layers for their latency")
    sets = Counter(one.latency_set for one in found)
    largest = {one.latency_set: one for one in found if one.on_front}
    for one in largest.values():
        cells = str(one.shape), f"{one.shape.parameters:,}", str(sets[one.latency_set] - 1), f"{1e3 * one.step_s:.3f}"
        table.add_row(*cells, _needed(one.break_even), *([_needed(one.to_win)] if goal else []))
    console = table_console()
    console.print(table)
    console.print(
        f"as fast: other shapes of about the same latency (--json has them); times are the law's, {accuracy}",
        style="dim",
        soft_wrap=True,
    )
    if best:
        console.print(
            f"at hand: {best['draft']} at lookahead {best['lookahead']}, {best['tokens_per_s']:.0f} tokens/s, "
            f"{best['speed_up']:.2f}x",
            soft_wrap=True,
        )
        if best["silence"]:
            console.print(f"{best['draft']} is {Silence(**best['silence'])}", soft_wrap=True)


def _needed(one: "Requirement") -> str:
    if isinf(one.acceptance_rate):
        return "never"
    return f"TAR {one.tar:.2f} at d={one.lookahead} ({one.acceptance_rate:.0%})"
