"""shallowdraft generate: decode a prompt, with a draft or without."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shallowdraft.commands.options import (
    Chat,
    Draft,
    DraftCommand,
    Heads,
    Json,
    MaxNewTokens,
    Name,
    Nodes,
    Prompts,
    Seed,
    Skips,
    Target,
    Temperature,
    TopK,
    TopP,
)
from shallowdraft.errors import OptionError
from shallowdraft.shapes.shape import require_one_kind

if TYPE_CHECKING:
    from shallowdraft.decoding.generate import Stream
    from shallowdraft.decoding.options import Options
    from shallowdraft.decoding.results import Generation
    from shallowdraft.decoding.statistics import Statistics
    from shallowdraft.models.tree import Tree


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(DraftCommand):
    """Decode a prompt with a target and, if given, a draft: the same output, sooner.

    On a terminal the text streams in two colours: accepted draft tokens in green, the target's own plain.
    Example: shallowdraft generate --target DIR --draft DIR --prompt "Once upon a time"
    """

    target: Target
    prompt: Name = None
    """The text to continue; of an encoder–decoder what it reads."""
    prompt_ids: tuple[int, ...] = ()
    """Instead of text: the prompt's token ids, for a target without a tokenizer too."""
    prompts: Prompts = ()
    draft: Draft = None
    drafter: Literal["model", "tree", "several", "skip", "ngram", "medusa"] = "model"
    """What proposes: the draft model; the draft model, branching into a tree or drawing several chains; without a draft
    the target itself, parts of it skipped; the text, where it repeats (ngram); or heads on the target (medusa)."""
    nodes: Nodes = None
    tree: Name = None
    """File of a tree, which `replay --nodes N --out FILE` wrote. Default: one of --nodes, 16, by usual acceptance."""
    heads: Heads = None
    skips: Skips = None
    min_confidence: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draft on only while the draft's own probability of its last token is at least P: one token
    at least, --lookahead at most. `replay --min-confidence` tells what each P would keep. Not on a
    GPU."""
    rule: Literal["token", "block"] = "token"
    """How drawn proposals are judged: token by token, or as a whole, which accepts more. Either is lossless."""
    lookahead: int | Literal["auto"] = 5
    """Lookahead: draft tokens an iteration, 1 to 32. auto: what pays, chosen anew as the text goes on."""
    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    seed: Seed = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    chat: Chat = False
    tensor_parallel: bool = False
    """Split the target over the processes of `torchrun --nproc-per-node N -m shallowdraft generate …`."""
    json_output: Json = False
    """Print one JSON object {"text", "token_ids", "stats", …} and nothing else; for --prompts one with a list of these
    as "generations" and the sum of their statistics as "stats"."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft import distributed
        from shallowdraft.api.inputs import gather_prompts
        from shallowdraft.prompts import Prompt

        self._check()
        self.set_threads()
        several = [prompt for _, prompt in gather_prompts(self.prompts, None)] if self.prompts else []
        options = self._options()
        target = sd.load(self.target, self.dtype, self.device, parallel=self.tensor_parallel)
        if self.draft is not None:
            options["draft"] = sd.load_draft(self.draft, self.draft_dtype or self.dtype, self.device)
        if self.drafter == "medusa":
            options["heads"] = sd.load_heads(target, self.heads)
        speculative = self.draft is not None or self.drafter != "model"
        results = []
        for prompt in several or [Prompt("", "", self.prompt or "", self.prompt_ids)]:
            text = target.encode_chat(prompt.turn) if self.chat else prompt.content
            pieces = sd.stream(target, text, **options)
            if self.json_output or not distributed.is_first():
                _drain(pieces)
            else:
                spelled = target.tokenizer is not None
                _show(pieces, prompt.text if several else "", speculative=speculative, spelled=spelled)
            results.append((prompt.id, pieces.result))
        first = distributed.is_first()
        distributed.leave()
        if not first:
            return 0
        whole = sd.total([result.stats for _, result in results], one_batch=False)
        if self.json_output:
            generations = [{"id": id_} | _as_json(result) for id_, result in results]
            printed = {"stats": whole.to_json(), "generations": generations} if several else generations[0]
            print(json.dumps(printed, ensure_ascii=False))
        elif several:
            _say(f"{len(results)} prompts: {_summary(whole, speculative=speculative)}")
        return 0

    def _check(self) -> None:
        from shallowdraft.decoding.options import BRANCHING, DRAFTLESS
        from shallowdraft.distributed import launched
        from shallowdraft.models.checkpoint import find_folder, read_shape

        if launched() > 1 and not self.tensor_parallel:
            raise OptionError(
                f"torchrun started {launched()} processes, which would all do the same; "
                "add --tensor-parallel to split the target over them, or leave torchrun out"
            )
        if [self.prompt is not None, bool(self.prompts), bool(self.prompt_ids)].count(True) != 1:
            raise OptionError(
                "give --prompt with a text, or --prompts with a set or a file of them, or --prompt-ids with token ids"
            )
        if self.draft is not None and self.drafter in DRAFTLESS:
            raise OptionError(f"the {self.drafter} drafter takes no --draft; leave one of the two out")
        if self.draft is None and self.drafter in BRANCHING and self.drafter not in DRAFTLESS:
            raise OptionError("a tree is proposed by a draft model; name one with --draft")
        if self.heads is not None and self.drafter != "medusa":
            raise OptionError("--heads is for --drafter medusa")
        if self.skips is not None and self.drafter != "skip":
            raise OptionError("--skips is for --drafter skip")
        if self.draft is not None:
            require_one_kind(*(read_shape(find_folder(name, weights=False)) for name in (self.target, self.draft)))

    def _options(self) -> "Options":
        """Return the options of `sd.stream` except the models, checked before those are loaded."""
        from shallowdraft.decoding.options import Options, Settings
        from shallowdraft.studying.skip_search import read_trials

        options: Options = {
            "drafter": self.drafter,
            "min_confidence": self.min_confidence,
            "rule": self.rule,
            "lookahead": self.lookahead,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
        }
        if self.nodes is not None:
            options["nodes"] = self.nodes
        if self.tree is not None:
            options["tree"] = _tree(Path(self.tree))
        if self.skips is not None:
            options["skips"] = read_trials(Path(self.skips))[0].skips
        Settings(**options)
        return options


def _tree(file: Path) -> "Tree":
    from shallowdraft.models.checkpoint import read_json
    from shallowdraft.models.tree import Tree

    parents = read_json(file).get("parents") if file.is_file() else None
    if not isinstance(parents, list) or not all(isinstance(parent, int) for parent in parents):
        raise OptionError(f"{file}: this is no tree; write one with shallowdraft replay --nodes N --out FILE")
    return Tree(tuple(parents))


def _drain(pieces: "Stream") -> None:
    for _ in pieces:
        pass


def _as_json(result: "Generation") -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }


def _show(pieces: "Stream", prompt: str, *, speculative: bool, spelled: bool) -> None:
    """Print the text to stdout, in colour on a terminal, after its prompt if there are several; statistics to stderr.

    Without a tokenizer, token ids are printed instead of text.
    """
    from rich.text import Text

    from shallowdraft.display.console import Console

    out = Console(highlight=False, soft_wrap=True)
    if prompt:
        out.print(Text(prompt, style="bold"), end="")
    for piece in pieces:
        text = piece.text if spelled else f"{piece.token_id} "
        if out.is_terminal:
            out.print(Text(text, style="green" if piece.drafted else ""), end="")
        else:
            sys.stdout.write(text)  # as it is: rich would turn tabs into spaces
        sys.stdout.flush()
    print()
    _say(f"{_summary(pieces.result.stats, speculative)} · ended by {pieces.result.finish_reason}")


def _say(line: str) -> None:
    from shallowdraft.display.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim")


def _summary(stats: "Statistics", speculative: bool) -> str:
    line = f"{stats.tokens} tokens in {stats.total_s:.2f} s · {stats.tokens_per_s:.1f} tokens/s"
    if speculative and stats.iterations:
        line += f" · TAR {stats.tar:.2f} · {stats.acceptance_rate:.0%} of drafted tokens accepted"
    line += f" · prefill {stats.prefill_s:.2f} s, draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s"
    return f"{line}, other {stats.other_s:.2f} s"
