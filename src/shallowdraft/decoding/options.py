"""The options of generation: their types, defaults and checks. `generate` describes each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from shallowdraft.decoding.lookahead_policy import MAX_AUTO_LOOKAHEAD
from shallowdraft.decoding.verification import Rule
from shallowdraft.errors import OptionError
from shallowdraft.limits import MAX_LOOKAHEAD, MOST_NODES
from shallowdraft.models.heads import Heads
from shallowdraft.models.model import Model
from shallowdraft.models.tree import Tree, best_tree, chains
from shallowdraft.runs.candidate import DrafterName
from shallowdraft.runs.sampling import Sampling

BRANCHING = ("tree", "several", "medusa")
"""Drafters that propose a tree of tokens."""
DRAFTLESS = ("skip", "ngram", "medusa")
"""Drafters that need no draft model."""

USUAL_RANKS = (0.6, 0.15, 0.07, 0.04, 0.03, 0.02)  # how often a draft's first, second, … choice is the target's


class Options(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`: the fields of `Settings` that callers may set."""

    draft: Model | None
    drafter: DrafterName
    lookahead: int | Literal["auto"]
    nodes: int
    tree: Tree | None
    skips: Sequence[int] | None
    heads: Heads | None
    min_confidence: float | None
    rule: Rule
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stop: Sequence[str]
    stop_tokens: Sequence[int] | None


@dataclass(frozen=True)
class Settings:
    """Checked options with their defaults, and two fields that only the package itself sets."""

    draft: Model | None = None
    drafter: DrafterName = "model"
    lookahead: int | Literal["auto"] = 5
    nodes: int = 16
    tree: Tree | None = None
    skips: Sequence[int] | None = None
    heads: Heads | None = None
    min_confidence: float | None = None
    rule: Rule = "token"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    full_proposals: bool = False
    """Whether n-gram proposals always have the length of the lookahead, so that it can be timed."""
    streams: Sequence[int] | None = None
    """Numbers of the rows' random streams; None: the rows' indices."""

    def __post_init__(self) -> None:
        in_range = isinstance(self.lookahead, int) and 1 <= self.lookahead <= MAX_LOOKAHEAD
        if not in_range and self.lookahead != "auto":
            raise OptionError(
                f"lookahead is {self.lookahead!r}; it must be a whole number from 1 to {MAX_LOOKAHEAD}, or auto"
            )
        for name, value, choices in (("drafter", self.drafter, DrafterName), ("rule", self.rule, Rule)):
            if value not in get_args(choices):
                raise OptionError(f"{name} is {value!r}; it must be one of {', '.join(get_args(choices))}")
        if self.draft is not None and self.drafter in DRAFTLESS:
            raise OptionError(f"the {self.drafter} drafter takes no draft model; leave one of the two out")
        if self.heads is not None and self.drafter != "medusa":
            raise OptionError("heads are for the medusa drafter")
        if self.tree is not None and self.drafter not in ("tree", "medusa"):
            raise OptionError("a tree is for the tree and medusa drafters")
        if self.drafter in BRANCHING:
            self._check_tree()
        if self.min_confidence is not None:
            self._check_confidence()
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens is {self.max_new_tokens}; it must be a whole number of at least 1")
        _ = self.sampling  # checks temperature, top_k, top_p and seed
        if isinstance(self.stop, str) or "" in self.stop:
            raise OptionError("stop must be a list of strings, none of them empty")

    def _check_confidence(self) -> None:
        if not isinstance(self.min_confidence, int | float) or not 0 <= self.min_confidence <= 1:
            raise OptionError(f"min_confidence is {self.min_confidence!r}; it must be a probability, from 0 to 1")
        if self.drafter not in ("model", "skip") or self.lookahead == "auto":
            raise OptionError(
                "min_confidence is for the model and skip drafters, with a number as lookahead: the longest proposal"
            )

    def _check_tree(self) -> None:
        if self.lookahead == "auto" or self.rule != "token":
            raise OptionError("a tree needs a number as lookahead and the rule token")
        if self.drafter == "several" and self.temperature == 0:
            raise OptionError("several chains of a tree differ only if they are drawn; give a temperature above 0")
        fewest = 1 if self.drafter == "medusa" else self.lookahead
        if self.tree is None and not (isinstance(self.nodes, int) and fewest <= self.nodes <= MOST_NODES):
            raise OptionError(f"nodes is {self.nodes!r}; a tree of depth {self.lookahead} has {fewest} to {MOST_NODES}")

    @property
    def speculative(self) -> bool:
        return self.draft is not None or self.drafter in DRAFTLESS

    def shape_of_tree(self, vocab: int) -> Tree:
        """Return the tree to propose, which by default is the one expected to be accepted furthest.

        Medusa heads bring measured acceptance by rank; a draft model's is taken to be the usual
        one.
        """
        if self.tree is not None:
            return self.tree
        assert isinstance(self.lookahead, int)
        if self.drafter == "several":
            return chains(self.nodes // self.lookahead, self.lookahead)
        depth = self.longest_lookahead
        measured = self.heads.chances if self.heads else []
        return best_tree(measured[:depth] or [USUAL_RANKS[:vocab]] * depth, self.nodes)

    @property
    def longest_lookahead(self) -> int:
        """The most tokens that a proposal may be deep; 0 without speculation."""
        if not self.speculative:
            return 0
        longest = MAX_AUTO_LOOKAHEAD if self.lookahead == "auto" else self.lookahead
        return min(longest, self.heads.shape.count) if self.heads else longest

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)
