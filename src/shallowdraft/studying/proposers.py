"""Proposers of a study: the needs of each kind of drafting, its replay, and its options in the engine."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shallowdraft.decoding.drafters.skip import early_exit
from shallowdraft.decoding.options import BRANCHING, Options
from shallowdraft.errors import ShallowdraftError
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.replaying.medusa import replay_medusa
from shallowdraft.replaying.model import replay_model
from shallowdraft.replaying.ngram import NAME, replay_ngram
from shallowdraft.replaying.result import Replay
from shallowdraft.replaying.skip import replay_skip, skip_name
from shallowdraft.replaying.tree import replay_tree
from shallowdraft.runs.candidate import DrafterName, ProposerKey
from shallowdraft.runs.folder import RunFolder
from shallowdraft.runs.trace import Trace


@dataclass(frozen=True)
class Proposer:
    """A kind of drafting with its draft model or heads, ready to be replayed and to run."""

    name: str
    """The name in tables."""
    drafter: DrafterName
    draft: str
    """The name in records, which tells proposers of one drafter apart."""
    shape: str
    context: int
    """The longest text that it reads."""
    options: Options = field(repr=False)
    """Options of `generate`; a candidate adds its lookahead and tree."""
    replay: Callable[[Trace, Sequence[int], Path], Replay] = field(repr=False)
    """Replays a trace at some sizes; the folder keeps results that take long."""
    layers: int = 0
    """Layers of a draft model; other proposers have no model of their own."""
    parameters: int = 0
    """Parameters of a draft model."""

    @property
    def key(self) -> ProposerKey:
        return self.drafter, self.draft

    @property
    def branches(self) -> bool:
        """Whether the size of its proposals is a number of nodes, not a lookahead."""
        return self.drafter in BRANCHING


def model_proposer(draft: Model) -> Proposer:
    """Return the proposer of a draft model that proposes chains."""
    return Proposer(
        draft.name,
        "model",
        draft.name,
        str(draft.shape),
        draft.shape.context,
        Options(draft=draft),
        lambda trace, _sizes, _folder: replay_model(draft, trace, fits=True),
        draft.shape.layers,
        draft.shape.parameters,
    )


def tree_proposer(draft: Model) -> Proposer:
    """Return the proposer of a draft model that proposes, at each size, the tree that keeps most of the trace."""
    return Proposer(
        f"tree {draft.name}",
        "tree",
        draft.name,
        str(draft.shape),
        draft.shape.context,
        Options(draft=draft, drafter="tree"),
        lambda trace, sizes, _folder: replay_tree(draft, trace, sizes, fits=True),
        draft.shape.layers,
        draft.shape.parameters,
    )


def ngram_proposer(target: Model) -> Proposer:
    """Return the proposer of n-grams; on a GPU it always proposes whole proposals."""
    whole = target.device.type == "cuda"
    return Proposer(
        NAME,
        "ngram",
        NAME,
        "no model",
        target.shape.context,
        Options(drafter="ngram"),
        lambda trace, sizes, _folder: replay_ngram(trace, sizes, whole=whole),
    )


def skip_proposer(target: Model, skips: Collection[int] | None = None) -> Proposer:
    """Return the proposer of the target without some parts; by default without the second half of its layers."""
    chosen = tuple(sorted(early_exit(target.shape.layers) if skips is None else skips))
    target.decoder.skipping(chosen)  # raises on parts that the target does not have
    return Proposer(
        "skip",
        "skip",
        skip_name(chosen),
        f"{target.shape} without {len(chosen)} of {2 * target.shape.layers} parts",
        target.shape.context,
        Options(drafter="skip", skips=chosen),
        lambda trace, sizes, folder: replay_skip(target, chosen, trace, sizes, RunFolder(folder).skip_replays),
    )


def medusa_proposer(target: Model, heads: Heads, name: str) -> Proposer:
    """Return the proposer of Medusa heads on the target; `name` is their name in records."""
    return Proposer(
        "medusa",
        "medusa",
        name,
        f"{heads.shape.count} heads",
        target.shape.context,
        Options(drafter="medusa", heads=heads),
        lambda trace, sizes, _folder: replay_medusa(target, heads, name, trace, sizes),
    )


def load_drafts(
    target: Model, load: Callable[[str], Model], names: Sequence[str]
) -> tuple[list[Model], dict[str, str]]:
    """Load drafts; return those that can be used, and why the others cannot."""
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
