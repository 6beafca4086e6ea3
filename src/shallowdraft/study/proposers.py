"""Who can propose in a study: what each needs, how its acceptance is found, how it is run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft.decoding.candidate import ProposerKey
from shallowdraft.decoding.drafters.skip import early_exit
from shallowdraft.decoding.options import BRANCHING, DrafterName, Options
from shallowdraft.errors import ShallowdraftError
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.replay.medusa import replay_heads
from shallowdraft.replay.model import replay
from shallowdraft.replay.ngram import NAME, replay_copies
from shallowdraft.replay.result import Replay
from shallowdraft.replay.skip import name_of, replay_skips
from shallowdraft.replay.trace import Trace
from shallowdraft.replay.tree import replay_trees


@dataclass(frozen=True)
class Proposer:
    """A draft model, or whatever else proposes."""

    name: str
    """In tables."""
    drafter: DrafterName
    draft: str
    """In records, where it tells those of a kind apart."""
    shape: str
    context: int
    """The longest text that it can read."""
    options: Options = field(repr=False)
    """To generate with it; lookahead and tree are a way's."""
    replay: Callable[[Trace, Sequence[int], Path], Replay] = field(repr=False)
    """Given a trace, sizes of proposals and a folder for what takes time to find."""
    layers: int = 0
    """Of a draft model; what else proposes has none of its own."""
    parameters: int = 0
    """Likewise."""

    @property
    def whose(self) -> ProposerKey:
        return self.drafter, self.draft

    @property
    def branches(self) -> bool:
        """Whether the size of a proposal is its number of nodes."""
        return self.drafter in BRANCHING


def drafting_model(draft: Model) -> Proposer:
    """One token after the other."""
    return Proposer(
        draft.name,
        "model",
        draft.name,
        str(draft.shape),
        draft.shape.context,
        Options(draft=draft),
        lambda trace, _sizes, _folder: replay(draft, trace, fits=True),
        draft.shape.layers,
        draft.shape.parameters,
    )


def branching_model(draft: Model) -> Proposer:
    """A tree of each size, the one that keeps most of the trace."""
    return Proposer(
        f"tree {draft.name}",
        "tree",
        draft.name,
        str(draft.shape),
        draft.shape.context,
        Options(draft=draft, drafter="tree"),
        lambda trace, sizes, _folder: replay_trees(draft, trace, sizes, fits=True),
        draft.shape.layers,
        draft.shape.parameters,
    )


def copying(target: Model) -> Proposer:
    whole = target.device.type == "cuda"
    return Proposer(
        NAME,
        "ngram",
        NAME,
        "no model",
        target.shape.context,
        Options(drafter="ngram"),
        lambda trace, sizes, _folder: replay_copies(trace, sizes, whole=whole),
    )


def skipping(target: Model, skips: Collection[int] | None = None) -> Proposer:
    """By default early exit at half the depth."""
    chosen = tuple(sorted(early_exit(target.shape.layers) if skips is None else skips))
    target.decoder.skipping(chosen)  # refuses parts that there are not
    return Proposer(
        "skip",
        "skip",
        name_of(chosen),
        f"{target.shape} without {len(chosen)} of {2 * target.shape.layers} parts",
        target.shape.context,
        Options(drafter="skip", skips=chosen),
        lambda trace, sizes, folder: replay_skips(target, chosen, trace, sizes, folder / "skips.jsonl"),
    )


def guessing(target: Model, heads: Heads, name: str) -> Proposer:
    """Heads on the target; `name` is what records call them."""
    return Proposer(
        "medusa",
        "medusa",
        name,
        f"{heads.shape.count} heads",
        target.shape.context,
        Options(drafter="medusa", heads=heads),
        lambda trace, sizes, _folder: replay_heads(target, heads, name, trace, sizes),
    )


def load_drafts(
    target: Model, load: Callable[[str], Model], names: Sequence[str]
) -> tuple[list[Model], dict[str, str]]:
    """Those that can be used, and why others cannot."""
    drafts, failed = [], {}
    for name in names:
        try:
            draft = load(name)
            check_vocabulary(target, draft).require()
        except (ShallowdraftError, OSError) as error:
            failed[name] = str(error)
        else:
            drafts.append(draft)
    return drafts, failed
