"""Create the drafter that the options name."""

from shallowdraft.decoding.drafters.drafter import Drafter, NoDrafter
from shallowdraft.decoding.drafters.medusa import MedusaDrafter
from shallowdraft.decoding.drafters.model import ModelDrafter
from shallowdraft.decoding.drafters.ngram import NgramDrafter
from shallowdraft.decoding.drafters.skip import SkipDrafter, early_exit
from shallowdraft.decoding.drafters.tree import TreeDrafter
from shallowdraft.decoding.options import BRANCHING, Settings
from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model, check_vocabulary
from shallowdraft.shapes.shape import require_one_kind


def new_drafter(target: Model, settings: Settings) -> Drafter:
    draft, lookahead = settings.draft, settings.longest_lookahead
    if settings.drafter == "ngram":
        return NgramDrafter(lookahead, settings.sampling, target.shape.vocab, whole=settings.whole)
    if settings.drafter == "skip":
        skips = early_exit(target.shape.layers) if settings.skips is None else settings.skips
        return SkipDrafter(target.decoder, skips, lookahead, settings.sampling, settings.min_confidence)
    if settings.drafter == "medusa":
        if settings.heads is None:
            raise OptionError("the medusa drafter needs heads on the target; give those that sd.load_heads returns")
        tree = settings.shape_of_tree(target.shape.vocab)
        if tree.depth > settings.heads.shape.count:
            raise OptionError(
                f"a tree of depth {tree.depth} needs as many heads; there are {settings.heads.shape.count}"
            )
        return MedusaDrafter(target.decoder, settings.heads, tree, settings.sampling)
    if draft is None:
        if settings.drafter in BRANCHING:
            raise OptionError("a tree is proposed by a draft model; give one as draft")
        return NoDrafter()
    check_vocabulary(target, draft).require()
    require_one_kind(target.shape, draft.shape)
    if draft.device != target.device:
        raise OptionError(f"the target is on {target.device} and the draft on {draft.device}; load both on one device")
    if settings.drafter in BRANCHING:
        independent = settings.drafter == "several"
        tree, sampling = settings.shape_of_tree(min(target.shape.vocab, draft.shape.vocab)), settings.sampling
        return TreeDrafter(draft.decoder, tree, sampling, target.shape.vocab, independent=independent)
    return ModelDrafter(draft.decoder, lookahead, settings.sampling, target.shape.vocab, settings.min_confidence)
