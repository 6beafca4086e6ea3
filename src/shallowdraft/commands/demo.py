"""shallowdraft demo: a synthetic pair, decoded plainly and with speculation, side by side."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft import shapes
from shallowdraft.commands.options import ModelCommand
from shallowdraft.errors import OptionError

if TYPE_CHECKING:
    from shallowdraft.decoding.divergence import Divergence
    from shallowdraft.decoding.statistics import Statistics

TARGET_SHAPE = "11x640/10h/1728"  # 60 M parameters
DRAFT_SHAPE = "2x256/4h/688"  # 4 M parameters
VOCABULARY = 4096


@dataclass(frozen=True, kw_only=True)
class Demo(ModelCommand):
    """Make a target of 60 M parameters and a draft of 4 M, decode with and without the draft, and compare.

    Needs no download and about 15 seconds on two cores.
    """

    agreement: float = 0.8
    """Share of tokens on which the two agree."""
    lookahead: int = 5
    """Draft tokens an iteration."""
    max_new_tokens: int = 256
    """Tokens to decode."""
    repeats: int = 3
    """Times each, taking turns; the table shows the median."""

    def run(self) -> int:
        import shallowdraft as sd
        from shallowdraft.decoding.divergence import explain
        from shallowdraft.decoding.generation import Options
        from shallowdraft.models.synthetic import make_pair

        if self.max_new_tokens < 2 or self.repeats < 1:
            raise OptionError("the demo needs --max-new-tokens of at least 2 and --repeats of at least 1")
        self.set_threads()
        pair = make_pair(
            shapes.parse(TARGET_SHAPE, vocab=VOCABULARY), shapes.parse(DRAFT_SHAPE, vocab=VOCABULARY), self.agreement
        )
        with tempfile.TemporaryDirectory(prefix="shallowdraft-") as folder:
            target, draft = (sd.load(path, self.dtype, self.device) for path in pair.save(Path(folder)))
        prompt = "A shallow-draft boat is wide and flat; so is a good draft model."
        ways: tuple[Options, Options] = (
            {"max_new_tokens": self.max_new_tokens},
            {"max_new_tokens": self.max_new_tokens, "draft": draft, "lookahead": self.lookahead},
        )
        turns = [[sd.generate(target, prompt, **way) for way in ways] for _ in range(1 + self.repeats)]
        turns = turns[1:]  # the first runs are slower
        plain, speculative = ([turn[side] for turn in turns] for side in (0, 1))
        differences = [explain(target, target.encode(prompt), plain[0].token_ids, run.token_ids) for run in speculative]
        middle = [sorted((run.stats for run in side), key=_speed)[len(side) // 2] for side in (plain, speculative)]
        _show(*middle, lookahead=self.lookahead, expected_tar=pair.tar(self.lookahead), found=differences[0])
        return 0 if all(found is None or found.tie for found in differences) else 1


def _speed(stats: "Statistics") -> float:
    return stats.decode_tokens_per_s


def _show(
    plain: "Statistics",
    speculative: "Statistics",
    *,
    lookahead: int,
    expected_tar: float,
    found: "Divergence | None",
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"target {TARGET_SHAPE}, draft {DRAFT_SHAPE}, lookahead {lookahead}, batch 1")
    columns = ("", "tokens/s", "TAR", "iteration", "draft", "verify", "other")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, stats in (("plain decoding", plain), ("with the draft", speculative)):
        parts = (stats.draft_s, stats.verify_s, stats.other_s)
        each = [f"{seconds / max(1, stats.iterations) * 1e3:.2f} ms" for seconds in (sum(parts), *parts)]
        table.add_row(name, f"{stats.decode_tokens_per_s:.1f}", f"{stats.tar:.2f}", *each)
    console = Console(highlight=False)
    console.print(table)
    ratio = speculative.decode_tokens_per_s / plain.decode_tokens_per_s
    outputs = "outputs are identical" if found is None else str(found)
    if ratio > speculative.tar:
        console.print(
            "more than TAR is not possible: the machine was busy with something else; try again", style="yellow"
        )
    console.print(
        f"{ratio:.2f}x faster at {speculative.acceptance_rate:.0%} acceptance "
        f"(TAR {speculative.tar:.2f}, over the whole vocabulary {expected_tar:.2f}); {outputs}.",
        soft_wrap=True,
    )
