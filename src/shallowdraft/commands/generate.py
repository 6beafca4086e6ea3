"""shallowdraft generate: decode a prompt, with a draft or without."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from shallowdraft.commands.options import ModelCommand, Name, Number

if TYPE_CHECKING:
    from shallowdraft.decoding.generation import Generation, Stream


@dataclass(frozen=True, kw_only=True)
class Generate(ModelCommand):
    """Decode a prompt with a target and, if given, a draft: the same output, sooner.

    On a terminal the text streams in two colours: accepted draft tokens in green, the target's own plain.
    Example: shallowdraft generate --target DIR --draft DIR --prompt "Once upon a time"
    """

    target: str
    """Checkpoint folder or hub id of the model whose output you want."""
    prompt: str
    """The text to continue."""
    draft: Name = None
    """Checkpoint folder or hub id of a smaller model with the same vocabulary. Without one: plain decoding."""
    lookahead: int = 5
    """Draft tokens an iteration, 1 to 32."""
    max_new_tokens: int = 128
    """Stop after this many tokens."""
    temperature: float = 0.0
    """0 takes the most likely token each time; above 0 draws."""
    top_k: Number = None
    """Draw from the K most likely tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draw from the most likely tokens that together reach probability P."""
    seed: int = 0
    """Seed of the draws."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    chat: bool = False
    """Put the prompt through the target's chat template as the user's turn."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object {"text", "token_ids", "stats", …} and nothing else."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.decoding.generation import Options, Settings

        self.set_threads()
        options: Options = {
            "lookahead": self.lookahead,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
        }
        Settings(**options)  # a wrong option is found before a model is loaded
        target = sd.load(self.target, self.dtype, self.device)
        if self.draft is not None:
            options["draft"] = sd.load(self.draft, self.dtype, self.device)
        prompt = target.encode_chat([{"role": "user", "content": self.prompt}]) if self.chat else self.prompt
        pieces = sd.stream(target, prompt, **options)
        if self.json_output:
            print(json.dumps(_as_json(_drain(pieces)), ensure_ascii=False))
        else:
            _show(pieces, speculative=self.draft is not None)
        return 0


def _drain(pieces: "Stream") -> "Generation":
    for _ in pieces:
        pass
    return pieces.result


def _as_json(result: "Generation") -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }


def _show(pieces: "Stream", *, speculative: bool) -> None:
    """Text to stdout, in colour on a terminal; the line of statistics to stderr."""
    from rich.console import Console
    from rich.text import Text

    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    for piece in pieces:
        if out.is_terminal:
            out.print(Text(piece.text, style="green" if piece.drafted else ""), end="")
        else:
            sys.stdout.write(piece.text)  # as it is: rich would turn tabs into spaces
        sys.stdout.flush()
    print()
    err.print(_summary(pieces.result, speculative), style="dim")


def _summary(result: "Generation", speculative: bool) -> str:
    stats = result.stats
    line = f"{stats.tokens} tokens in {stats.total_s:.2f} s · {stats.tokens_per_s:.1f} tokens/s"
    if speculative and stats.iterations:
        line += f" · TAR {stats.tar:.2f} · {stats.acceptance_rate:.0%} of drafted tokens accepted"
    line += f" · prefill {stats.prefill_s:.2f} s, draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s"
    return f"{line}, other {stats.other_s:.2f} s · ended by {result.finish_reason}"
